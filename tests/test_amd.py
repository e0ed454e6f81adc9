"""What ROCm's tools print, as their releases print it, and what the doctor makes of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_doctor import LAPTOP

from m3cp import amd, doctor


def watts(value):
    return {"value": value, "unit": "W"}


def entry(gpu, **more):
    return {"gpu": gpu, **more}


# amd-smi 26: a list under "gpu_data", ppt0, accelerator_partition. amd-smi 24: a plain list, socket_power, compute_partition.
NEW = [
    entry(g, limit={"ppt0": {"max_power_limit": watts(1400), "min_power_limit": watts(0), "socket_power_limit": watts(1400 - 200 * g)},
                    "ppt1": {"max_power_limit": "N/A", "min_power_limit": "N/A", "socket_power_limit": "N/A"}},
          partition={"accelerator_partition": "SPX", "memory_partition": "NPS1", "partition_id": 0},
          numa={"node": g // 2, "affinity": g // 2}, driver={"name": "amdgpu", "version": "6.16.6"},
          board={"product_serial": "PCB-SECRET"}, bus={"bdf": "0000:05:00.0"})
    for g in range(2)
]  # fmt: skip
OLD = [
    entry(0, limit={"max_power": watts(750), "socket_power": watts(750)}, driver={"version": "6.10.10"},
          partition={"compute_partition": "CPX", "memory_partition": "NPS4", "partition_id": 0}, numa={"node": 0, "affinity": 0})
]  # fmt: skip
METRIC = [
    entry(0, power={"socket_power": watts(980), "throttle_status": "N/A"}, clock={"gfx_0": {"clk": {"value": 1325, "unit": "MHz"}}, "mem_0": {"clk": {"value": 1900}}},
          throttle={"accumulation_counter": 12, "ppt_accumulated": 12, "socket_thermal_accumulated": 0, "prochot_accumulated": "N/A",
                    "ppt_violation_status": "ACTIVE", "socket_thermal_violation_status": "NOT ACTIVE", "prochot_violation_status": "N/A"}),
    entry(1, power={"socket_power": "N/A", "throttle_status": "UNTHROTTLED"}, clock={"gfx_0": {"clk": "N/A"}}),
]  # fmt: skip
TOPOLOGY = [
    entry(a, bdf=f"0000:0{a}:00.0", links=[
        {"gpu": b, "bdf": "x", "weight": 0 if a == b else 15, "link_status": "ENABLED", "link_type": "SELF" if a == b else "XGMI",
         "num_hops": 0 if a == b else 1, "bandwidth": "N/A" if a == b else "50000-100000"} for b in range(2)])
    for a in range(2)
]  # fmt: skip
OLD_TOPOLOGY = [
    {"gpu": a, "link_type": {f"gpu_{b}": "SELF" if a == b else "PCIE" for b in range(2)}, "num_hops": {f"gpu_{b}": 2 for b in range(2)},
     "numa_bandwidth": {"gpu_0": "N/A", "gpu_1": "N/A"}} for a in range(2)
]  # fmt: skip
ROCM_SMI = {
    "card0": {"Compute Partition": "SPX", "Memory Partition": "NPS1", "Max Graphics Package Power (W)": "1400.0",
              "Current Socket Graphics Package Power (W)": "212.0", "sclk clock speed:": "(132Mhz)", "mclk clock speed:": "(1900Mhz)",
              "(Topology) Numa Node": "1", "Serial Number": "SECRET"},
    "card1": {"Compute Partition": "N/A"},
    "system": {"(Topology) Link type between DRM devices 0 and 1": "XGMI", "(Topology) Hops between DRM devices 0 and 1": "1",
               "(Topology) Weight between DRM devices 0 and 1": "15"},
}  # fmt: skip


def test_a_late_release():
    warned = "WARNING: user is not in the render group\n"
    found = amd.from_amd_smi(warned + json.dumps({"gpu_data": NEW}, indent=4), json.dumps({"gpu_data": METRIC}), json.dumps(TOPOLOGY))
    first, second = found.gpus
    assert (first.compute_partition, first.memory_partition, first.numa_node) == ("SPX", "NPS1", 0)
    assert (first.power_cap_w, first.power_cap_max_w, first.power_w) == (1400, 1400, 980)
    assert (first.gfx_mhz, first.memory_mhz, first.driver) == (1325, 1900, "6.16.6")
    assert first.throttled == ("ppt",) and first.throttle_counts == {"ppt": 12, "socket_thermal": 0}
    assert second.power_cap_w == 1200 and second.throttled == () and second.power_w is None and second.gfx_mhz is None
    assert found.links == (amd.Link(0, 1, "XGMI", 1, 15.0, "50000-100000"),)
    said = json.dumps(found.to_dict())
    assert json.loads(said) == found.to_dict() and "SECRET" not in said and "0000:" not in said


def test_an_early_release():
    found = amd.from_amd_smi(json.dumps(OLD), "", json.dumps(OLD_TOPOLOGY))
    (gpu,) = found.gpus
    assert (gpu.compute_partition, gpu.memory_partition, gpu.power_cap_w) == ("CPX", "NPS4", 750)
    assert gpu.throttled is None and found.links == (amd.Link(0, 1, "PCIE", 2),)


def test_several_documents_in_one_output():
    text = json.dumps(OLD, indent=4) + "\n" + json.dumps([entry(1, partition={"compute_partition": "SPX"})]) + "\n\nLegend:\n  * = Current mode"
    assert [g.compute_partition for g in amd.from_amd_smi(text, "", "").gpus] == ["CPX", "SPX"]


@pytest.mark.parametrize("static", ["", "amd-smi: error", "[", "{}", "[1, 2]", '{"gpu_data": "N/A"}', '[{"gpu": "N/A"}]'])
def test_what_is_no_answer_is_none(static):
    assert amd.from_amd_smi(static, "", "") is None
    assert amd.from_rocm_smi(static) is None


@pytest.mark.parametrize("value, number", [(12, 12), ("12 W", 12), ("(132Mhz)", 132), (watts(7.5), 7.5), ("N/A", None), (True, None), ({}, None), ([1], None)])
def test_numbers(value, number):
    assert amd.number(value) == number


def test_rocm_smi():
    found = amd.from_rocm_smi("WARNING: AMD GPU device(s) is/are in a low-power state.\n" + json.dumps(ROCM_SMI))
    first, second = found.gpus
    assert (first.compute_partition, first.memory_partition, first.numa_node) == ("SPX", "NPS1", 1)
    assert (first.power_cap_w, first.power_w, first.gfx_mhz, first.memory_mhz) == (1400, 212, 132, 1900)
    assert second == amd.Gpu(1) and first.throttled is None
    assert found.source == "rocm-smi" and found.links == (amd.Link(0, 1, "XGMI", 1, 15.0),)


def fake_tools(folder: Path, monkeypatch, **tools: str):
    """Executables of these names that print what they are told, and nothing else on PATH."""
    for name, script in tools.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(doctor, "drivers", lambda: ("amd",))


AMD_SMI = f"""case $1 in static) echo '{json.dumps(NEW)}';; metric) echo '{json.dumps(METRIC)}';; topology) echo '{json.dumps(TOPOLOGY)}';; esac"""


def test_the_doctor_asks_the_tools_that_are_here(tmp_path, monkeypatch):
    fake_tools(tmp_path, monkeypatch, amd_smi=AMD_SMI, rocm_smi="exit 1")
    found = doctor.provenance()
    assert found["amd"]["gpus"][1]["power_cap_w"] == 1200 and found["amd"]["links"][0]["kind"] == "XGMI"
    assert found["clocks"][0] == {"sm_mhz": 1325, "memory_mhz": 1900} and found["driver"] == "6.16.6"


def test_rocm_smi_stands_in_for_an_amd_smi_that_fails(tmp_path, monkeypatch):
    fake_tools(tmp_path, monkeypatch, amd_smi="echo ModuleNotFoundError >&2; exit 1", rocm_smi=f"echo '{json.dumps(ROCM_SMI)}'")
    assert doctor.rocm_facts().source == "rocm-smi"


def test_missing_tools_are_said_and_tolerated(tmp_path, monkeypatch):
    fake_tools(tmp_path, monkeypatch)
    assert doctor.rocm_facts() is None and doctor.clocks() == () and "amd" not in doctor.provenance()
    node = replace(LAPTOP, drivers=("amd",))
    assert any("neither amd-smi nor rocm-smi answers" in problem for problem in doctor.problems(node))


def test_problems_are_named():
    found = amd.from_amd_smi(json.dumps(NEW), json.dumps(METRIC), json.dumps(OLD_TOPOLOGY))
    words = " | ".join(amd.problems(found))
    assert "without an xGMI link: 0 to 1 (PCIE)" in words and "GPU 1: 1200 of 1400 W" in words and "throttled now: GPU 0 (ppt)" in words
    assert "partition" not in words
    assert "partition modes CPX/NPS4" in " ".join(amd.problems(amd.from_amd_smi(json.dumps(OLD), "", "")))
    fine = amd.Facts("amd-smi", (amd.Gpu(0, "SPX", "NPS1", throttled=()),), (amd.Link(0, 1, "XGMI"),))
    assert amd.problems(fine) == ()


def test_the_report_says_what_the_tools_said():
    node = replace(LAPTOP, drivers=("amd",), amd=amd.from_amd_smi(json.dumps(NEW), json.dumps(METRIC), json.dumps(TOPOLOGY)))
    text = doctor.report(replace(node, problems=doctor.problems(node)))
    for words in ("GPU 0: partition SPX/NPS1, NUMA node 0, power 980 W of 1400 W", "throttling ppt", "links of 1 pairs: XGMI, 1 hops (by amd-smi)"):
        assert words in text

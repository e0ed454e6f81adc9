"""The doctor on made-up machines: what it finds, what it would measure, when it refuses, what it leaves out of rows."""

import os
import subprocess
import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest

from m3cp import doctor

CPU_TORCH = doctor.Torch("2.13.0+cpu", "cpu", 0)
CUDA_TORCH = doctor.Torch("2.11.0+cu130", "cuda 13.0", 2)
NO_TORCH = doctor.Torch(error="ModuleNotFoundError: No module named 'torch'")
H200 = doctor.Device(0, "nvidia", "NVIDIA H200", "sm_90", 132, 141 << 30, 60 << 20, 60 << 20)
LAPTOP = doctor.Node(
    cpu=doctor.Cpu("A laptop's CPU", 4, 32 << 20),
    torch=CPU_TORCH,
    devices=(),
    peers=(),
    processes=None,
    versions={"python": "3.12.3", "torch": "2.13.0+cpu", "triton": "3.7.1"},
    triton_owners=("triton 3.7.1",),
    clocks=(),
    drivers=(),
)
TWO_H200 = replace(
    LAPTOP, torch=CUDA_TORCH, devices=(H200, replace(H200, index=1)), processes=(), drivers=("nvidia",), versions={"triton": "3.6.0"}
)  # fmt: skip


@pytest.mark.parametrize(
    "asked, torch, drivers, device",
    [
        (None, CPU_TORCH, (), "cpu"),
        (None, CUDA_TORCH, ("nvidia",), "cuda"),
        (None, replace(CUDA_TORCH, build="rocm 7.1"), ("amd",), "cuda"),
        ("cuda", CUDA_TORCH, ("nvidia",), "cuda"),
        ("cpu", CUDA_TORCH, ("nvidia",), "cpu"),
        ("cpu", CPU_TORCH, ("amd",), "cpu"),
    ],
)
def test_where_a_sweep_runs(asked, torch, drivers, device):
    assert doctor.choose_device(asked, torch, drivers) == device


@pytest.mark.parametrize(
    "asked, torch, drivers, says",
    [
        (None, CPU_TORCH, ("nvidia",), ["NVIDIA GPU", "make setup TORCH=cuda", "--device cpu"]),
        (None, CPU_TORCH, ("amd",), ["AMD GPU", "vendor's image", "--device cpu"]),
        (None, replace(CUDA_TORCH, gpus=0), ("amd",), ["AMD GPU", "vendor's image"]),
        (None, replace(CUDA_TORCH, gpus=0), ("nvidia",), ["unset CUDA_VISIBLE_DEVICES", "--device cpu"]),
        ("cuda", CPU_TORCH, (), ["device='cuda'", "allowed here: cpu"]),
        (None, NO_TORCH, (), ["make setup"]),
        ("cpu", NO_TORCH, (), ["make setup"]),
        ("gpu", CPU_TORCH, (), ["device='gpu'", "cuda, cpu"]),
    ],
)
def test_a_refusal_names_the_fix(monkeypatch, asked, torch, drivers, says):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(doctor.NodeError) as error:
        doctor.choose_device(asked, torch, drivers)
    assert all(words in str(error.value) for words in says)


def _plan(node, asked=None):
    return {p.what: (p.measured, p.why) for p in doctor.plan(node, asked)}


def test_the_plan_says_what_is_skipped_and_why():
    gpus = _plan(TWO_H200)
    assert gpus["P=2: tp and cp"] == (True, "2 ranks, one a GPU")
    assert gpus["P=4: tp and cp"] == (False, "needs 4 GPUs, found 2")
    assert gpus["cp_local"][0]
    cpu = _plan(LAPTOP)
    assert cpu["P=2: tp and cp"] == (True, "2 ranks, over gloo")
    assert not cpu["P=4: tp and cp"][0] and "--world 4" in cpu["P=4: tp and cp"][1]
    assert cpu["P=8: tp and cp"] == (False, "needs 8 cores, one a rank, found 4")
    assert "eager torch" in cpu["page_read"][1]


def test_the_plan_of_a_node_that_refuses_is_the_refusal():
    node = replace(LAPTOP, drivers=("amd",))
    ((what, (measured, why)),) = _plan(node).items()
    assert not measured and "AMD GPU" in why
    assert len(_plan(node, "cpu")) > 1
    without_triton = _plan(replace(TWO_H200, versions={}))
    assert list(without_triton.values()) == [(False, "the GPU kernels need triton, which does not import here")]


def test_two_owners_of_triton_are_a_problem():
    assert doctor.problems(LAPTOP) == ()
    both = replace(LAPTOP, triton_owners=("pytorch-triton-rocm 3.5.0", "triton 3.7.1"))
    (problem,) = doctor.problems(both)
    assert "pytorch-triton-rocm 3.5.0 and triton 3.7.1 both own" in problem
    assert problem in doctor.report(replace(both, problems=doctor.problems(both)))


def test_owners_are_read_from_what_is_installed(tmp_path):
    for name, version in (("triton", "3.7.1"), ("pytorch-triton-rocm", "3.5.0")):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("triton/__init__.py,,\n")
    code = "from m3cp import doctor; print(doctor.triton_owners())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "('pytorch-triton-rocm 3.5.0', 'triton 3.7.1')"


@pytest.mark.parametrize(
    "arch, l2, expected",
    [
        ("sm_90", 60 << 20, 60 << 20),
        ("gfx942", 4 << 20, 256 << 20),
        ("gfx950:sramecc+:xnack-", 4 << 20, 256 << 20),
        ("gfx1100", 6 << 20, 6 << 20),
    ],
)
def test_last_level_cache_by_architecture(arch, l2, expected):
    assert doctor.last_level_bytes(arch, l2) == expected


def test_devices_from_torch_properties():
    amd = SimpleNamespace(
        name="AMD Instinct MI355X", gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256,
        total_memory=288 << 30, L2_cache_size=4 << 20, major=9, minor=5,
    )  # fmt: skip
    device = doctor.device_of(0, amd, amd=True)
    assert (device.vendor, device.arch, device.last_level_bytes) == ("amd", "gfx950", 256 << 20)
    nvidia = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, L2_cache_size=60 << 20
    )
    assert doctor.device_of(0, nvidia, amd=False) == H200


def test_cpu_facts(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 2.4GHz\nmodel name\t: other\n")
    for index, size in enumerate(("32K", "1024K", "33M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    found = doctor.cpu(tmp_path / "cpuinfo", tmp_path)
    assert found.model == "A CPU @ 2.4GHz" and found.last_level_bytes == 33 << 20 and found.cores >= 1
    assert doctor.cpu(tmp_path / "none", tmp_path / "none").last_level_bytes == 0


def test_nvidia_smi_output():
    clocks = doctor.nvidia_clocks("0, 1980, 3201, 580.159.03\n1, [N/A], 3201, 580.159.03\n")
    assert clocks[0] == {"sm_mhz": 1980, "memory_mhz": 3201, "driver": "580.159.03"}
    assert clocks[1]["sm_mhz"] is None
    text = "GPU-aa, 41, /home/someone/python3, 1024\nGPU-bb, 42, python3, [N/A]\nno processes\n"
    mine, other = doctor.nvidia_processes(text, own_pid=7)
    assert (mine.pid, mine.name, mine.memory_bytes) == (41, "python3", 1 << 30) and other.memory_bytes is None
    assert [p.pid for p in doctor.nvidia_processes(text, own_pid=41)] == [42]


class BreaksOnImport:
    """amdsmi raises KeyError on import where its library is missing."""

    def find_spec(self, name, path=None, target=None):
        if name == "amdsmi":
            raise KeyError("ROCM_PATH")


def test_amdsmi_that_breaks_or_answers(monkeypatch):
    monkeypatch.setattr(doctor, "_tool", lambda *command: None)
    monkeypatch.setattr(doctor, "drivers", lambda: ("amd",))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setattr(sys, "meta_path", [BreaksOnImport(), *sys.meta_path])
    assert doctor.clocks() == () and doctor.other_processes() is None

    amdsmi = types.ModuleType("amdsmi")
    amdsmi.amdsmi_init = amdsmi.amdsmi_shut_down = lambda: None
    amdsmi.AmdSmiClkType = SimpleNamespace(GFX="gfx", MEM="mem")
    amdsmi.amdsmi_get_processor_handles = lambda: ["handle"]
    amdsmi.amdsmi_get_clock_info = lambda handle, kind: {"clk": {"gfx": 2400, "mem": 2000}[kind]}
    amdsmi.amdsmi_get_gpu_driver_info = lambda handle: {"driver_version": "6.16"}
    row = {"pid": 1, "name": "/opt/server", "memory_usage": {"vram_mem": 5}}
    amdsmi.amdsmi_get_gpu_process_list = lambda handle: [row, {**row, "pid": os.getpid()}]
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    assert doctor.clocks() == ({"sm_mhz": 2400, "memory_mhz": 2000, "driver": "6.16"},)
    assert doctor.other_processes() == (doctor.Process("GPU 0", 1, "server", 5),)


def test_rows_carry_no_host_path_or_address():
    variables = {
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
        "NCCL_TOPO_FILE": "/home/someone/topo.xml",
        "NCCL_COMM_ID": "node17.cluster:12345",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RCCL_MSCCL_ENABLE": "1",
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "HIP_VISIBLE_DEVICES": "0,1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_HOSTID": "gpu-box",
        "NCCL_OOB_NET": "10.0.0.7",
        "HOME": "/home/someone",
        "SECRET": "x",
    }
    assert doctor.environment(variables, "gpu-box") == {
        "HIP_VISIBLE_DEVICES": "0,1",
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "NCCL_COMM_ID": "<host>",
        "NCCL_HOSTID": "<host>",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_OOB_NET": "<address>",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_TOPO_FILE": "<path>",
        "RCCL_MSCCL_ENABLE": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }


def test_provenance_of_this_machine():
    import json

    found = doctor.provenance()
    assert json.loads(json.dumps(found)) == found
    assert found["cpu_model"] and found["versions"]["python"] and found["versions"]["torch"]
    assert set(found) == {
        "cpu_model", "cpu_cores", "cpu_last_level_bytes", "gpus", "clocks", "driver", "versions", "environment", "platform",
    }  # fmt: skip


def test_the_report_names_everything():
    node = replace(
        TWO_H200,
        processes=(doctor.Process("GPU-aa", 41, "python3", 1 << 30),),
        clocks=({"sm_mhz": 1980, "memory_mhz": 3201, "driver": "580.1"},),
        peers=((0, 1),),
    )
    text = doctor.report(replace(node, plan=doctor.plan(node), problems=doctor.problems(node)))
    for words in (
        "GPU 1: NVIDIA H200, sm_90, 132 SMs, 141 GiB",
        "last-level cache 60 MiB",
        "GPU-aa: python3 (pid 41, 1 GiB)",
        "SM 1980 MHz",
        "driver      580.1",
        "owned by triton 3.7.1",
        "P=4: tp and cp: skipped: needs 4 GPUs, found 2",
        "no peer access between GPUs 0 to 1",
    ):
        assert words in text


def test_the_doctor_works_without_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from m3cp import doctor\n"
        "node = doctor.inspect(); doctor.provenance(); print(doctor.report(node))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "does not import" in out and "make setup" in out

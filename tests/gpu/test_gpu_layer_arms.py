"""What stands around the indexer, measured on GPUs: every arm has a checked row, and the tables print."""

import pytest

from m3cp import layer_shares, records, sweep
from m3cp.shapes import LAYER_ARMS

SHAPE = {"contexts": [16384], "batches": [8], "max_context": 131072}
FORMS = {"forms": ["one_launch"], "exchanges": ["symmetric"]}


def measured(tmp_path, grids, worlds):
    assert sweep.main([{**SHAPE, **grid, "worlds": worlds} for grid in grids], device="cuda", out=tmp_path) == 0
    rows = records.load(tmp_path)
    assert {r.status for r in rows} == {"ok"}, [r.error for r in rows]
    for row in rows:
        assert row.check["passed"] and row.cache_state == "cold" and row.median_us > 0.8 * row.limit_us, row
    print("\n".join(layer_shares.main(str(tmp_path))))
    return rows


@pytest.mark.gpu
def test_on_one_gpu(tmp_path):
    arms = ["tp", "attention", "projections", "toy_tp"]
    grids = [{"arms": arms}, {"arms": ["tp", "attention"], "dtypes": ["fp8_e4m3fn"]}, {"arms": ["mixed_tp"], "launch": "eager"}]
    assert {r.point.arm for r in measured(tmp_path, grids, [1])} == {*arms, "mixed_tp"}


@pytest.mark.multigpu
def test_on_two_gpus(tmp_path):
    graphs = ["tp", "cp", "attention", "projections", "toy_tp", "toy_cp"]
    grids = [{"arms": graphs, **FORMS}, {"arms": ["mixed_tp", "mixed_cp"], "launch": "eager", **FORMS}, {"arms": ["tp", "cp", "toy_tp", "toy_cp"]}]
    rows = measured(tmp_path, grids, [2])
    assert {r.point.arm for r in rows} == {"tp", "cp", *LAYER_ARMS} and {r.ranks for r in rows} == {2}
    assert [r.point.queries for r in rows if r.point.arm == "projections"] == [None, "replicated"]
    assert all(r.calls_per_replay == 2 for r in rows if r.point.arm.startswith("toy_"))

"""Readers, graphs and small sweeps on GPUs: checked rows that are cold where they say so."""

import pytest
import torch

from m3cp import inputs, records, sweep, timing
from m3cp.kernels import page_read as op
from m3cp.shapes import IndexerShape

GRID = {
    "contexts": [1024, 8192],
    "batches": [1, 4],
    "max_context": 131072,
    "arms": ["tp", "cp", "cp_local", "page_read"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("reader", op.READERS)
def test_page_read_reads_every_word(reader):
    device = torch.device("cuda")
    pool = inputs.make_pool(IndexerShape(), torch.bfloat16, device, pages=500, seed=1)
    pages = torch.randint(0, 500, (333,), dtype=torch.int32, device=device)
    out = torch.empty(op.partials(device, reader), dtype=torch.int32, device=device)
    for listed in (pages, pages[:1], pages[:0]):
        total = int(op.page_read(pool, listed, out, reader=reader).sum(dtype=torch.int64)) % 2**32
        assert total == op.checksum(pool, listed)


@pytest.mark.gpu
def test_what_breaks_a_capture_is_the_error_that_is_shown():
    def call():
        torch.zeros(1, device="cuda").item()

    with pytest.raises(RuntimeError):
        timing.capture([call])
    x = torch.zeros(4, device="cuda")
    graph = timing.capture([lambda: x.add_(1)] * 3)
    graph.replay()
    assert x.tolist() == [3.0] * 4


def measured(tmp_path, worlds):
    assert sweep.main({**GRID, "worlds": worlds}, device="cuda", out=tmp_path) == 0
    rows = records.load(tmp_path)
    assert {r.status for r in rows} == {"ok"}, [r.error for r in rows]
    for row in rows:
        assert row.check["passed"] and row.samples_us == timing.slowest(row.rank_samples_us)
        assert row.provenance["gpus"] and row.page_read_us
        if row.bytes_read:
            assert row.cache_state == "cold" and row.footprint_over_llc > 2
            assert row.median_us > 0.8 * row.limit_us
        else:
            assert row.cache_state == "warm" and row.evict_us > 1
    return rows


@pytest.mark.gpu
def test_a_sweep_of_one_gpu(tmp_path):
    rows = measured(tmp_path, [1])
    assert {(r.point.arm, r.ranks) for r in rows} == {("tp", 1), ("page_read", 1)}


@pytest.mark.multigpu
def test_a_sweep_of_two_gpus(tmp_path):
    rows = measured(tmp_path, [2])
    assert {r.point.arm for r in rows} == {"tp", "cp", "cp_local", "page_read"} and {r.ranks for r in rows} == {2}
    assert {r.collectives for r in rows if r.point.arm == "cp"} == {1, 2}

"""Programs that wait for programs which don't run, in the kernel itself: the interpreter runs one program after another,
as a device does whose grid is larger than what it holds at once."""

import pytest
import torch
from problems import assert_ids, build, expected_pages, oracle

from m3cp import decode
from m3cp.decode import TPDecode
from m3cp.pagetable import PageTable
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

PROBLEM = build(IndexerShape(topk=2), [128 * 9, 128 * 7])
SEGMENTS = build(IndexerShape(heads=1, head_dim=64, block_size=64, topk=2), [64 * 66, 64 * 2, 64 * 7])


@pytest.mark.parametrize(
    "form, programs, problem, waits_in_vain",
    [("one_launch", 1, PROBLEM, False), ("one_launch", 2, PROBLEM, True), ("one_launch", 2, SEGMENTS, True), ("two_launch", 2, PROBLEM, False)],
    ids=["one program", "two programs", "two programs, two segments", "two launches"],
)
def test_one_launch_needs_all_its_programs_at_once_and_two_launches_do_not(form, programs, problem, waits_in_vain, monkeypatch, short_waits):
    """A wrong occupancy, planted: program 0 waits for what program 1 would score. The wait ends, is told, and no id and no page is wrong."""
    monkeypatch.setattr(decode._Fused, "_resident", lambda self: programs)
    heads, right = problem.shape.heads, oracle(problem)
    tp = TPDecode(problem.shape, Shard(0, 1, heads), form=form, **problem.bounds())
    table = PageTable.empty(problem.shape, local_heads=heads, tokens=problem.tokens, page_size=32)
    ids = tp(*problem.tensors, pages=table).clone()
    pages, attended = expected_pages(problem, ids, page_size=32, stride=problem.shape.block_size // 32)
    assert torch.equal(table.pages, pages) and torch.equal(table.attended, attended), "the table is that of the ids, -1 and no token with -1"
    if not waits_in_vain:
        tp.check()
        assert_ids(ids, right)
        return
    with pytest.raises(RuntimeError, match="a wait for rank 0 expired"):
        tp.check()
    told = (ids == -1).all(-1)
    assert bool(told.any()) and bool((told | (ids == right).all(-1)).all()), "rows are right or -1"

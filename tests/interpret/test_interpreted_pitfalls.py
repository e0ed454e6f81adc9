"""Programs that wait for programs which don't run, in the kernel itself: the interpreter runs one program after another,
as a device does whose grid is larger than what it holds at once."""

import pytest
from problems import assert_ids, build, oracle

from m3cp import decode
from m3cp.decode import TPDecode
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

PROBLEM = build(IndexerShape(topk=2), [128 * 9, 128 * 7])


@pytest.mark.parametrize("form, programs, waits_in_vain", [("one_launch", 1, False), ("one_launch", 2, True), ("two_launch", 2, False)])
def test_one_launch_needs_all_its_programs_at_once_and_two_launches_do_not(form, programs, waits_in_vain, monkeypatch, short_waits):
    """A wrong occupancy, planted: program 0 waits for what program 1 would score. The wait ends, is told, and no id is wrong."""
    monkeypatch.setattr(decode._Fused, "_resident", lambda self: programs)
    tp = TPDecode(PROBLEM.shape, Shard(0, 1, 4), form=form, **PROBLEM.bounds())
    ids = tp(*PROBLEM.tensors).clone()
    if not waits_in_vain:
        tp.check()
        assert_ids(ids, oracle(PROBLEM))
        return
    with pytest.raises(RuntimeError, match="a wait for rank 0 expired"):
        tp.check()
    right = oracle(PROBLEM)
    told = (ids == -1).all(-1)
    assert bool(told.any()) and bool((told | (ids == right).all(-1)).all()), "rows are right or -1"

"""The eager specification against fp64, and the CPU backend through virtual ranks on the whole table of cases."""

import numpy as np
import pytest
import torch
from cases import CASES, SPREAD, check, scored_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import assert_ids, build, fp64_scores, oracle

from m3cp import reference
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard
from m3cp.testing import select_virtual


def scores_of(problem, shard=None, **changes):
    """The eager backend's scores of a shard, `[tokens, heads, local blocks]`."""
    bounds = dict(
        shape=problem.shape,
        shard=shard or Shard(0, 1, problem.shape.heads),
        query_len=problem.query_len,
        max_context=problem.max_context,
    )
    return reference.score(*problem.tensors, **(bounds | changes))


# select_blocks knows no bound but the table's width
@pytest.mark.parametrize("case", [c for c in CASES if max(c.lengths, default=0) <= (c.max_context or 2**31)], ids=str)
def test_select_blocks_is_the_oracle(case):
    assert_ids(reference.select_blocks(*case.problem.tensors, shape=case.shape, query_len=case.query_len), case.expect)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("path", ["tp", "cp"])
def test_every_world_chooses_alike(case, path):
    for world in case.worlds:
        check(case, path=path, world=world, queries="gathered" if world == SPREAD[case.name] else "replicated")


@pytest.mark.parametrize("dim, block", [(128, 128), (64, 64)])
@pytest.mark.parametrize("query_len", [1, 4])
def test_dots_on_free_data_are_near_fp64(dim, block, query_len):
    shape = IndexerShape(heads=4, head_dim=dim, block_size=block, topk=3, local_blocks=0)
    problem = build(shape, [9 * block + 5, 7 * block], query_len, kind="free", seed=3)
    got = scores_of(problem).numpy()
    exact, size = fp64_scores(problem, margins=True)
    needed = np.broadcast_to(scored_blocks(problem, Shard(0, 1, 4)).numpy()[:, None, :], got.shape) & np.isfinite(exact)
    assert needed.sum() >= 60
    assert (np.abs(got[needed] - exact[needed]) <= size[needed] * 2**-16).all()
    assert_ids(reference.select_blocks(*problem.tensors, shape=shape, query_len=query_len), oracle(problem, got))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_blocks_that_decide_are_scored(case):
    for world in (1, 4):
        for rank in range(world):
            shard = Shard(rank, world, world)
            written = scores_of(case.problem, shard) > float("-inf")
            assert not (written & ~scored_blocks(case.problem, shard)[:, None, :]).any()


lengths = st.lists(st.integers(0, 64 * 14), min_size=1, max_size=4)
forced = st.tuples(st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(
    lengths,
    forced,
    st.sampled_from([1, 2, 3, 6, 8, 16, 64]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 99),
)
def test_any_problem_on_any_world(lengths, forced, topk, query_len, heads, world, seed):
    if heads % world and world % heads:
        world = heads
    shape = IndexerShape(
        heads=heads, head_dim=64, block_size=64, topk=topk, init_blocks=forced[0], local_blocks=forced[1]
    )
    problem = build(
        shape, lengths, query_len, kind=("exact", "ties", "special")[seed % 3], bad_pages=seed % 2, seed=seed
    )
    expect = oracle(problem)
    for path in ("tp", "cp"):
        assert_ids(
            select_virtual(*problem.tensors, shape=shape, world=world, query_len=query_len, path=path),
            expect,
            f"{path} of {world}",
        )


@pytest.mark.parametrize("kind", ["free", "ulp"])
@pytest.mark.parametrize("heads, query_len", [(4, 1), (1, 1), (8, 3)])
def test_scores_have_the_same_bits_whatever_the_ranks(kind, heads, query_len):
    shape = IndexerShape(heads=heads, topk=3, local_blocks=0)
    problem = build(shape, [128 * 21, 128 * 10 + 77], query_len, kind=kind, seed=7)
    whole = scores_of(problem)
    for world in (2, 4, 8, 16):
        for rank in range(world):
            shard = Shard(rank, world, world)
            assert torch.equal(scores_of(problem, shard), whole[:, :, rank::world]), f"CP, rank {rank} of {world}"
    for head in range(heads):
        # A rank of TP is given its own heads' queries only.
        alone = IndexerShape(heads=1, topk=3, local_blocks=0)
        bounds = dict(shape=alone, shard=Shard(0, 1, 1), query_len=query_len, max_context=problem.max_context)
        one = reference.score(problem.q[:, head : head + 1], *problem.tensors[1:], **bounds)
        assert torch.equal(one, whole[:, head : head + 1]), f"TP, head {head}"
    assert_ids(
        select_virtual(*problem.tensors, shape=shape, world=heads, query_len=query_len), oracle(problem, whole.numpy())
    )


def test_ulp_problems_can_tell_orders_of_summation_apart():
    problem = build(IndexerShape(topk=3, local_blocks=0), [128 * 40], kind="ulp", seed=7)
    k = problem.cache[problem.block_table[0].long()].float()
    q = problem.q[0].float()
    one = (k @ q.T).amax(1)
    halves = (k[..., :64] @ q[:, :64].T + k[..., 64:] @ q[:, 64:].T).amax(1)
    assert not torch.equal(one, halves) and (one - halves).abs().max() < 1e-4
    assert any(
        one[:, h].topk(3).indices.sort().values.tolist() != halves[:, h].topk(3).indices.sort().values.tolist()
        for h in range(4)
    )


def test_the_table_of_cases_can_fail():
    """Cases in which a broken rule shows: each rule changes some case's expected ids."""
    from dataclasses import replace

    for change in ({"init_blocks": 0}, {"local_blocks": 0}):
        changed = [
            c for c in CASES if not torch.equal(oracle(replace(c.problem, shape=replace(c.shape, **change))), c.expect)
        ]
        assert len(changed) >= 3, change
    assert (
        sum(
            len({tuple(h) for h in c.expect.reshape(c.expect.shape[0], -1).tolist()}) > 1
            for c in CASES
            if c.shape.heads > 1
        )
        > 15
    )

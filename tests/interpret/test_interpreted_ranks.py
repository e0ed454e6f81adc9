"""Ranks as processes: the kernels themselves, interpreted, over host shared memory. Faults of the protocol show here
(reuse of slots, tags, deadlock, expiry); faults of memory order show only on devices and in emitted code."""

import os
import random
import time

import pytest
import quick_interpreter
import torch
import torch.distributed as dist
from problems import assert_ids, build, oracle
from ranks import Ranks

from m3cp.decode import CPDecode
from m3cp.exchange import SymmetricExchange
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

BOUND = 64 * 12
# Lengths of consecutive calls: some exchange, some don't, requests come and go.
LENGTHS = [
    (64 * 9 + 5, 64 * 2),
    (64 * 8, 7, 64 * 6),  # a request that needs no keys between two that do: its queries are not sent
    (64 * 2, 7),
    (64 * 12,),
    (0,),
    (64 * 4 - 1, 64 * 7, 0),
    (64 * 12, 64 * 12),
    (64 * 3,),
    (64 * 5, 64 * 6),
]
# world: heads, topk, local_blocks. Of 3 ranks each owns a head; of 4 two own the same; topk + 1 - local < world asks for presence words.
WORLDS = {2: (4, 3, 1), 3: (3, 2, 1), 4: (2, 3, 1)}


@pytest.fixture(scope="module")
def ranks_of():
    """Ranks of a world, started at the first use."""
    made = {}

    def get(world: int) -> Ranks:
        return made.setdefault(world, None) or made.update({world: Ranks(world)}) or made[world]

    yield get
    for ranks in made.values():
        ranks.close()


def shape_of(world: int, **changes) -> IndexerShape:
    heads, topk, local = WORLDS[world]
    return IndexerShape(**(dict(heads=heads, head_dim=64, block_size=64, topk=topk, local_blocks=local) | changes))


def make(
    rank: int,
    shape: IndexerShape,
    queries: str,
    form: str,
    *,
    query_len: int = 1,
    bound: int = BOUND,
    spin_limit: int | None = None,
):
    quick_interpreter.sort_in_numpy(pytest.MonkeyPatch())  # forked before the fixture that does it in this process
    shard = Shard(rank, dist.get_world_size(), shape.heads)
    cp = CPDecode(
        shape, shard, exchange=SymmetricExchange(spin_limit=spin_limit), queries=queries, form=form,
        max_requests=3, max_query_len=query_len, max_context=bound, device="cpu",
    )  # fmt: skip
    return cp, shard


def given(problem, shard: Shard, queries: str):
    return (problem.q if queries == "replicated" else problem.heads(shard.owned_heads), *problem.tensors[1:])


def calls(rank, shape, queries, form, lengths, query_len, kind, bound, seed):
    """Back-to-back calls of one object, some rank late before each; the ids of each."""
    cp, shard = make(rank, shape, queries, form, query_len=query_len, bound=bound)
    late = random.Random(seed)  # the same draws on every rank
    found = []
    for i, step in enumerate(lengths):
        problem = build(shape, step, query_len, max_context=bound, seed=seed + i, kind=kind)
        who, how_long = late.randrange(shard.world), late.choice([0, 0, 0.002, 0.02])
        if who == rank:
            time.sleep(how_long)
        found.append(cp(*given(problem, shard, queries), query_len=query_len).clone())
    cp.check()
    return shard, found


def check(ranks, shape, queries, form, lengths, *, query_len=1, kind="exact", bound=BOUND, seed=1):
    expect = [
        oracle(build(shape, step, query_len, max_context=bound, seed=seed + i, kind=kind))
        for i, step in enumerate(lengths)
    ]
    for rank, (shard, found) in enumerate(
        ranks.run(calls, shape, queries, form, lengths, query_len, kind, bound, seed)
    ):
        for i, (got, want) in enumerate(zip(found, expect, strict=True)):
            owned = shard.owned_heads
            assert_ids(
                got,
                want[owned.start : owned.stop],
                f"{form}, {queries}, rank {rank} of {ranks.world}, call {i}, lengths {lengths[i]}",
            )


@pytest.mark.parametrize("queries", ["replicated", "gathered"])
@pytest.mark.parametrize("form", ["one_launch", "two_launch", "staged"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ids_are_the_references_call_after_call(ranks_of, world, form, queries):
    check(ranks_of(world), shape_of(world), queries, form, LENGTHS if world == 2 else LENGTHS[:5])


@pytest.mark.parametrize("queries", ["replicated", "gathered"])
def test_presence_words_of_two_ranks(ranks_of, queries):
    """Two blocks of three are forced: a rank may hold none that is scored."""
    check(
        ranks_of(2),
        shape_of(2, topk=2, local_blocks=2),
        queries,
        "one_launch",
        [(64 * 3,)] * 3 + [(64,)] + [(64 * 3, 64 * 4)] * 3,
    )


def test_several_query_tokens_fill_two_groups(ranks_of):
    check(
        ranks_of(2),
        shape_of(2),
        "gathered",
        "one_launch",
        [(64 * 6 + 2, 64 * 3 + 1), (64 * 2,), (64 * 4 + 3,)],
        query_len=5,
    )


def test_rows_of_several_segments(ranks_of):
    check(
        ranks_of(2),
        shape_of(2),
        "replicated",
        "one_launch",
        [(64 * 70,), (64 * 3,), (64 * 66 - 1, 64 * 5)],
        bound=64 * 70,
    )


def test_scores_that_are_not_numbers(ranks_of):
    check(ranks_of(2), shape_of(2, local_blocks=0), "replicated", "one_launch", LENGTHS[::3], kind="special")


def never_comes(rank, form, queries, absent, spin_limit):
    """`absent` stays away from the second call. What the others get: ids, what `check` and the next call say, seconds."""
    shape = shape_of(2)
    cp, shard = make(rank, shape, queries, form, spin_limit=spin_limit)
    problem = build(shape, [64 * 9, 64 * 2], max_context=BOUND, seed=3)
    first = cp(*given(problem, shard, queries)).clone()
    dist.barrier()
    if rank == absent:
        dist.barrier()
        cp.check()  # nothing is wrong here: this rank awaited nothing
        return first, None, None, [], 0.0
    start = time.monotonic()
    second = cp(*given(problem, shard, queries)).clone()
    took = time.monotonic() - start
    third = cp(*given(problem, shard, queries)).clone()  # as a replay would: nothing was raised yet
    said = []
    for attempt in (cp.check, lambda: cp(*given(problem, shard, queries)), cp.check):
        try:
            attempt()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    dist.barrier()
    return first, second, third, said, took


@pytest.mark.parametrize(
    "form, queries",
    [
        ("one_launch", "replicated"),
        ("one_launch", "gathered"),
        ("two_launch", "replicated"),
        ("staged", "replicated"),
        ("staged", "gathered"),
    ],
)
def test_a_rank_that_does_not_come_is_named(ranks_of, form, queries):
    absent = 1
    answers = ranks_of(2).run(never_comes, form, queries, absent, 300)
    expect = oracle(build(shape_of(2), [64 * 9, 64 * 2], max_context=BOUND, seed=3))
    for rank, (first, second, third, said, took) in enumerate(answers):
        assert_ids(first, expect[rank * 2 : rank * 2 + 2])
        if rank == absent:
            continue
        assert bool((second[:, 0] == -1).all()), "the row whose words did not come"
        assert bool((second[:, 1] == -1).all()) or torch.equal(second[:, 1], expect[rank * 2 : rank * 2 + 2, 1]), (
            "the row that needs none"
        )
        assert bool((third == -1).all()), "every later launch writes -1"
        assert f"a wait for rank {absent} expired" in said[0]
        assert form == "staged" or "launch 2 of 3" in said[0]  # staged, a wait is named by the gather's own count
        assert f"a wait for rank {absent} expired" in said[1] and said[1].endswith("this object refuses calls")
        assert said[2] == said[0]
        assert took < 20


def dies(rank, form):
    """Rank 1 ends without a word in the middle of calls; how long the other's call took and what it says."""
    shape = shape_of(2)
    cp, shard = make(rank, shape, "gathered", form, spin_limit=300)
    problem = build(shape, [64 * 9], max_context=BOUND, seed=3)
    for _ in range(2):
        cp(*given(problem, shard, "gathered"))
    if rank == 1:
        os._exit(3)
    start = time.monotonic()
    ids = cp(*given(problem, shard, "gathered"))
    try:
        cp.check()
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    return ids.clone(), said, time.monotonic() - start


def test_a_dead_peer_ends_the_others_in_bounded_time():
    own = Ranks(2)
    own._pipes[1].send((dies, ("one_launch",)))
    own._pipes[0].send((dies, ("one_launch",)))
    assert own._pipes[0].poll(30), "rank 0 still waits for a dead rank"
    ok, (ids, said, took) = own._pipes[0].recv()
    own._processes[1].join(5)
    assert ok and own._processes[1].exitcode == 3
    assert bool((ids == -1).all()) and "a wait for rank 1 expired" in said and took < 20
    own._processes[0].kill()


def unequal(rank):
    """Rank 1 comes with another length, so the two don't agree whether they exchange."""
    shape = shape_of(2)
    cp, shard = make(rank, shape, "replicated", "one_launch", spin_limit=300)
    problem = build(shape, [64 * 9 if rank == 0 else 64], max_context=BOUND, seed=3)
    ids = cp(*given(problem, shard, "replicated")).clone()
    try:
        cp.check()
        return ids, "nothing"
    except RuntimeError as error:
        return ids, str(error)


def test_ranks_with_different_lengths_end_in_an_error(ranks_of):
    (ids, said), (other_ids, other) = ranks_of(2).run(unequal)
    assert bool((ids == -1).all()) and "calls with other lengths" in said
    assert other == "nothing" and other_ids[0, 0].tolist() == [0, -1, -1]


def test_a_spin_limit_is_checked():
    with pytest.raises(ValueError, match=r"spin_limit=0: must be 1 to 2147483647 polls"):
        SymmetricExchange(spin_limit=0)

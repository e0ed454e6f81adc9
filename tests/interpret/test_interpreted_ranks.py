"""Ranks as processes: the kernels themselves, interpreted, over host shared memory. Faults of the protocol show here
(reuse of slots, tags, deadlock, expiry); faults of memory order show only on devices and in emitted code.

Nothing here depends on how fast the machine is: a wait that must succeed has half a minute, one that must expire waits
for what never comes, and a rank that has to be late waits for its peer to get where the fault needs it.
"""

import contextlib
import importlib.util
import os
import random
import sys
import time
from pathlib import Path

import cells
import pytest
import quick_interpreter
import torch
import torch.distributed as dist
from problems import assert_ids, build, expected_pages, oracle
from ranks import Ranks

from m3cp import decode
from m3cp.decode import CPDecode
from m3cp.exchange import SymmetricExchange
from m3cp.indexer import CPOptions, Indexer
from m3cp.kernels import gather as gather_op
from m3cp.pagetable import PageTable
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

BOUND = 64 * 12
FEW_POLLS = 100  # for a wait that cannot succeed; a poll takes a millisecond or so interpreted
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
    threshold_blocks: int | None = None,
):
    quick_interpreter.sort_in_numpy(pytest.MonkeyPatch())  # forked before the fixture that does it in this process
    shard = Shard(rank, dist.get_world_size(), shape.heads)
    cp = CPDecode(
        shape, shard, exchange=SymmetricExchange(), queries=queries, form=form,
        max_requests=3, max_query_len=query_len, max_context=bound, device="cpu", threshold_blocks=threshold_blocks,
    )  # fmt: skip
    return cp, shard


def impatient(cp: CPDecode) -> None:
    """From now on waits give up soon: for calls in which what is awaited never comes."""
    if cp.form == "staged":
        cp.exchange.spin_limit = FEW_POLLS
    else:
        cp._fused.spin_limit = FEW_POLLS


@contextlib.contextmanager
def at_first_wait(module, entry: str, act):
    """`act()` at the first wait of each launch that `module`'s function `entry` makes, when all was pushed."""
    await_words, launch, first = module.await_words, getattr(module, entry), [True]

    def waits(*args):
        if first[0]:
            first[0] = False
            act()
        return await_words(*args)

    def launches(*args, **named):
        first[0] = True
        return launch(*args, **named)

    module.await_words = waits
    setattr(module, entry, launches)
    try:
        yield
    finally:
        module.await_words = await_words
        setattr(module, entry, launch)


def given(problem, shard: Shard, queries: str):
    return (problem.q if queries == "replicated" else problem.heads(shard.owned_heads), *problem.tensors[1:])


def calls(rank, shape, queries, form, lengths, query_len, kind, bound, seed):
    """Back-to-back calls of one object, some rank late before each or inside it; the ids of each."""
    cp, shard = make(rank, shape, queries, form, query_len=query_len, bound=bound)
    late = random.Random(seed)  # the same draws on every rank
    waits = (gather_op, "gather") if form == "staged" else (decode.fused_op, "fused")
    found = []
    for i, step in enumerate(lengths):
        problem = build(shape, step, query_len, max_context=bound, seed=seed + i, kind=kind)
        who, how_long, inside = late.randrange(shard.world), late.choice([0, 0.002, 0.02]), late.random() < 0.5
        if who == rank and not inside:
            time.sleep(how_long)
        with at_first_wait(*waits, lambda s=how_long if who == rank and inside else 0: time.sleep(s)):
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


def paged(rank, form, queries, threshold, lengths):
    """Back-to-back calls with page tables; those of each call."""
    shape = shape_of(2)
    cp, shard = make(rank, shape, queries, form, query_len=2, threshold_blocks=threshold)
    found = []
    for i, step in enumerate(lengths):
        problem = build(shape, step, 2, max_context=BOUND, seed=i, bad_pages=1)
        table = PageTable.empty(shape, local_heads=shard.local_heads, tokens=problem.tokens, page_size=16, stride=8)
        cp(*given(problem, shard, queries), query_len=2, pages=table)
        found.append((table.pages, table.attended))
    cp.check()
    return shard, found, cp.counts() if threshold else None


@pytest.mark.parametrize("queries, threshold", [("gathered", None), ("gathered", 11), ("replicated", 11)])
def test_page_tables_call_after_call(ranks_of, queries, threshold):
    """Of one launch, adaptive on both paths too; calls with and without exchange, padding rows among them."""
    lengths = LENGTHS[:1] + LENGTHS[4:7]
    expect = [expected_pages(p, oracle(p), page_size=16, stride=8) for p in
              (build(shape_of(2), step, 2, max_context=BOUND, seed=i, bad_pages=1) for i, step in enumerate(lengths))]  # fmt: skip
    for shard, found, counts in ranks_of(2).run(paged, "one_launch", queries, threshold, lengths):
        assert threshold is None or (0 < counts["cp"] < len(lengths))
        for got, want in zip(found, expect, strict=True):
            owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
            assert torch.equal(got[0], want[0][owned]) and torch.equal(got[1], want[1][owned]), shard


def cell(rank, name, form, queries, above):
    """A cell's problem: its ids, pages, attended tokens, and calls by path of an adaptive object."""
    quick_interpreter.sort_in_numpy(pytest.MonkeyPatch())
    problem = cells.problem_of(name)
    shard = Shard(rank, dist.get_world_size(), problem.shape.heads)
    threshold = None if above is None else cells.threshold_of(problem, above)
    cp = CPDecode(
        problem.shape, shard, exchange=SymmetricExchange(), queries=queries, form=form, threshold_blocks=threshold, **problem.bounds()
    )  # fmt: skip
    table = PageTable.empty(problem.shape, local_heads=shard.local_heads, tokens=problem.tokens, page_size=32, stride=4)
    ids = cp(*given(problem, shard, queries), query_len=problem.query_len, pages=table).clone()
    cp.check()
    return shard, ids, table.pages, table.attended, None if above is None else cp.counts()


BOUND_1M, BATCH = "a bound of 1M tokens", "a batch of 33, compiled as up to 256 are"
BETWEEN_RANKS = [
    (2, form, queries, above, name)
    for form, queries, above in [("one_launch", "replicated", None), ("one_launch", "gathered", None), ("one_launch", "gathered", True),
                                 ("two_launch", "gathered", None), ("two_launch", "gathered", True)]
    for name in cells.INTERPRETED if name != BATCH
] + [(2, "one_launch", "replicated", None, BATCH), (2, "two_launch", "gathered", None, BATCH),
     (2, "one_launch", "gathered", False, BOUND_1M), (2, "two_launch", "replicated", False, BOUND_1M),
     (8, "one_launch", "gathered", None, BOUND_1M), (8, "one_launch", "replicated", None, BOUND_1M), (8, "one_launch", "gathered", True, BOUND_1M),
     (8, "two_launch", "gathered", True, BOUND_1M),
     pytest.param(16, "one_launch", "gathered", True, BOUND_1M, marks=pytest.mark.slow),
     pytest.param(16, "two_launch", "gathered", None, BOUND_1M, marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize(("world", "form", "queries", "above", "name"), BETWEEN_RANKS)
def test_ranks_do_what_the_staged_form_does(ranks_of, world, form, queries, above, name):
    """`above`: an adaptive object's threshold is just below the problem's sum of blocks, or just it."""
    problem, ids = cells.problem_of(name), cells.ids_of(name)
    pages, attended = expected_pages(problem, ids, page_size=32, stride=4)
    for shard, got, got_pages, got_attended, counts in ranks_of(world).run(cell, name, form, queries, above):
        assert counts == (None if above is None else {"cp": int(above), "tp": int(not above)})
        owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
        assert_ids(got, ids[owned], f"{form}, {queries}, {shard}")
        assert torch.equal(got_pages, pages[owned]) and torch.equal(got_attended, attended[owned]), shard


def reusing(rank, form, queries, threshold):
    """Four layers of a step, of each three of which the first selects: (path, ids, page table, launches so far) of each."""
    quick_interpreter.sort_in_numpy(pytest.MonkeyPatch())
    shard = Shard(rank, dist.get_world_size(), 4)
    options = CPOptions(
        enabled=True, world=shard.world, shape=shape_of(2), device="cpu", page_size=64, max_requests=3, max_query_len=2, max_context=BOUND,
        queries=queries, exchange="symmetric", form=form, threshold_blocks=threshold, reuse_every=3,
    )  # fmt: skip
    made = Indexer(options, options.build(shard, "cpu"))
    found = []
    for layer in range(4):
        problem = layer_of_a_step(layer)
        table = PageTable.empty(problem.shape, local_heads=shard.local_heads, tokens=problem.tokens, page_size=16, stride=8)
        ids = made(layer, *given(problem, shard, queries), query_len=2, pages=table).clone()
        found.append((made.path, ids, table.pages, table.attended, int(made.decode._state[0])))
    made.decode.check()
    return shard, found


def layer_of_a_step(layer: int):
    """Queries and keys of a layer: lengths and the block table are the step's."""
    return build(shape_of(2), [64 * 7 + 21, 0, 64 * 2 + 1], 2, max_context=BOUND, seed=40 + layer)


@pytest.mark.parametrize("form", cells.FORMS)
@pytest.mark.parametrize("queries, threshold", [("gathered", None), ("replicated", None), ("gathered", 4)])
def test_reusing_layers_hand_on_ids_and_page_tables_and_launch_nothing(ranks_of, form, queries, threshold):
    selected = [layer_of_a_step(layer) for layer in (0, 0, 0, 3)]
    assert not torch.equal(oracle(selected[0]), oracle(selected[3])), "the layers must differ in their choice"
    path = "adaptive" if threshold else "cp"
    for shard, found in ranks_of(2).run(reusing, form, queries, threshold):
        owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
        assert [got[0] for got in found] == [path, "reused", "reused", path]
        assert [got[4] for got in found] == [1, 1, 1, 2]
        for got, problem in zip(found, selected, strict=True):
            pages, attended = expected_pages(problem, oracle(problem), page_size=16, stride=8)
            assert_ids(got[1], oracle(problem)[owned])
            assert torch.equal(got[2], pages[owned]) and torch.equal(got[3], attended[owned]), shard


def adaptive(rank, shape, queries, form, threshold, lengths, query_len):
    """Back-to-back calls of an adaptive object, a rank late before some: the ids of each, and how often which path."""
    cp, shard = make(rank, shape, queries, form, query_len=query_len, threshold_blocks=threshold)
    late = random.Random(7)
    found = []
    for i, step in enumerate(lengths):
        if late.randrange(shard.world) == rank:
            time.sleep(late.choice([0, 0.002, 0.02]))
        found.append(cp(*given(build(shape, step, query_len, max_context=BOUND, seed=i), shard, queries), query_len=query_len).clone())
    cp.check()
    return shard, found, cp.path, cp.counts()


@pytest.mark.parametrize(
    ("world", "form", "queries", "query_len", "threshold"),
    [pytest.param(2, "one_launch", "gathered", 1, 0, marks=pytest.mark.slow), (2, "one_launch", "gathered", 1, 11),
     pytest.param(2, "one_launch", "gathered", 1, 10**6, marks=pytest.mark.slow), (2, "one_launch", "replicated", 1, 11),
     (2, "one_launch", "gathered", 5, 11), pytest.param(3, "one_launch", "gathered", 1, 11, marks=pytest.mark.slow),
     (4, "two_launch", "gathered", 2, 11)],
)  # fmt: skip
def test_few_blocks_take_tps_path_and_many_cps(ranks_of, world, form, queries, query_len, threshold):
    """Ids are the reference's on both paths, whatever path the calls before took; the sum of blocks alone decides."""
    shape, lengths = shape_of(world), LENGTHS[3:]
    problems = [build(shape, step, query_len, max_context=BOUND, seed=i) for i, step in enumerate(lengths)]
    visible = [[-(-n // 64) if n <= BOUND else 0 for n in step] for step in lengths]
    reading = [sum(blocks) > threshold for blocks in visible if max(blocks) > shape.topk]
    taken = sum(reading)
    assert threshold != 11 or 0 < taken < len(reading)
    for shard, found, path, counts in ranks_of(world).run(adaptive, shape, queries, form, threshold, lengths, query_len):
        assert path == "adaptive" and counts == {"cp": taken, "tp": len(lengths) - taken}
        for got, problem, step in zip(found, problems, lengths, strict=True):
            owned = shard.owned_heads
            assert_ids(got, oracle(problem)[owned.start : owned.stop], f"{form}, {queries}, {shard}, lengths {step}")


def never_comes(rank, form, queries, absent, lengths):
    """`absent` stays away from the second call. What the others get: (ids, page table) of calls, what `check` and the next call say, seconds."""
    shape = shape_of(2)
    problem = build(shape, lengths, seed=3)
    cp, shard = make(rank, shape, queries, form, bound=problem.max_context)

    def call():
        table = PageTable.empty(shape, local_heads=shard.local_heads, tokens=2, page_size=16)
        return cp(*given(problem, shard, queries), pages=table).clone(), table.pages, table.attended

    first = call()
    impatient(cp)
    dist.barrier()
    if rank == absent:
        dist.barrier()
        cp.check()  # nothing is wrong here: this rank awaited nothing
        return first, None, None, [], 0.0
    start = time.monotonic()
    second = call()
    took = time.monotonic() - start
    third = call()  # as a replay would: nothing was raised yet
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
    "form, queries, lengths",
    [
        ("one_launch", "replicated", [64 * 9, 64 * 2]),
        ("one_launch", "gathered", [64 * 9, 64 * 2]),
        ("one_launch", "replicated", [64 * 66, 64 * 2]),  # the row's segments are chosen from by programs of their own
        ("two_launch", "replicated", [64 * 9, 64 * 2]),
        ("staged", "replicated", [64 * 9, 64 * 2]),
        ("staged", "gathered", [64 * 9, 64 * 2]),
    ],
)
def test_a_rank_that_does_not_come_is_named(ranks_of, form, queries, lengths):
    absent = 1
    answers = ranks_of(2).run(never_comes, form, queries, absent, lengths)
    problem = build(shape_of(2), lengths, seed=3)
    expect = oracle(problem)
    for rank, (*tables, said, took) in enumerate(answers):
        for table in filter(None, tables):  # it tells of the ids beside it: no page and no token of a row of -1
            pages, attended = expected_pages(problem, table[0], page_size=16, stride=4)
            assert torch.equal(table[1], pages) and torch.equal(table[2], attended), rank
        first, second, third = (table and table[0] for table in tables)
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
        assert took < 40  # bounded, however slow the machine: a hundred polls for each of a few rows


def dies(rank, form):
    """Rank 1 ends without a word in the middle of calls; how long the other's call took and what it says."""
    shape = shape_of(2)
    cp, shard = make(rank, shape, "gathered", form)
    problem = build(shape, [64 * 9], max_context=BOUND, seed=3)
    for _ in range(2):
        cp(*given(problem, shard, "gathered"))
    impatient(cp)
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
    assert own._pipes[0].poll(60), "rank 0 still waits for a dead rank"
    ok, answer = own._pipes[0].recv()
    assert ok, answer
    ids, said, took = answer
    own._processes[1].join(5)
    assert own._processes[1].exitcode == 3
    assert bool((ids == -1).all()) and "a wait for rank 1 expired" in said and took < 40
    own._processes[0].kill()


def unequal(rank):
    """Rank 1 comes with another length, so the two don't agree whether they exchange."""
    shape = shape_of(2)
    cp, shard = make(rank, shape, "replicated", "one_launch")
    impatient(cp)
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


SLOT = "slot = (exchange & 1) * slot_words"
LONG, FORCED, MOST_FORCED = [(64 * 9,)] * 4, [(64 * 3,)] * 5, dict(topk=2, local_blocks=2)
HELD_UP_S = 30.0  # a late rank goes on after so long; only a rule that holds keeps its peer from coming


class Rule:
    """A rule of the protocol taken out of the kernel.

    Args:
        change: (file, text, broken text); None leaves the kernel as it is.
        seen: what must come of it: "" nothing, "expired" or "wrong ids".
        late: which rank is late, and where: at the first wait of call i until the peer is at its first wait of the call
            `ahead` exchanging calls later ("inside"), or before call i until the peer has finished it ("before").
        lengths: of the calls; shape: changes of the shape.
        polls: of a wait, where a count and not a time bounds it.
        held_up_s: how long the late rank waits at most.
    """

    def __init__(self, change, seen, late=(1, "inside", 1), lengths=LONG, shape=None, polls=None, held_up_s=HELD_UP_S):
        self.change, self.seen, self.late, self.lengths = change, seen, late, lengths
        self.shape, self.polls, self.held_up_s = shape or {}, polls, held_up_s


RULES = {
    "nothing is taken out": Rule(None, ""),
    "nothing is taken out, and most blocks are forced": Rule(None, "", (1, "inside", 2), FORCED, MOST_FORCED, held_up_s=0.3),
    "two slots": Rule(("fused", SLOT, "slot = (exchange & 0) * slot_words"), "expired"),
    "a counter that advances in exchanging launches only": Rule(
        ("fused", "exchange, mask=exchanges)", "exchange, mask=exchanges | (rank == 0))"), "expired", lengths=[(64 * 9,), (64,), (64 * 9,)]
    ),
    "exchanges pick the slot, not steps": Rule(("fused", SLOT, "slot = (launch & 1) * slot_words"), "expired", lengths=[(64 * 9,), (64,)] * 3),
    "presence words": Rule(
        ("fused", "PRESENCE=exchange and needs_presence(shape, shard)", "PRESENCE=False"), "expired", (1, "inside", 2), FORCED, MOST_FORCED
    ),
    "tags": Rule(("words", "((word >> 32).to(tl.int32) != tag)", "(word == 0)"), "wrong ids", (1, "before", 2)),
    "an expired wait is told": Rule(
        ("words", "return word.to(tl.int32), missing, left", "return word.to(tl.int32), missing, left * 0"), "wrong ids", (0, "before", 1), polls=1
    ),
}  # fmt: skip


def load(folder: str):
    """The fused kernel's copy in `folder`, over the copy of its words there."""
    made = {}
    for name in ("words", "fused"):
        spec = importlib.util.spec_from_file_location(f"broken_{name}", os.path.join(folder, f"broken_{name}.py"))
        made[name] = sys.modules[f"broken_{name}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made[name])
    for name in ("await_words", "put", "tagged"):
        setattr(made["fused"], name, getattr(made["words"], name))
    return made["fused"]


def timed_waits(module, seconds: float) -> None:
    """Waits of `module` end after a time, whatever a poll takes on this machine."""
    await_words = module.await_words

    def waits(p_word, mask, tag, _):
        until = time.monotonic() + seconds
        while True:
            found = await_words(p_word, mask, tag, 20)
            if int(found[2].handle.data.item()) == 0 or time.monotonic() > until:
                return found

    module.await_words = waits


def without(rank, name, folder):
    """The calls of a rule, over the kernels in `folder`: (shard, ids of each call, what `check` says)."""
    rule, marks, op = RULES[name], Path(folder), load(folder)
    shape = shape_of(2, **rule.shape)
    exchanging = [i for i, step in enumerate(rule.lengths) if max(step) > 64 * shape.topk]
    late, where, ahead = rule.late

    def wait_for(what: str) -> None:
        until = time.monotonic() + rule.held_up_s
        while not (marks / what).exists() and time.monotonic() < until:
            time.sleep(0.002)

    def at_wait() -> None:
        later = [j for j in exchanging if j > call[0]]
        if rank != late:
            (marks / f"waits{call[0]}").touch()
        elif where == "inside" and call[0] in exchanging and len(later) >= ahead:
            wait_for(f"waits{later[ahead - 1]}")

    original, decode.fused_op = decode.fused_op, op
    try:
        cp, shard = make(rank, shape, "replicated", "one_launch")
        if rule.polls:
            cp._fused.spin_limit = rule.polls
        else:
            timed_waits(op, 1.5 if rule.seen == "expired" else 45.0)
        call, found = [0], []
        for i, step in enumerate(rule.lengths):
            call[0] = i
            if rank == late and where == "before" and i >= ahead:
                wait_for(f"done{i}")
            problem = build(shape, step, max_context=BOUND, seed=1 + i)
            with at_first_wait(op, "fused", at_wait):
                found.append(cp(*given(problem, shard, "replicated")).clone())
            if rank != late:
                (marks / f"done{i}").touch()
        try:
            cp.check()
            return shard, found, ""
        except RuntimeError as error:
            return shard, found, str(error)
    finally:
        decode.fused_op = original


@pytest.mark.parametrize("name", RULES)
def test_a_rule_taken_out_of_the_kernel_is_seen(ranks_of, tmp_path, name):
    """Each rule is needed, and these tests notice when it is missing; with all of them nothing is wrong."""
    rule = RULES[name]
    for kernel in ("fused", "words"):
        text = (Path(decode.__file__).parent / "kernels" / f"{kernel}.py").read_text()
        if rule.change and rule.change[0] == kernel:
            assert rule.change[1] in text, f"{kernel}.py does not hold {rule.change[1]!r}"
            text = text.replace(rule.change[1], rule.change[2])
        (tmp_path / f"broken_{kernel}.py").write_text(text)
    answers = ranks_of(2).run(without, name, str(tmp_path))
    said = [text for _, _, text in answers if text]
    shape = shape_of(2, **rule.shape)
    expect = [oracle(build(shape, step, max_context=BOUND, seed=1 + i)) for i, step in enumerate(rule.lengths)]
    wrong = [
        i for shard, found, _ in answers for i, (got, want) in enumerate(zip(found, expect, strict=True))
        if not torch.equal(got, want[shard.owned_heads.start : shard.owned_heads.stop])
    ]  # fmt: skip
    if rule.seen == "expired":
        assert said and all("expired" in text for text in said), (said, wrong)
    elif rule.seen == "wrong ids":
        assert wrong and not said, (said, wrong)
    else:
        assert not wrong and not said, (said, wrong)

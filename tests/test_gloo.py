"""Ranks that are processes: TP and CP over gloo, from the queries' gather to the owned ids."""

import pytest
import torch
import torch.distributed as dist
from cases import CASES
from problems import assert_ids, build, oracle, poison_fresh_memory
from ranks import Ranks

from m3cp import exchange as exchange_module
from m3cp import reference
from m3cp.decode import CPDecode, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def group_gather(out, payload):
    """What an engine might hand in: it knows 32-bit words only."""
    assert (
        out.dtype == payload.dtype == torch.int32
        and out.dim() == payload.dim() == 1
        and out.numel() == payload.numel() * dist.get_world_size()
    )
    parts = list(out.view(dist.get_world_size(), -1).unbind(0))
    dist.all_gather(parts, payload)


def exchange_of(kind):
    return {
        "group": CollectiveExchange,
        "callable": lambda: CollectiveExchange(gather=group_gather),
        "symmetric": SymmetricExchange,
    }[kind]()


def decode_cases(rank, names, kind, queries):
    """Owned ids of each case, from one object per shape; and the collectives of each call."""
    shard_of = {}
    found = []
    for case in (c for c in CASES if c.name in names):
        problem = case.problem
        shard = shard_of.setdefault(case.shape.heads, Shard(rank, dist.get_world_size(), case.shape.heads))
        exchange = exchange_of(kind)
        cp = CPDecode(case.shape, shard, exchange=exchange, queries=queries, **problem.bounds())
        given = problem.q if queries == "replicated" else problem.heads(shard.owned_heads)
        ids = [
            cp(given, *problem.tensors[1:], query_len=case.query_len).clone() for _ in range(3)
        ]  # slots by parity come round
        tp = TPDecode(case.shape, shard, **problem.bounds())(
            problem.heads(shard.owned_heads), *problem.tensors[1:], query_len=case.query_len
        )
        found.append((shard, ids, tp, exchange.calls / 3))
    return found


NAMES = (
    "m3",
    "one head",
    "eight heads fill the tile twice",
    "ties",
    "NaN and infinities among the keys",
    "bad pages",
    "no request",
    "longer than the bound",
)


@pytest.mark.parametrize("kind", ["group", "callable", "symmetric"])
@pytest.mark.parametrize("queries", ["gathered", "replicated"])
def test_every_rank_gets_its_heads_ids(ranks, kind, queries):
    answers = ranks.run(decode_cases, NAMES, kind, queries)
    chosen = [c for c in CASES if c.name in NAMES]
    for rank, found in enumerate(answers):
        for case, (shard, ids, tp, calls) in zip(chosen, found, strict=True):
            expect = case.expect[shard.owned_heads.start : shard.owned_heads.stop]
            for call, got in enumerate([*ids, tp]):
                assert_ids(got, expect, f"{case.name}, rank {rank}, call {call}")
            assert calls == (0 if not case.lengths else 1 + (queries == "gathered"))


def bits(rank, kind):
    """Scores of the rank's shard, of a TP rank's heads, and what CP chose, on data that no order of summation leaves alone."""
    shape = IndexerShape(topk=3, local_blocks=0)
    problem = build(shape, [128 * 17, 128 * 9 + 5], 2, kind=kind, seed=11)
    shard = Shard(rank, dist.get_world_size(), 4)
    cp = CPDecode(shape, shard, exchange=CollectiveExchange(), **problem.bounds())
    cp(problem.heads(shard.owned_heads), *problem.tensors[1:], query_len=2)
    tp = TPDecode(shape, shard, **problem.bounds())
    tp(problem.heads(shard.owned_heads), *problem.tensors[1:], query_len=2)
    return cp._scores.clone(), tp._scores.clone(), cp._out.clone(), tp._out.clone()


@pytest.mark.parametrize("kind", ["free", "ulp"])
def test_scores_have_the_same_bits_on_every_rank(ranks, kind):
    answers = ranks.run(bits, kind)
    shape = IndexerShape(topk=3, local_blocks=0)
    problem = build(shape, [128 * 17, 128 * 9 + 5], 2, kind=kind, seed=11)
    whole = reference.score(
        *problem.tensors, shape=shape, shard=Shard(0, 1, 4), query_len=2, max_context=problem.max_context
    )
    for rank, (cp_scores, tp_scores, cp_ids, tp_ids) in enumerate(answers):
        assert torch.equal(cp_scores, whole[:, :, rank :: ranks.world]), f"CP, rank {rank}"
        owned = Shard(rank, ranks.world, 4).owned_heads
        assert torch.equal(tp_scores, whole[:, owned.start : owned.stop]), f"TP, rank {rank}"
        assert torch.equal(cp_ids, tp_ids)


def carry(rank, kind):
    """X10: payloads whose 32-bit halves are NaN patterns, zeros and ones, back from every rank, stacked and flat."""
    world = dist.get_world_size()
    halves = torch.tensor([0x7FC00001, 0, 0xFFFFFFFF, 0x7F800001, 0xFFC00000, 0x80000000, 1, 0x7FFFFFFF])
    keys = ((halves[:, None] << 32) | halves[None]).view(8, 8) ^ rank
    exchange = exchange_of(kind)
    gather = exchange.attach(Shard(rank, world, world), torch.device("cpu"), 2 * keys.numel())
    found = []
    for payload in (keys, keys.flatten(), keys.flatten()[:3].contiguous(), keys.view(torch.bfloat16)):
        out = torch.empty(world, *payload.shape, dtype=payload.dtype)
        gather(out, payload)
        expect = torch.stack(
            [
                (keys ^ rank ^ other).view(payload.dtype).flatten()[: payload.numel()].view(payload.shape)
                for other in range(world)
            ]
        )
        found.append(torch.equal(out.view(torch.int16), expect.view(torch.int16)))
    return found


@pytest.mark.parametrize("kind", ["group", "callable", "symmetric"])
def test_keys_travel_bit_for_bit(ranks, kind):
    assert ranks.run(carry, kind) == [[True] * 4] * ranks.world


def refusals(rank):
    """X02: a shard that does not fit the group, before any collective."""
    world = dist.get_world_size()
    shape = IndexerShape(topk=4)
    problem = build(shape, [300])
    said = []
    for shard in (Shard(rank, 2 * world, 4), Shard(0, 1, 4), Shard((rank + 1) % world, world, 4)):
        for exchange in (CollectiveExchange(), SymmetricExchange()):
            try:
                CPDecode(shape, shard, exchange=exchange, **problem.bounds())
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
    shard = Shard(rank, world, 4)
    cp = CPDecode(shape, shard, exchange=CollectiveExchange(), **problem.bounds())
    for q in (problem.q, problem.q.reshape(4, 1, 128), problem.q.reshape(1, 512), problem.q[:, :0]):
        try:
            cp(q, *problem.tensors[1:])
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_shard_that_does_not_fit_is_refused(ranks):
    for rank, said in enumerate(ranks.run(refusals)):
        world = ranks.world
        for text in said[:2]:
            assert f"shard.world={2 * world}: the process group has {world} ranks" in text
        for text in said[2:4]:
            assert f"shard.world=1: the process group has {world} ranks" in text
        for text in said[4:6]:
            assert f"shard.rank={(rank + 1) % world}: this process is rank {rank}" in text
        for text in said[6:]:
            assert text.startswith("q of shape") and (f"heads={4 // world}" in text or "3 dimensions" in text)


def first_call(rank, kind, batch):
    """G06: warm-up alone sets transports up, for small and large payloads; then the first call. Its ids, the right ones, and payload bytes."""
    shape = IndexerShape(topk=4)
    shard = Shard(rank, dist.get_world_size(), 4)
    problem = build(shape, [128 * 6, 128 * 5 + 3, 700], seed=6)
    several = torch.arange(batch) % 3
    bounds = problem.bounds(max_requests=512)
    cp = CPDecode(shape, shard, exchange=exchange_of(kind), **bounds)
    gather, warmed = cp._gather, []
    cp._gather = lambda out, payload: warmed.append(payload.numel() * payload.element_size()) or gather(out, payload)
    cp.warmup()
    cp._gather = gather

    def too_late(*args, **named):
        raise AssertionError("a transport was set up after warm-up, where a capture would stand")

    for owner, name in ((dist, "new_group"), (exchange_module, "_host_shared"), (SymmetricExchange, "allocate"), (SymmetricExchange, "attach"), (CollectiveExchange, "attach")):
        setattr(owner, name, too_late)
    given = (problem.heads(shard.owned_heads)[several], problem.cache, problem.block_table[several], problem.seq_lens[several])
    ids = cp(*given).clone()
    cp.check()
    return ids, oracle(problem)[shard.owned_heads.start : shard.owned_heads.stop, several], sorted(set(warmed))


@pytest.mark.parametrize("kind", ["group", "callable", "symmetric"])
@pytest.mark.parametrize("batch", [1, 512])
def test_the_first_call_of_fresh_processes_finds_its_transport_warm(kind, batch):
    own = Ranks(2)
    try:
        answers = own.run(first_call, kind, batch)
    finally:
        own.close()
    keys, queries = 4 * 4 * 8, 2 * 128 * 2  # bytes a request: four heads of four keys; two owned heads' queries
    for ids, expect, warmed in answers:
        assert_ids(ids, expect, f"{kind}, batch {batch}")
        assert {keys, queries, 512 * keys, 512 * queries} <= set(warmed), "both ends of what a call can send were warmed"


def stale(rank):
    """Two objects, batches of changing size: what one call leaves never shows in the next."""
    poison_fresh_memory(0xFF)
    shape = IndexerShape(topk=4)
    shard = Shard(rank, dist.get_world_size(), 4)
    problems = [
        build(shape, [128 * 12, 128 * 11, 40], 2, seed=1),
        build(shape, [128 * 2], 1, seed=2, max_context=128 * 12),
    ]
    problems += [build(shape, [128 * 9, 0], 2, seed=3, max_context=128 * 12)]
    objects = [
        CPDecode(shape, shard, exchange=kind(), **problems[0].bounds())
        for kind in (CollectiveExchange, SymmetricExchange)
    ]
    found = []
    for problem in problems + problems[::-1]:
        for cp in objects:
            found.append(
                cp(problem.heads(shard.owned_heads), *problem.tensors[1:], query_len=problem.query_len).clone()
            )
    return found


def test_calls_do_not_see_each_other(ranks):
    shape = IndexerShape(topk=4)
    problems = [
        build(shape, [128 * 12, 128 * 11, 40], 2, seed=1),
        build(shape, [128 * 2], 1, seed=2, max_context=128 * 12),
    ]
    problems += [build(shape, [128 * 9, 0], 2, seed=3, max_context=128 * 12)]
    expect = [oracle(p) for p in problems + problems[::-1] for _ in range(2)]
    for rank, found in enumerate(ranks.run(stale)):
        owned = Shard(rank, ranks.world, 4).owned_heads
        for got, want in zip(found, expect, strict=True):
            assert_ids(got, want[owned.start : owned.stop])


def row_counts(rank, counts, waits):
    """What each of some calls says when rank r comes with counts[r] requests (None: does not come)."""
    exchange_module.AGREE_S = waits
    shape = IndexerShape(topk=4)
    shard = Shard(rank, dist.get_world_size(), 4)
    cp = CPDecode(
        shape, shard, exchange=CollectiveExchange(), max_requests=4, max_query_len=1, max_context=1024, device="cpu"
    )
    cp._warm = True
    said = []
    for step in counts:
        if step[rank] is None:
            continue
        problem = build(shape, [128 * 7] * step[rank], max_context=1024)
        try:
            said.append(tuple(cp(problem.heads(shard.owned_heads), *problem.tensors[1:]).shape))
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, cp.exchange.calls


def test_ranks_with_different_row_counts_all_raise_before_any_collective(ranks):
    """X05: a rank with nothing to do must not leave its peers in a collective."""
    rest = [3] * (ranks.world - 1)
    mixed = [[*rest, 0], [*rest, 1], *([n] * ranks.world for n in (2, 2, 0, 1))]
    for said, calls in ranks.run(row_counts, mixed, 20.0):
        assert (
            said[0]
            == f"ValueError: rows of the ranks {[*rest, 0]}: every rank must reach the exchange with the same row count"
        )
        assert f"rows of the ranks {[*rest, 1]}" in said[1]
        assert [s[1] for s in said[2:]] == [2, 2, 0, 1]
        assert calls == 3 * 2, "collectives ran in the calls that agreed and had rows, and in no other"


def test_a_rank_that_does_not_come_is_named():
    own = Ranks(2)  # afterwards the ranks no longer count alike
    (_, calls), (said, other_calls) = own.run(row_counts, [[None, 2], [None, 3]], 1.0)
    own.close()
    assert calls == other_calls == 0
    assert "RuntimeError: rank 1 came with 2 rows, rank 0 did not say within 1 s that its count changed too" in said[0]
    assert "build the process group and this object anew" in said[1]


def host_wait_expires(rank, queries):
    """Rank 1 stays away from the second call; what the others' calls and `check` say."""
    exchange_module._HOST_WAIT_S = 0.5
    problem = build(IndexerShape(topk=4), [128 * 9], seed=4)
    shard = Shard(rank, dist.get_world_size(), 4)
    cp = CPDecode(problem.shape, shard, exchange=SymmetricExchange(), queries=queries, **problem.bounds())
    q = problem.q if queries == "replicated" else problem.heads(shard.owned_heads)
    cp(q, *problem.tensors[1:])
    dist.barrier()
    said = []
    for attempt in (lambda: cp(q, *problem.tensors[1:]), lambda: cp(q, *problem.tensors[1:]), cp.check, cp.warmup):
        try:
            attempt() if rank != 1 else None
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    dist.barrier()
    exchange_module._HOST_WAIT_S = 30.0
    return said


@pytest.mark.parametrize("queries", ["gathered", "replicated"])
def test_a_wait_between_processes_that_expires_names_the_rank_and_ends_the_object(ranks, queries):
    for rank, said in enumerate(ranks.run(host_wait_expires, queries)):
        if rank == 1:
            continue
        assert f"rank {rank} waited 0.5 s for rank 1 in a symmetric gather" in said[0]
        assert f"rank {rank} waited in vain for rank 1 before: build the object anew" in said[1]
        assert "a wait for rank 1 expired" in said[2]
        assert said[3].endswith("this object refuses calls")

"""Both paths inside CUDA graphs: captured on a dummy batch of one block, right at any length; nothing forbidden inside."""

import gc
import weakref

import pytest
import torch
from graphs import capture, no_compile, nodes
from problems import assert_ids, build

from m3cp import reference, timing
from m3cp.decode import CPDecode, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

pytestmark = pytest.mark.gpu
SHAPE = IndexerShape()
BOUND = 1 << 20
LENGTHS = (
    [131_072, 129, 128, 127],
    [1, 1, 1, 1],
    [0, 131_072, 0, 0],
    [127, 0, 100_003, 2_049],
    [0, 0, 0, 0],
    [129, 128, 127, 300],
)
PATHS = (
    "tp staged",
    "tp one_launch",
    "tp two_launch",
    "cp staged",
    "cp staged symmetric",
    "cp one_launch",
    "cp two_launch",
)


def make(path: str, **changes):
    arm, form, *exchange = path.split()
    bounds = dict(max_requests=4, max_query_len=2, max_context=BOUND, device="cuda", form=form) | changes
    if arm == "tp":
        return TPDecode(SHAPE, Shard(0, 1, 4), **bounds)
    return CPDecode(
        SHAPE,
        Shard(0, 1, 4),
        exchange=SymmetricExchange() if exchange or form != "staged" else CollectiveExchange(),
        **bounds,
    )


@pytest.fixture(scope="module")
def problem():
    """Four requests of 128k; the tests change the lengths in place."""
    whole = build(SHAPE, [131_072] * 4, 1, max_context=131_072, page_slots=1).to("cuda")
    table = torch.full((4, BOUND // 128), 1 << 20, dtype=torch.int32, device="cuda")
    table[:, : whole.block_table.shape[1]] = whole.block_table
    return type(whole)(SHAPE, 1, BOUND, whole.q, whole.cache, table, torch.ones(4, dtype=torch.int32, device="cuda"))


def expected(problem, query_len: int, q):
    return reference.select_blocks(q, *problem.tensors[1:], shape=SHAPE, query_len=query_len).cpu()


@pytest.mark.parametrize("path", PATHS)
def test_captured_on_one_block_and_replayed_at_any_length(path, problem):
    decode = make(path)
    decode.warmup()
    for query_len in (1, 2):
        q = problem.q.repeat(query_len, 1, 1).contiguous()
        out = torch.full((4, 4 * query_len, 16), -7, dtype=torch.int32, device="cuda")
        problem.seq_lens.fill_(1)
        thresholds = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            with no_compile():
                graph = capture(decode, q, *problem.tensors[1:], query_len=query_len, out=out)
        finally:
            gc.set_threshold(*thresholds)
        found = nodes(graph)
        ours = [n for n in found if n.endswith("_kernel")]
        assert len(ours) == decode.launches, (path, found)
        assert "memset" not in found and "host" not in found, found
        for lengths in LENGTHS:
            problem.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
            out.fill_(-7)
            graph.replay()
            assert_ids(out, expected(problem, query_len, q), f"{path}, {lengths}, query_len {query_len}")
            eager = decode(q, *problem.tensors[1:], query_len=query_len)
            assert torch.equal(eager, out)
        decode.check()
    problem.seq_lens.fill_(1)


@pytest.mark.parametrize("path", PATHS)
def test_capture_before_warmup_raises(path, problem):
    decode = make(path)
    with pytest.raises(RuntimeError, match="call warmup"):
        capture(decode, problem.q, *problem.tensors[1:])
    torch.cuda.synchronize()


@pytest.mark.parametrize("path", PATHS)
def test_a_call_neither_allocates_nor_synchronises(path, problem):
    decode = make(path)
    decode.warmup()
    out = torch.empty(4, 4, 16, dtype=torch.int32, device="cuda")
    decode(problem.q, *problem.tensors[1:], out=out)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with no_compile():
            decode(problem.q, *problem.tensors[1:], out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    decode.check()


@pytest.mark.parametrize("path", ["tp staged", "cp staged"])
def test_a_bucket_larger_than_the_batch_with_rubbish_in_its_padding(path):
    """G08: 5 requests in a graph of 8 rows; padding rows see no page and write -1; a ninth raises."""
    problem = build(SHAPE, [128 * 30, 128 * 17 + 3, 5, 128 * 64, 128 * 20], 2, max_context=128 * 64).to("cuda")
    for query_len in (1, 2):
        decode = make(path, max_requests=8, max_context=128 * 64)
        decode.warmup()
        table = torch.full((8, 64), 1 << 20, dtype=torch.int32, device="cuda")
        table[5:, ::2] = -7
        table[:5] = problem.block_table
        lens = torch.zeros(8, dtype=torch.int32, device="cuda")
        q = torch.full((8 * query_len, 4, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
        q[: 5 * query_len] = problem.q[: 5 * query_len]
        out = torch.empty(4, 8 * query_len, 16, dtype=torch.int32, device="cuda")
        graph = capture(decode, q, problem.cache, table, lens, query_len=query_len, out=out)
        lens[:5] = problem.seq_lens
        graph.replay()
        eager = decode(q[: 5 * query_len], problem.cache, table[:5], lens[:5], query_len=query_len)
        assert torch.equal(out[:, : 5 * query_len], eager) and bool((out[:, 5 * query_len :] == -1).all())
        expect = reference.select_blocks(
            q[: 5 * query_len], problem.cache, table[:5], lens[:5], shape=SHAPE, query_len=query_len
        )
        assert torch.equal(eager, expect)
        lens.fill_(128 * 64)
        table.fill_(1 << 20)  # full lengths over a table that nobody wrote
        graph.replay()
        assert out[0, 0].tolist() == [*range(15), 63]
        with pytest.raises(ValueError, match="seq_lens of 9 requests: the buffers hold max_requests=8"):
            decode(q, problem.cache, table, torch.zeros(9, dtype=torch.int32, device="cuda"), query_len=query_len)
        decode.check()


def test_the_longest_bound_gives_the_highest_ids():
    """M07: 2**24 blocks, and a winner at one of the last; every count and offset on the way fits."""
    decode = make("tp staged", max_requests=1, max_context=2**31 - 1)
    assert decode.nbytes > 2**24 * 4 * 2
    decode.warmup()
    table = torch.zeros(1, 2**24, dtype=torch.int32, device="cuda")
    lens = torch.full((1,), 2**31 - 1, dtype=torch.int32, device="cuda")
    cache = torch.zeros(2, 128, 128, dtype=torch.bfloat16, device="cuda")
    cache[1] = 1
    table[0, 16_000_000] = 1
    q = torch.ones(1, 4, 128, dtype=torch.bfloat16, device="cuda")
    ids = decode(q, cache, table, lens)
    assert ids[0, 0].tolist() == [*range(14), 16_000_000, 2**24 - 1]
    decode.check()


def test_a_graph_keeps_what_its_replays_touch():
    def made():
        x, out = torch.arange(1 << 20, device="cuda"), torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
        torch.add(x, 1, out=out)
        return timing.capture([lambda: torch.add(x, 1, out=out)]), [weakref.ref(x), weakref.ref(out)]

    graph, tensors = made()
    gc.collect()
    assert all(tensor() is not None for tensor in tensors)
    replay = graph.replay
    del graph
    gc.collect()
    assert all(tensor() is not None for tensor in tensors)
    replay()
    assert tensors[1]()[-1] == 1 << 20


def test_an_evicting_read_makes_its_buffer_before_the_capture():
    made, x = [], torch.zeros(16, device="cuda")

    def evict():
        if not made:
            made.append(torch.randn(16, generator=torch.Generator("cuda").manual_seed(1), device="cuda"))
        made[0].add_(1)

    x.add_(1)
    timing.capture([lambda: x.add_(1)], evict).replay()
    assert x.tolist() == [2.0] * 16

"""Every kernel once on small shapes, for compute-sanitizer (and in seconds without it):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python -m pytest -q tests/gpu/test_gpu_small.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m pytest -q tests/gpu/test_gpu_small.py

Without the caching allocator each tensor ends where its allocation does, so that reading past `seq_lens`, the block
table or a score row is an error that memcheck sees.
"""

import attention_cases
import pytest
import torch
from mixed import BATCHES, check_mixed
from problems import assert_ids, assert_pages, build, far_apart, oracle

from m3cp.decode import CPDecode, CPLocal, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.kernels import page_read as page_read_op
from m3cp.pagetable import PageTable
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard
from m3cp.testing import select_virtual

pytestmark = pytest.mark.gpu
SHAPE = IndexerShape(topk=4)


def tight(problem):
    """The problem on the GPU, each tensor in an allocation of its own size, and a table that ends with its last row."""
    there = problem.to("cuda")
    q, cache, table, lens = (t.clone() for t in there.tensors)
    return type(problem)(problem.shape, problem.query_len, problem.max_context, q, cache, table.contiguous(), lens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_scores_of_every_cache_type(dtype):
    problem = build(SHAPE, [128 * 9 + 3, 0, 128 * 6, 1, 130], 2, dtype=dtype)
    for given in (problem, far_apart(problem)) if dtype.itemsize == 1 else (problem,):
        for path, world in (("tp", 1), ("cp", 2), ("cp", 8)):
            ids = select_virtual(*tight(given).tensors, shape=SHAPE, world=world, query_len=2, path=path)
            assert_ids(ids, oracle(given), f"{path} of {world}")


@pytest.mark.parametrize("query_len", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_fp8_scores_of_queries_that_are_no_fp16_numbers(dtype, query_len):
    """Such rows are scored in bf16, their neighbours in the same dot in fp16; 1, 2 and 4 dots a tile."""
    problem = far_apart(build(SHAPE, [128 * 9 + 3, 40], query_len, dtype=dtype))
    for path in ("tp", "cp"):
        ids = select_virtual(*tight(problem).tensors, shape=SHAPE, world=2, query_len=query_len, path=path, form="two_launch")
        assert_ids(ids, oracle(problem), path)


@pytest.mark.parametrize(
    "heads, query_len, block, dim, topk",
    [(8, 4, 128, 128, 3), (1, 1, 64, 64, 1), (4, 1, 64, 128, 7), (2, 8, 128, 64, 64)],
)
def test_scores_of_every_geometry(heads, query_len, block, dim, topk):
    shape = IndexerShape(heads=heads, head_dim=dim, block_size=block, topk=topk, init_blocks=1)
    problem = build(shape, [block * (topk + 3) + 9, query_len - 1], query_len, bad_pages=2)
    for path, world in (("tp", 1), ("cp", 4 if heads != 2 else 2)):
        ids = select_virtual(*tight(problem).tensors, shape=shape, world=world, query_len=query_len, path=path)
        assert_ids(ids, oracle(problem), f"{path} of {world}")


@pytest.mark.parametrize(
    "form, exchange, dtype",
    [
        ("staged", CollectiveExchange, torch.bfloat16),
        ("staged", SymmetricExchange, torch.bfloat16),
        ("one_launch", SymmetricExchange, torch.bfloat16),
        ("two_launch", SymmetricExchange, torch.bfloat16),
        ("one_launch", SymmetricExchange, torch.float8_e4m3fn),
        ("two_launch", SymmetricExchange, torch.float8_e4m3fnuz),
    ],
    ids=str,
)
def test_every_form_and_transport(form, exchange, dtype):
    problem = build(SHAPE, [128 * 9 + 3, 0, 128 * 600, 5], 2, dtype=dtype)
    there = tight(problem)
    bounds = there.bounds(form=form)
    for decode in (
        TPDecode(SHAPE, Shard(0, 1, 4), **bounds),
        CPDecode(SHAPE, Shard(0, 1, 4), exchange=exchange(), **bounds),
    ):
        for _ in range(3):
            assert_ids(decode(*there.tensors, query_len=2), oracle(problem), form)
        decode.check()


def test_page_tables():
    problem = build(SHAPE, [128 * 9 + 40, 0, 128 * 3 + 1], 2, bad_pages=1)
    for page_size in (16, 128):
        assert_pages(problem, oracle(problem), page_size=page_size, stride=128 // page_size * 2, world=2, device="cuda")


@pytest.mark.parametrize("world", [1, 2, 8])
def test_page_tables_of_the_fused_forms(world):
    problem = build(SHAPE, [128 * 9 + 40, 0, 128 * 600 + 1], 2, bad_pages=1)
    for page_size in (16, 128):
        for form in ("one_launch", "two_launch")[world > 1 :]:  # virtual ranks run in turn: none may wait for the next
            assert_pages(problem, oracle(problem), page_size=page_size, stride=128 // page_size * 2, world=world, form=form, device="cuda")


def test_page_tables_are_captured_after_their_own_warm_up():
    from graphs import capture, no_compile

    problem = build(SHAPE, [128 * 9 + 40, 128 * 3 + 1], max_context=128 * 16).to("cuda")
    decode = CPLocal(SHAPE, Shard(0, 1, 4), **problem.bounds())
    decode.warmup()
    pages = PageTable.empty(SHAPE, local_heads=4, tokens=2, page_size=16, device="cuda")
    with pytest.raises(RuntimeError, match=r"warmup\(page_size=16\)"):
        capture(decode, *problem.tensors, pages=pages)
    torch.cuda.synchronize()
    decode.warmup(page_size=16)
    lens = problem.seq_lens.clone()
    problem.seq_lens.fill_(1)
    with no_compile():
        graph = capture(decode, *problem.tensors, pages=pages)
    problem.seq_lens.copy_(lens)
    graph.replay()
    replayed = pages.pages.clone(), pages.attended.clone()
    decode(*problem.tensors, pages=pages)
    assert (
        torch.equal(replayed[0], pages.pages)
        and torch.equal(replayed[1], pages.attended)
        and int(pages.attended.min()) > 300
    )


def test_profiling_runs_choose_nothing():
    problem = build(SHAPE, [128 * 9, 40], 2).to("cuda")
    for decode in (
        TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds()),
        CPDecode(SHAPE, Shard(0, 1, 4), exchange=CollectiveExchange(), **problem.bounds()),
    ):
        ids = decode(problem.q, None, *problem.tensors[2:], query_len=2)
        assert decode.path == "profiling" and bool((ids == -1).all())


def test_a_second_stream_while_the_first_still_runs():
    problem = build(SHAPE, [128 * 9, 40], 2).to("cuda")
    decode = CPDecode(SHAPE, Shard(0, 1, 4), exchange=CollectiveExchange(), **problem.bounds())
    other, done = torch.cuda.Stream(), torch.cuda.Event()  # made now: the first stream of a process takes long
    decode(*problem.tensors, query_len=2)
    torch.cuda._sleep(4_000_000_000)  # two seconds of this stream's time, however busy the host
    decode(*problem.tensors, query_len=2)
    done.record()
    with torch.cuda.stream(other):
        try:
            decode(*problem.tensors, query_len=2)
            said = f"nothing, and the first call {'was done' if done.query() else 'still ran'}"
        except RuntimeError as error:
            said = str(error)
    assert "an exchange has one launch in flight" in said, said
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        decode(*problem.tensors, query_len=2)
    torch.cuda.synchronize()


@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_both_paths_of_an_adaptive_call(threshold):
    problem = build(SHAPE, [128 * 9 + 3, 0, 128 * 300, 5], 2)
    there = tight(problem)
    decode = CPDecode(SHAPE, Shard(0, 1, 4), exchange=SymmetricExchange(), threshold_blocks=threshold, **there.bounds(form="one_launch"))
    for _ in range(3):
        assert_ids(decode(*there.tensors, query_len=2), oracle(problem), f"threshold {threshold}")
    decode.check()


@pytest.mark.parametrize("name", ["mixed", "fp8", "eight heads, forced on both sides"])
def test_prefill_in_mixed_steps(name):
    check_mixed(BATCHES[name], BATCHES[name].problem.shape.heads, device="cuda", scores_bytes=1 << 14)


@pytest.mark.parametrize("name", ["m3", "fp8", "fnuz, draft tokens", "topk 1"])
def test_attention(name):
    attention_cases.check(name, device="cuda")


def test_page_reads():
    cache = torch.randn(9, 128, 128, device="cuda").bfloat16()
    pages = torch.tensor([8, 0, 3], dtype=torch.int32, device="cuda")
    for reader in page_read_op.readers(cache.device):
        out = torch.empty(page_read_op.partials(cache.device, reader), dtype=torch.int32, device="cuda")
        page_read_op.page_read(cache, pages, out, reader=reader)
        assert int(out.sum(dtype=torch.int64)) % 2**32 == page_read_op.checksum(cache, pages)

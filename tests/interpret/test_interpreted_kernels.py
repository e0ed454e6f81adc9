"""Every kernel in Triton's interpreter through virtual ranks: the same cases as the eager backend and the GPUs."""

import dataclasses

import cells
import pytest
import torch
import triton
import triton.language as tl
from cases import (
    CASES,
    SPREAD,
    check,
    check_grid_bound,
    check_length_error,
    check_nothing_kept,
    check_same_bits,
    check_written,
    kernel_scores,
)
from problems import assert_ids, assert_pages, build, far_apart, oracle, rows

from m3cp import keys, reference
from m3cp.decode import TPDecode
from m3cp.kernels import candidates as candidates_op
from m3cp.kernels import fused as fused_op
from m3cp.kernels import merge as merge_op
from m3cp.kernels import score as score_op
from m3cp.kernels import tile
from m3cp.kernels.words import POLLED
from m3cp.pagetable import PAGE_SIZES
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard
from m3cp.testing import select_virtual

pytestmark = pytest.mark.usefixtures("short_waits")


def test_the_interpreter_is_on():
    assert tile.INTERPRETED and not isinstance(score_op.score_kernel, triton.runtime.JITFunction)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cp_chooses_as_the_oracle(case):
    check(case, path="cp", world=SPREAD[case.name])


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_tp_chooses_as_the_oracle(case):
    check(case, path="tp", world=min(SPREAD[case.name], case.shape.heads))


@pytest.mark.parametrize(
    "path, world", [("tp", 1), ("tp", 2), ("tp", 8), ("cp", 1), ("cp", 2), ("cp", 4), ("cp", 8), ("cp", 16)]
)
def test_every_world(path, world):
    check(next(c for c in CASES if c.name == "topk 7"), path=path, world=world, queries="replicated")


FUSED = ("m3", "e4m3fn", "e4m3fn with NaN", "e4m3fnuz", "every e4m3fn code", "every e4m3fnuz code", "one head", "eight heads fill the tile twice", "short lengths of draft tokens", "init and local both overflow", "topk 7", "ties",
    "NaN and infinities among the keys", "more bad pages than good", "longer than the bound", "forced covers all", "topk 64", "fp16", "a late winner", "infinities against forced blocks")  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.name in FUSED], ids=str)
def test_two_launches_choose_as_the_oracle(case):
    check(case, path="cp", world=SPREAD[case.name], form="two_launch")


@pytest.mark.real_sort
@pytest.mark.parametrize("topk, blocks, world", [(1, 3, 2), (5, 12, 4), (64, 70, 2)])
def test_with_tritons_own_sort(topk, blocks, world):
    shape = IndexerShape(heads=1, head_dim=64, block_size=64, topk=topk)
    problem = build(shape, [64 * blocks - 3], kind="ties", seed=topk)
    tp = TPDecode(shape, Shard(0, 1, 1), **problem.bounds())(*problem.tensors)
    assert_ids(tp, oracle(problem), "tp")
    assert_ids(select_virtual(*problem.tensors, shape=shape, world=world), oracle(problem), "cp")


@pytest.mark.parametrize("case", [c for c in CASES if len(c.lengths) < 6 and c.shape.topk < 33], ids=str)
def test_scores_are_written_where_they_decide_and_nowhere_else(case):
    check_written(case.problem, SPREAD[case.name])


@pytest.mark.parametrize("kind", ["free", "ulp"])
@pytest.mark.parametrize("heads, query_len", [(4, 1), (8, 3), (1, 2)])
def test_scores_have_the_same_bits_whatever_ranks_and_grid(kind, heads, query_len):
    shape = IndexerShape(heads=heads, topk=2, local_blocks=0)
    check_same_bits(
        build(shape, [128 * 5, 128 * 3 + 77], query_len, kind=kind, seed=7),
        worlds=(8, 2) if heads > 1 else (8, 1),
        grids=(1, 5),
    )


def test_a_bound_eight_times_larger_changes_no_score():
    check_grid_bound(build(IndexerShape(topk=2), [128 * 7 - 3, 128 * 4, 0], kind="free", max_context=128 * 64))


def test_gathered_queries_are_read_in_place_like_replicated_ones():
    problem = build(IndexerShape(topk=2), [128 * 5, 128 * 4], 3, seed=5)
    for world in (1, 2, 4, 8, 16):
        ranks = [Shard(r, world, 4) for r in range(world)]
        gathered = torch.stack([problem.heads(s.owned_heads) for s in ranks])
        assert torch.equal(kernel_scores(problem, Shard(0, 2, 4), q=gathered), kernel_scores(problem, Shard(0, 2, 4)))


def test_queries_may_be_a_slice_of_a_projection():
    problem = build(IndexerShape(topk=2), [128 * 5], 2)
    wide = torch.full((2, 12, 160), float("nan")).bfloat16()
    wide[:, 3:7, 16:144] = problem.q
    assert torch.equal(
        kernel_scores(problem, Shard(0, 1, 4), q=wide[:, 3:7, 16:144]), kernel_scores(problem, Shard(0, 1, 4))
    )


def test_keys_have_the_same_bits_in_both_forms():
    problem = build(
        IndexerShape(heads=2, topk=5, init_blocks=1, local_blocks=2),
        [128 * 14 + 3, 128 * 4, 0, 128 * 9],
        2,
        kind="special",
    )
    for world in (1, 2, 4):
        for rank in range(world):
            shard = Shard(rank, world, world)
            bounds = dict(shape=problem.shape, shard=shard, query_len=2, max_context=problem.max_context)
            scores = reference.score(*problem.tensors, **bounds)
            expect = reference.candidates(scores, problem.seq_lens, **bounds)
            got = torch.full_like(expect, -5)
            candidates_op.candidates(scores.contiguous(), problem.seq_lens, tokens=problem.tokens, out=got, **bounds)
            # Order within a row (best first) and every bit, but for the codes of rows that choose all they see.
            few = torch.tensor([0 < n <= 128 * 5 for n in rows(problem)])
            assert torch.equal(keys.block_of(got).sort(2).values, keys.block_of(expect).sort(2).values)
            assert torch.equal(got[:, ~few], expect[:, ~few])


def test_merge_reads_strided_ranks():
    g = torch.Generator().manual_seed(3)
    shape = IndexerShape(heads=4, topk=6)
    code = torch.randint(0, 2**32, (5, 4, 3, 6), generator=g)
    block = torch.arange(5 * 6).view(5, 1, 1, 6).expand(5, 4, 3, 6)
    made = keys.encode(code, block, torch.tensor(10**6), 0, 0)
    made[:, 1, 2] = keys.EMPTY
    made[0, 3, 0, 2] = keys.EMPTY
    wide = torch.full((5, 2, 4, 3, 6), 2**62)
    wide[:, 0] = made
    for owned in (range(4), range(1, 3), range(3, 4)):
        out = torch.full((len(owned), 3, 6), -5, dtype=torch.int32)
        merge_op.merge(wide[:, 0], shape=shape, owned=owned, out=out)
        assert torch.equal(out, reference.merge(made, shape=shape, owned=owned))


PAGED = ("m3", "only the last draft rows are too long", "bad pages", "blocks of 64", "longer than the bound", "topk 1")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in PAGED], ids=str)
def test_page_tables(case):
    page_size = 16 if case.name != "m3" else 128
    stride = case.shape.block_size // page_size * (1 + len(case.name) % 2)
    assert_pages(case.problem, case.expect, page_size=page_size, stride=stride, world=2)


@pytest.mark.parametrize(
    ("world", "page_size", "factor", "topk", "query_len", "lengths"),
    [(1, 64, 2, 3, 1, [64 * 9 + 5, 0, 64 * 2 + 1]), (2, 16, 1, 3, 2, [64 * 9 + 5, 0, 1]), (4, 32, 3, 2, 1, [64 * 5, 7, 64 * 8 - 1]),
     (8, 16, 2, 3, 1, [64 * 9 + 17, 0]), (16, 64, 1, 3, 1, [64 * 18 + 3, 64]),
     (2, 32, 1, 64, 1, [64 * 63 + 1, 0])],
)  # fmt: skip
def test_page_tables_of_the_fused_forms(world, page_size, factor, topk, query_len, lengths):
    """Short rows, padding rows, blocks whose entry names no page: pages and counts on every rank."""
    shape = IndexerShape(heads=2, head_dim=64, block_size=64, topk=topk)
    problem = build(shape, lengths, query_len, bad_pages=2, seed=world)
    for form, paths in (("one_launch", ["tp"]), ("two_launch", ["tp", "cp"])):
        assert_pages(problem, oracle(problem), page_size=page_size, stride=factor * 64 // page_size, world=world, form=form, paths=paths)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form, world", [("one_launch", 1), ("two_launch", 2)])
def test_every_page_size_of_the_fused_forms(form, world, page_size):
    """Rows that end inside a page, at a page's end, at a block's end and one token behind it; K and V share a block or don't."""
    shape = IndexerShape(heads=2, head_dim=64, topk=3)
    problem = build(shape, [128 * 4 + page_size, 128 * 5 - 1, 128 * 2, 128 + 1], bad_pages=1, seed=page_size)
    stride = None if world == 1 else 2 * 128 // page_size
    assert_pages(problem, oracle(problem), page_size=page_size, stride=stride, world=world, form=form)


CELLS = [*cells.INTERPRETED, *(pytest.param(name, marks=pytest.mark.slow) for name in cells.SLOW)]


@pytest.mark.parametrize("form", cells.FORMS)
@pytest.mark.parametrize("name", CELLS)
def test_the_fused_forms_do_what_the_staged_one_does(name, form):
    cells.check(name, form, world=1 if form == "one_launch" else 2, queries="gathered")


@pytest.mark.parametrize("above", [True, False], ids=["CP's path", "TP's path"])
@pytest.mark.parametrize("form", cells.FORMS)
@pytest.mark.parametrize("name", CELLS)
def test_so_do_adaptive_calls(name, form, above):
    threshold = cells.threshold_of(cells.problem_of(name), above)
    cells.check(name, form, paths=["cp"], queries="gathered", threshold_blocks=threshold)


def test_a_row_of_more_candidates_than_are_awaited_at_once():
    """Five segments hand over 64 each; what the score chooses lies behind the first sixty blocks, the last block in the fifth."""
    shape = cells.shape_of(heads=1, topk=64, init_blocks=60)
    problem = build(shape, [64 * (4 * fused_op.SEGMENT + 3) - 1], seed=2)
    assert 5 * 64 > POLLED.value and int(oracle(problem)[0, 0, -2]) > fused_op.SEGMENT
    assert_pages(problem, oracle(problem), page_size=64, form="one_launch", paths=["tp"])


@pytest.mark.parametrize(
    "world, name, above",
    [(8, "padding rows of a bucket", None), (8, "a bound of 1M tokens", True), (8, "a bound of 1M tokens", False), (16, "a bound of 1M tokens", None)],
)
def test_heads_of_many_replicas(world, name, above):
    """CP, and adaptive calls above and below their threshold."""
    threshold = None if above is None else cells.threshold_of(cells.problem_of(name), above)
    cells.check(name, "two_launch", world=world, paths=["cp"], threshold_blocks=threshold)


@pytest.mark.parametrize("form", cells.FORMS)
@pytest.mark.parametrize("world", [8, 16])
def test_tp_of_heads_with_many_replicas(world, form):
    problem = cells.problem_of("a bound of 1M tokens")
    for rank in (0, world // 2 - 1, world // 2, world - 1):
        shard = Shard(rank, world, 2)
        ids = TPDecode(problem.shape, shard, form=form, **problem.bounds())(problem.heads(shard.owned_heads), *problem.tensors[1:])
        assert_ids(ids, cells.ids_of("a bound of 1M tokens")[rank * 2 // world :][:1], f"{form}, {shard}")


@pytest.mark.parametrize("form", ["staged", "one_launch"])
def test_an_object_keeps_nothing_of_its_last_call(form):
    check_nothing_kept(form=form)


@pytest.mark.parametrize("form", ["staged", "one_launch"])
def test_lengths_beyond_the_bound_reach_the_error_word(form):
    check_length_error(form=form)


def test_profiling_runs_of_the_one_launch_form():
    problem = build(IndexerShape(topk=4), [128 * 6, 40])
    tp = TPDecode(problem.shape, Shard(0, 1, 4), form="one_launch", **problem.bounds())
    ids = tp(problem.q, None, *problem.tensors[2:])
    assert tp.path == "profiling" and bool((ids == -1).all())
    assert_ids(tp(*problem.tensors), oracle(problem))
    assert tp.path == "tp"


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr):
    o = tl.arange(0, 16)
    at = o[:, None] * 16 + o[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_the_interpreters_bf16_dot_is_still_wrong():
    """When this fails, `UPCAST` in `kernels/tile.py` is no longer needed."""
    a, b = torch.eye(16, dtype=torch.bfloat16), torch.full((16, 16), 0.5, dtype=torch.bfloat16)
    out = torch.zeros(16, 16)
    _dot_kernel[(1,)](a, b, out)
    assert not torch.equal(out, (a.float() @ b.float())), "Triton's interpreter computes bf16 dots: remove UPCAST"


@triton.jit
def _keys_kernel(score_ptr, block_ptr, code_ptr, key_ptr, back_ptr, visible, init, local, N: tl.constexpr):
    o = tl.arange(0, N)
    code = keys.order_code_jit(tl.load(score_ptr + o))
    key = keys.encode_jit(code.to(tl.int64), tl.load(block_ptr + o), visible, init, local)
    tl.store(code_ptr + o, code.to(tl.int64))
    tl.store(key_ptr + o, key)
    tl.store(back_ptr + o, keys.block_of_jit(key))


@pytest.mark.parametrize("visible, init, local", [(100, 0, 0), (100, 3, 5), (2**24, 1, 2), (2**25, 40, 40), (1, 1, 1)])
def test_keys_jit_and_torch_give_the_same_bits(visible, init, local):
    g = torch.Generator().manual_seed(visible)
    inf = float("inf")
    special = torch.tensor([0.0, -0.0, inf, -inf, 1e-45, -1e-45, 3.4028234663852886e38, -3.4028234663852886e38])
    score = torch.cat([special, torch.randn(120, generator=g) * 10.0 ** torch.randint(-30, 30, (120,), generator=g)])
    block = torch.randint(0, min(2**31 - 1, visible + visible // 4 + 1), (128,), generator=g).int()
    block[:4] = torch.tensor([0, visible - 1, visible, min(visible + 1, 2**25)]).int()
    code, key, back = (torch.zeros(128, dtype=d) for d in (torch.int64, torch.int64, torch.int32))
    _keys_kernel[(1,)](score, block, code, key, back, visible, init, local, N=128)
    assert torch.equal(code, keys.order_code(score))
    expect = keys.encode(keys.order_code(score), block.long(), torch.tensor(visible), init, local)
    assert torch.equal(key, expect) and torch.equal(back.long(), keys.block_of(expect))


@pytest.mark.parametrize("form, query_len", [("staged", 1), ("two_launch", 1), ("two_launch", 4)])
def test_fp8_scores_of_queries_that_are_no_fp16_numbers(form, query_len):
    """Such rows are scored in bf16, their neighbours in the same dot in fp16; with 16 (row, head) pairs two dots a tile."""
    problem = far_apart(build(IndexerShape(topk=2), [128 * 5 + 3, 40], query_len, dtype=torch.float8_e4m3fn))
    for path in ("tp", "cp"):
        ids = select_virtual(*problem.tensors, shape=problem.shape, world=2, query_len=query_len, path=path, form=form)
        assert_ids(ids, oracle(problem), f"{form}, {path}")


@pytest.mark.parametrize("which", [slice(0, 8), slice(8, 16), slice(12, 13)], ids=["first dot", "second dot", "one row"])
def test_fp8_rows_that_are_no_fp16_numbers_in_one_of_two_dots(which):
    """16 (row, head) pairs are two dots: whether any row needs bf16, and which, is each dot's own."""
    problem = far_apart(build(IndexerShape(topk=2), [128 * 5 + 3], 4, dtype=torch.float8_e4m3fn), which)
    for path, world, form in (("tp", 1, "one_launch"), ("cp", 2, "two_launch")):
        ids = select_virtual(*problem.tensors, shape=problem.shape, world=world, query_len=4, path=path, form=form)
        assert_ids(ids, oracle(problem), f"{form}, {path}")


def test_one_segment_of_many_lanes(monkeypatch):
    """On GPUs a segment has 256 blocks; here it has 64, all of which are chosen by counting, so that none of these rows would be sorted."""
    monkeypatch.setattr(fused_op, "SEGMENT", 256)
    monkeypatch.setattr(fused_op, "_SEGMENT", tl.constexpr(256))
    shape = IndexerShape(heads=1, head_dim=64, block_size=64, topk=16)
    for blocks in (65, 256, 257):
        problem = build(shape, [64 * blocks - 3])
        problem = dataclasses.replace(problem, cache=problem.cache[torch.arange(problem.cache.shape[0]) % 9])  # many ties
        ids = select_virtual(*problem.tensors, shape=shape, world=1, query_len=1, path="tp", form="one_launch")
        assert_ids(ids, oracle(problem), f"{blocks} blocks")


@triton.jit
def _decode_kernel(code_ptr, out_ptr, FORMAT: tl.constexpr):
    o = tl.arange(0, 256)
    tl.store(out_ptr + o, tile.decode_e4m3(tl.load(code_ptr + o), FORMAT).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_every_fp8_code_is_decoded_exactly(dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(256)
    _decode_kernel[(1,)](codes, out, FORMAT=tile.cache_format(dtype))
    expect = codes.view(dtype).float()
    assert torch.equal(out.isnan(), expect.isnan())
    assert torch.equal(out.nan_to_num(7.0).view(torch.int32), expect.nan_to_num(7.0).view(torch.int32))  # -0.0 too

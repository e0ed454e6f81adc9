"""fp8 and fp16 caches: bytes read in the format that was stated, scales after ranking, and what fp8 changes."""

import pytest
import torch
from problems import assert_ids, build, oracle

from m3cp import reference
from m3cp.decode import CPLocal, TPDecode
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard
from m3cp.testing import select_virtual, selection_overlap

FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
SHAPE = IndexerShape(topk=4)


def test_one_byte_means_different_numbers():
    """N03: the codes that tell the two formats apart."""
    codes = torch.tensor([0x38, 0x40, 0x7F, 0x80, 0xFF], dtype=torch.uint8)
    nan = float("nan")
    for dtype, values in zip(FP8, ([1.0, 2.0, nan, -0.0, nan], [0.5, 1.0, 240.0, nan, -240.0]), strict=True):
        cache = torch.zeros(2, 128, 128, dtype=torch.uint8)
        cache[0, :, 0] = codes.repeat(26)[:128]
        keys = reference._pages(cache.view(dtype), torch.tensor([0]))[0, :5, 0]
        expect = torch.tensor(values)
        assert torch.equal(keys.isnan(), expect.isnan()) and torch.equal(keys.nan_to_num(9.0), expect.nan_to_num(9.0))
        assert torch.equal(torch.signbit(keys[3:4]), torch.signbit(expect[3:4])) or keys[3].isnan()


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_bytes_are_read_in_the_stated_format(dtype):
    problem = build(SHAPE, [128 * 9, 128 * 6], 2, dtype=dtype, seed=4)
    q, cache, *rest = problem.tensors
    for path in (TPDecode, CPLocal):
        made = path(SHAPE, Shard(0, 1, 4), **problem.bounds())
        assert_ids(made(q, cache.view(torch.uint8), *rest, query_len=2), oracle(problem))
    other = FP8[1 - FP8.index(dtype)]
    with pytest.raises(ValueError, match=f"cache.dtype={other}: must be {dtype}, as given at construction"):
        made(q, cache.view(other), *rest, query_len=2)


def test_bytes_without_a_format_are_refused():
    problem = build(SHAPE, [300], dtype=torch.float8_e4m3fn)
    q, cache, *rest = problem.tensors
    with pytest.raises(ValueError, match="cache_dtype=torch.uint8: must be one of .*e4m3fn"):
        TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds(cache_dtype=torch.uint8))
    with pytest.raises(ValueError, match="cache.dtype=torch.uint8: must be a floating-point type"):
        reference.select_blocks(q, cache.view(torch.uint8), *rest, shape=SHAPE)
    made = TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds(cache_dtype=torch.bfloat16))
    for wrong in (cache, cache.view(torch.uint8)):
        with pytest.raises(ValueError, match="cache.dtype"):
            made(q, wrong, *rest)


@pytest.mark.parametrize(
    "dtype, queries",
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16), (FP8[0], torch.float16), (FP8[0], FP8[0])],
)
def test_queries_of_another_type_are_refused(dtype, queries):
    problem = build(SHAPE, [300], dtype=dtype)
    made = TPDecode(SHAPE, Shard(0, 1, 4), **problem.bounds())
    with pytest.raises(ValueError, match=f"q.dtype={queries}: must be"):
        made(problem.q.to(queries), *problem.tensors[1:])


def test_scales_touch_returned_scores_only():
    problem = build(SHAPE, [128 * 9], kind="free", dtype=FP8[0], seed=2)
    bounds = dict(shape=SHAPE, shard=Shard(0, 1, 4), query_len=1, max_context=problem.max_context)
    scores = reference.score(*problem.tensors, **bounds)
    seen = scores > float("-inf")
    whole, half = (reference.scaled(scores, SHAPE, k_scale=s) for s in (1.0, 0.5))
    assert torch.equal(whole[seen], scores[seen] * 128**-0.5) and torch.equal(half[seen], whole[seen] * 0.5)
    assert torch.equal(half == float("-inf"), ~seen)
    for bad in (0, -1.0, float("nan"), float("inf"), "0.5", torch.ones(2)):
        with pytest.raises(ValueError, match="k_scale"):
            reference.scaled(scores, SHAPE, k_scale=bad)


def test_scaling_before_ranking_would_change_choices():
    """Why scores are ranked unscaled: in fp32 a scale rounds distinct scores onto each other."""
    scores = torch.tensor([1.0, 1.0 + 2**-23]) * 1.5
    assert scores[0] != scores[1]
    scores = torch.linspace(1, 2, 4097)
    assert len(scores.unique()) > len((scores * 128**-0.5 * 0.3).to(torch.bfloat16).unique())


@pytest.mark.parametrize("dtype", [*FP8, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_any_data_is_chosen_alike_by_tp_and_cp(dtype, world):
    problem = build(IndexerShape(topk=3), [128 * 21, 128 * 10 + 77], 2, kind="free", dtype=dtype, seed=world)
    expect = select_virtual(*problem.tensors, shape=problem.shape, world=1, query_len=2, path="tp")
    assert_ids(select_virtual(*problem.tensors, shape=problem.shape, world=world, query_len=2, path="cp"), expect)
    dequantised = problem.cache.float().to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    assert_ids(
        reference.select_blocks(problem.q, dequantised, *problem.tensors[2:], shape=problem.shape, query_len=2), expect
    )


def test_overlap_counts_what_fp8_changes():
    a = torch.tensor([[[0, 3, 5, 9], [1, 2, -1, -1]]], dtype=torch.int32)
    b = torch.tensor([[[0, 3, 6, 9], [1, 2, -1, -1]]], dtype=torch.int32)
    assert selection_overlap(a, a) == 1.0
    assert selection_overlap(a, b) == 5 / 6
    assert selection_overlap(torch.full_like(a, -1), torch.full_like(a, -1)) == 1.0
    with pytest.raises(ValueError, match=r"ids of shapes \(1, 2, 4\) and \(1, 1, 4\)"):
        selection_overlap(a, b[:, :1])
    shape = IndexerShape(local_blocks=0)
    wide = build(shape, [128 * 64], kind="free", seed=5)
    narrow = wide.cache.to(FP8[0])
    kept = selection_overlap(
        *(reference.select_blocks(wide.q, cache, *wide.tensors[2:], shape=shape) for cache in (wide.cache, narrow))
    )
    assert 0.6 < kept < 1.0

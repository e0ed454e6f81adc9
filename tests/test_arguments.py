"""Bad input gets an error that names it, before anything is launched."""

import pytest
import torch
from problems import assert_ids, build, oracle

from m3cp import decode
from m3cp.decode import CPDecode, CPLocal, TPDecode
from m3cp.exchange import CollectiveExchange, SymmetricExchange
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

SHAPE = IndexerShape(topk=4)
PROBLEM = build(SHAPE, [128 * 6, 300], 2)


def tp(**changes):
    args = dict(shape=SHAPE, shard=Shard(0, 1, 4)) | PROBLEM.bounds() | changes
    return TPDecode(args.pop("shape"), args.pop("shard"), **args)


def cp(**changes):
    args = dict(shape=SHAPE, shard=Shard(0, 1, 4), exchange=CollectiveExchange()) | PROBLEM.bounds() | changes
    return CPDecode(args.pop("shape"), args.pop("shard"), **args)


def local(**changes):
    args = dict(shape=SHAPE, shard=Shard(0, 1, 4)) | PROBLEM.bounds() | changes
    return CPLocal(args.pop("shape"), args.pop("shard"), **args)


@pytest.mark.parametrize("make", [tp, cp, local])
@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(shape="m3"), "shape='m3': must be an IndexerShape"),
        (dict(shard=Shard(0, 1, 8)), "shard=.*heads=8.*: must be a Shard of shape.heads=4"),
        (dict(max_requests=0), "max_requests=0: must be 1 to 65536"),
        (dict(shard=(0, 1, 4)), "shard=.*must be a Shard"),
        (dict(max_requests=2.5), "max_requests=2.5"),
        (dict(max_query_len=9), "max_query_len=9: must be 1 to 8"),
        (dict(max_query_len=True), "max_query_len=True"),
        (dict(max_context=0), "max_context=0"),
        (dict(max_context=2**31), "max_context=2147483648: must be 1 to 2147483647"),
        (dict(max_context="128k"), "max_context='128k'"),
        (dict(cache_dtype=torch.float32), "cache_dtype=torch.float32: must be"),
        (dict(cache_dtype=torch.uint8), "cache_dtype=torch.uint8: must be"),
        (dict(form="fused"), "form='fused': must be"),
    ],
)
def test_construction_names_what_is_wrong(make, changes, named):
    with pytest.raises((ValueError, TypeError), match=named):
        make(**changes)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(queries="shared"), "queries='shared': must be one of gathered, replicated"),
        (dict(threshold_blocks=100), "threshold_blocks=100"),
        (dict(form="one_launch"), "form='one_launch'"),
        (dict(shard=Shard(1, 4, 4)), "shard.world=4: CollectiveExchange needs an initialised process group"),
        (
            dict(shard=Shard(1, 4, 4), exchange=SymmetricExchange()),
            "shard.world=4: SymmetricExchange needs an initialised process group",
        ),
    ],
)
def test_cp_names_what_is_wrong(changes, named):
    with pytest.raises((ValueError, RuntimeError), match=named):
        cp(**changes)


def test_exchange_takes_a_group_or_a_callable():
    with pytest.raises(ValueError, match="group and gather"):
        CollectiveExchange(object(), gather=lambda out, payload: None)


CALLS = [
    (
        "q",
        lambda q: q[:, :1],
        r"q of shape \(4, 1, 128\): must be \[tokens=4 \(requests 2 x query_len 2\), heads=4, head_dim=128\]",
    ),
    ("q", lambda q: q[:3], r"q of shape \(3, 4, 128\)"),
    ("q", lambda q: q.reshape(4, 512), r"q of shape \(4, 512\): must be a tensor of 3 dimensions"),
    ("q", lambda q: q.float(), "q.dtype=torch.float32"),
    ("q", lambda q: q.to(torch.float8_e4m3fn), "q.dtype=torch.float8_e4m3fn"),
    ("q", lambda q: q.to("meta"), "q on meta: this object was built for cpu"),
    ("q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "q with strides"),
    ("q", lambda q: torch.cat([q, q], 2)[:, :, 1:129], "q with strides .* 16-byte aligned"),
    ("cache", lambda c: c.float(), "cache.dtype=torch.float32: must be torch.bfloat16, as given at construction"),
    (
        "cache",
        lambda c: c.view(torch.uint8),
        r"cache of shape .*256\): must be \[pages, block_size=128, head_dim=128\]",
    ),
    ("cache", lambda c: c[:, :1], r"cache of shape .* must be \[pages, block_size=128, head_dim=128\]"),
    ("cache", lambda c: c[:, :64], r"block_size=128"),
    ("cache", lambda c: torch.cat([c, c], 1), r"cache of shape \(\d+, 256, 128\): must be \[pages, block_size=128"),
    ("cache", lambda c: c[:, :, :64], r"head_dim=128"),
    ("cache", lambda c: c.transpose(1, 2), "cache with strides .*: a page must be contiguous"),
    ("cache", lambda c: c.numpy, "cache of shape .*must be a tensor of 3 dimensions"),
    ("block_table", lambda t: t.long(), "block_table.dtype=torch.int64: must be torch.int32"),
    ("block_table", lambda t: t[:1], "block_table of 1 rows: must equal the 2 requests"),
    (
        "block_table",
        lambda t: t[:, :5],
        "block_table of width 5: 5 x block_size 128 tokens is less than max_context=768",
    ),
    ("block_table", lambda t: t[:, ::2].repeat(1, 4)[:, ::2], r"block_table.stride\(-1\)=2"),
    ("seq_lens", lambda n: n.long(), "seq_lens.dtype=torch.int64"),
    ("seq_lens", lambda n: n.tolist(), "seq_lens of shape list"),
    ("seq_lens", lambda n: n[None], r"seq_lens of shape \(1, 2\): must be a tensor of 1 dimensions"),
    ("query_len", lambda _: 3, r"query_len=3: must be 1 to 2 \(max_query_len\)"),
    ("query_len", lambda _: 0, "query_len=0"),
    ("query_len", lambda _: True, "query_len=True"),
    ("out", lambda _: torch.empty(4, 4, 4), "out of shape .*torch.float32"),
    (
        "out",
        lambda _: torch.empty(4, 4, 5, dtype=torch.int32),
        r"out of shape \(4, 4, 5\), torch.int32 on cpu: must be contiguous \(4, 4, 4\) int32",
    ),
    ("out", lambda _: torch.empty(4, 4, 8, dtype=torch.int32)[:, :, :4], "must be contiguous"),
]


@pytest.mark.parametrize("make", [tp, cp, local])
@pytest.mark.parametrize("name, change, named", CALLS, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(CALLS)])
def test_calls_name_what_is_wrong(make, name, change, named, monkeypatch):
    made = make()
    given = dict(zip(("q", "cache", "block_table", "seq_lens"), PROBLEM.tensors, strict=True)) | dict(
        query_len=2, out=None
    )
    given[name] = change(given[name])
    monkeypatch.setattr(decode.reference, "score", lambda *a, **k: pytest.fail("launched before the check"))
    with pytest.raises((ValueError, TypeError), match=named):
        made(**given)
    assert made._state.tolist() == [0, 0, 0, 0]


def test_more_requests_than_the_buffers_hold():
    many = build(SHAPE, [128] * 3, max_context=PROBLEM.max_context)
    with pytest.raises(ValueError, match="seq_lens of 3 requests: the buffers hold max_requests=2"):
        tp()(*many.tensors)


def test_a_cache_of_the_wrong_page_size_names_the_block():
    """C09: pages of 1, 64 or 256 tokens, where blocks have 128, never give a result."""
    for size in (1, 64, 256):
        with pytest.raises(ValueError, match="block_size=128"):
            tp()(PROBLEM.q, torch.zeros(9, size, 128).bfloat16(), *PROBLEM.tensors[2:], query_len=2)


@pytest.mark.parametrize("make", [tp, cp])
def test_out_is_filled_or_a_view_of_the_objects_buffer(make):
    made, expect = make(), oracle(PROBLEM)
    given = torch.full((4, 4, 4), -9, dtype=torch.int32)
    assert made(*PROBLEM.tensors, query_len=2, out=given) is given
    assert_ids(given, expect)
    first = made(*PROBLEM.tensors, query_len=2)
    assert made(*PROBLEM.tensors, query_len=2).data_ptr() == first.data_ptr()


def test_bytes_are_reported():
    made = tp()
    scores, ids = 4 * 4 * 6 * 4, 4 * 4 * 4 * 4
    assert made.nbytes == scores + ids + 4 * 8
    assert tp(max_context=768 * 64).nbytes > 8 * made.nbytes


def test_lengths_beyond_the_bound_are_found_and_said():
    problem = build(SHAPE, [128 * 6 + 1, 300], 1, max_context=128 * 6)
    for make in (tp, cp, local):
        made = make()
        ids = made(*problem.tensors)
        assert (ids[:, 0] == -1).all() and (ids[:, 1] >= 0).any()
        with pytest.raises(RuntimeError, match="a sequence length exceeds max_context, found by rank 0"):
            made.check()
    made = tp()
    made(*PROBLEM.tensors, query_len=2)
    made.check()


def test_only_the_forms_without_a_cut_are_adaptive():
    with pytest.raises(ValueError, match="threshold_blocks=100: must be None for form 'staged', which has no adaptive path"):
        cp(threshold_blocks=100)
    for wrong in (-1, 2**31, 1.5, True):
        with pytest.raises((ValueError, TypeError), match="threshold_blocks"):
            cp(threshold_blocks=wrong)
    with pytest.raises(ValueError, match="threshold_blocks=None: must be a number of blocks: this object always takes CP's path"):
        cp().counts()

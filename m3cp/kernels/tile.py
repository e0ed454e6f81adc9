"""What every scoring kernel shares: which blocks a request needs, who reads them, and the one geometry of a dot.

Bit-identity of TP and CP rests on `score_columns`: a block's keys times 16 columns, whatever the heads, rows, ranks
or form. (row, head) pairs fill the columns in groups of 16, row-major; the last group is padded with zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = tl.constexpr(16)
# The interpreter computes bf16 dots wrongly (triton #11584): there, and only there, operands are upcast first.
INTERPRETED = triton.knobs.runtime.interpret
# How a cache's elements are read: as their own type, or as bytes of one of the fp8 formats. Bytes compile everywhere:
# NVIDIA's compiler knows no fnuz, and gfx942 has no fn.
NATIVE, E4M3FN, E4M3FNUZ = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e4m3fnuz: 2}


def cache_format(dtype: torch.dtype) -> int:
    """NATIVE, E4M3FN or E4M3FNUZ."""
    return _FORMATS.get(dtype, 0)


def as_stored(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: fp8 as bytes, the rest as it is."""
    return cache.view(torch.uint8) if cache.dtype in _FORMATS else cache


@triton.jit
def row_tokens(seq_len, row, query_len, max_context):
    """Tokens that query row `row` of a request sees; 0 for padding and for a length beyond the bound."""
    n = tl.maximum(seq_len, 0) - query_len + row + 1
    return tl.where((n > 0) & (n <= max_context), n, 0)


@triton.jit
def blocks_of(tokens, BLOCK: tl.constexpr):
    """ceil(tokens / BLOCK), written so that 2**31 - 1 tokens do not overflow."""
    return tokens // BLOCK + (tokens % BLOCK != 0).to(tl.int32)


@triton.jit
def shard_count(n, rank, world):
    """How many of the logical blocks below `n` (>= 0) the shard `block % world == rank` holds."""
    return (n - rank + world - 1) // world


@triton.jit
def longest_row(seq_len, query_len, max_context):
    """Tokens that the request's longest row within the bound sees; 0 where it has none. Alike on every rank."""
    length = tl.maximum(seq_len, 0)
    return tl.where(length - max_context < query_len, tl.minimum(length, max_context), 0)


@triton.jit
def read_span(seq_len, query_len, rank, world, max_context, init, local, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """(first, last) numbers within the shard of the blocks whose keys a request needs; empty where none is.

    Requests with at most TOPK visible blocks choose them all, and forced blocks are chosen unseen.
    """
    visible = blocks_of(longest_row(seq_len, query_len, max_context), BLOCK)
    last = tl.where(visible > TOPK, visible - local, 0)
    first = tl.minimum(init, tl.maximum(last, 0))
    last = tl.maximum(last, first)
    return shard_count(first, rank, world), shard_count(last, rank, world)


@triton.jit
def load_columns(
    q_ptr, i_request, group, query_len, stride_rank, stride_token, stride_head,
    HEADS: tl.constexpr, LOCAL_HEADS: tl.constexpr, REPLICAS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Query columns of one group, [DIM, 16], zeros where the group is padding. Gathered queries are read in place.

    The host has checked that every (token, head) row is 16-byte aligned.
    """
    o_column = group * COLUMNS + tl.arange(0, COLUMNS)
    o_row = o_column // HEADS
    o_head = o_column % HEADS
    m_column = o_row < query_len
    p_column = q_ptr + (o_head // LOCAL_HEADS * REPLICAS).to(tl.int64) * stride_rank
    p_column += (i_request.to(tl.int64) * query_len + o_row) * stride_token + (o_head % LOCAL_HEADS) * stride_head
    p_q = tl.multiple_of(p_column, 16)[None, :] + tl.arange(0, DIM)[:, None]
    return tl.load(p_q, mask=m_column[None, :], other=0.0)  # [DIM, 16]


@triton.jit
def column_tokens(seq_len, group, query_len, max_context, HEADS: tl.constexpr):
    """Tokens that each of a group's 16 columns sees, [16]."""
    o_row = (group * COLUMNS + tl.arange(0, COLUMNS)) // HEADS
    return tl.where(o_row < query_len, row_tokens(seq_len, o_row, query_len, max_context), 0)


@triton.jit
def decode_e4m3(code, FORMAT: tl.constexpr):
    """Values of fp8 bytes, exactly, as bf16, by integer moves alone: nothing flushes a subnormal on the way."""
    BIAS: tl.constexpr = 119 if FORMAT == E4M3FNUZ else 120  # what bf16's exponent has more than the format's
    code = code.to(tl.int16)
    magnitude = code & 0x7F
    # Below 8 the codes are subnormals, magnitude * 2**(BIAS - 129): the leading one becomes bf16's hidden bit.
    tiny = tl.where(magnitude >= 4, magnitude << 5, tl.where(magnitude >= 2, (magnitude << 6) - 128, (magnitude << 7) - 256))
    tiny = tl.where(magnitude == 0, -(BIAS << 7), tiny - 128)
    bits = tl.where(magnitude < 8, tiny, magnitude << 4) + (BIAS << 7)
    is_nan = code == 0x80 if FORMAT == E4M3FNUZ else magnitude == 0x7F
    bits = tl.where(is_nan, 0x7FC0, bits) | ((code & 0x80) << 8)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_keys(
    cache_ptr, page, pages, stride_page, BLOCK: tl.constexpr, DIM: tl.constexpr, ALIGN: tl.constexpr, FORMAT: tl.constexpr = 0
):  # fmt: skip
    """One block's keys, [BLOCK, DIM]. A page id outside [0, pages) is never dereferenced: page 0 stands in.

    ALIGN: bytes that divide every page's address. FORMAT: how elements are read; fp8 becomes bf16, so that dots are
    the same bf16 dots.
    """
    page = tl.where((page >= 0) & (page < pages), page, 0)
    p_page = tl.multiple_of(cache_ptr + page.to(tl.int64) * stride_page, ALIGN)
    b_k = tl.load(p_page + tl.arange(0, BLOCK)[:, None] * DIM + tl.arange(0, DIM)[None, :])
    if FORMAT != NATIVE:
        b_k = decode_e4m3(b_k, FORMAT)
    return b_k


@triton.jit
def score_columns(b_k, b_q, n_column, block, valid, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """Maximum over the block's visible tokens of q . k for 16 columns, fp32 [16]; -inf where nothing counts."""
    if UPCAST:
        b_k = b_k.to(tl.float32)
        b_q = b_q.to(tl.float32)
    dots = tl.dot(b_k, b_q, input_precision="ieee")  # [BLOCK, 16]
    position = block * BLOCK + tl.arange(0, BLOCK)
    usable = (position[:, None] < n_column[None, :]) & (dots == dots) & valid
    return tl.max(tl.where(usable, dots, float("-inf")), axis=0)


@triton.jit
def my_share(counts, i_program, programs, REQUESTS: tl.constexpr):
    """One program's share of the flattened (request, block) list: shares differ by at most one block.

    counts: blocks that each request needs, [REQUESTS]. Returns (item, stop, i_request, start): the share [item, stop),
    the request that holds its first item, and the item at which that request starts.
    """
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    share = total // programs
    extra = total - share * programs
    item = i_program * share + tl.minimum(i_program, extra)
    stop = item + share + (i_program < extra).to(tl.int32)
    passed = ends <= item
    return item, stop, tl.sum(passed.to(tl.int32), 0), tl.sum(tl.where(passed, counts, 0), 0)

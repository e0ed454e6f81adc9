"""The shard's best keys of each (head, token) row; in a world of one they are the choice itself.

One program a row walks the row's blocks in chunks, keeping the best so far: any number of blocks, one compiled kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3cp.kernels import pages, tile
from m3cp.kernels.pages import store_pages
from m3cp.kernels.tile import blocks_of, row_tokens, shard_count
from m3cp.keys import block_of_jit, encode_jit, order_code_jit
from m3cp.pagetable import Emission
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

# 256 keys sort in about a microsecond on four warps; the interpreter sorts serially, so there chunks are narrow.
CHUNK, WARPS = (64, 4) if tile.INTERPRETED else (256, 4)
_NO_BLOCK = tl.constexpr(2147483647)


@triton.jit
def keep_best(b_best, b_more, KEEP: tl.constexpr):
    """The KEEP largest keys of two vectors of KEEP, descending."""
    both = tl.reshape(tl.join(b_best, b_more), [2 * KEEP])
    return tl.topk(both, KEEP)


@triton.jit
def store_choice(b_best, p_out, TOPK: tl.constexpr, KEEP: tl.constexpr):
    """Store the first TOPK of KEEP descending keys as block ids, ascending, then -1; returns them, [KEEP]."""
    o_k = tl.arange(0, KEEP)
    ids = block_of_jit(b_best)
    ids = tl.where((o_k < TOPK) & (ids >= 0), ids, _NO_BLOCK)
    ids = tl.sort(ids)
    ids = tl.where(ids == _NO_BLOCK, -1, ids)
    tl.store(p_out + o_k, ids, mask=o_k < TOPK)
    return ids


@triton.jit(
    do_not_specialize=[
        "scores_ptr", "lens_ptr", "out_ptr", "tokens", "query_len", "rank", "world", "max_context", "init", "local", "width",
        "pages_ptr", "attended_ptr", "table_ptr", "stride_table", "cache_pages", "entry_stride",
    ]
)  # fmt: skip
def candidates_kernel(
    scores_ptr, lens_ptr, out_ptr, tokens, query_len, rank, world, max_context, init, local, width,
    pages_ptr, attended_ptr, table_ptr, stride_table, cache_pages, entry_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr, CHOOSE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0)
    i_head = tl.program_id(1)
    n = row_tokens(tl.load(lens_ptr + i_token // query_len), i_token % query_len, query_len, max_context)
    visible = blocks_of(n, BLOCK)
    held = shard_count(visible, rank, world)
    p_scores = scores_ptr + (i_token.to(tl.int64) * HEADS + i_head) * width
    b_best = tl.full([KEEP], 0, tl.int64)
    for start in range(0, held, CHUNK):
        o_local = start + tl.arange(0, CHUNK)
        b_score = tl.load(p_scores + o_local, mask=o_local < held, other=float("-inf"))  # [CHUNK]
        # Forced blocks and rows that choose everything were not scored: what stands there must not matter.
        code = tl.where(visible > TOPK, order_code_jit(b_score).to(tl.int64), 0)
        key = encode_jit(code, o_local * world + rank, visible, init, local)
        key = tl.where(o_local < held, key, 0)
        b_best = keep_best(b_best, tl.topk(key, KEEP), KEEP)
    o_k = tl.arange(0, KEEP)
    i_row = i_head.to(tl.int64) * tokens + i_token
    p_row = out_ptr + i_row * TOPK
    if CHOOSE:
        ids = store_choice(b_best, p_row, TOPK, KEEP)
        if PER_BLOCK > 0:
            p_table = table_ptr + (i_token // query_len).to(tl.int64) * stride_table
            p_pages = pages_ptr + i_row * (TOPK * PER_BLOCK)
            store_pages(ids, n, p_table, p_pages, attended_ptr + i_row, cache_pages, entry_stride, TOPK, KEEP, BLOCK, PER_BLOCK)
    else:
        tl.store(p_row + o_k, b_best, mask=o_k < TOPK)


def candidates(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    tokens: int,
    shape: IndexerShape,
    shard: Shard,
    query_len: int,
    max_context: int,
    out: torch.Tensor,
    emit: Emission | None = None,
) -> torch.Tensor:
    """`reference.candidates` as one kernel. With an int32 `out` (a world of one) it stores the chosen ids instead.

    Args:
        scores: `[>= tokens, heads, local blocks]` fp32, contiguous.
        out: contiguous `[heads, tokens, topk]`, int64 for keys, int32 for ids.
        emit: a page table to write with the ids.
    """
    heads = scores.shape[1]
    if tokens:
        candidates_kernel[(tokens, heads)](
            scores, seq_lens, out, tokens, query_len, shard.rank, shard.world, max_context, shape.init_blocks, shape.local_blocks,
            scores.shape[2], HEADS=heads, BLOCK=shape.block_size, TOPK=shape.topk, KEEP=kept(shape.topk), CHUNK=CHUNK,
            CHOOSE=out.dtype == torch.int32, num_warps=WARPS, **pages.arguments(emit, shape, out),
        )  # fmt: skip
    return out


def kept(topk: int) -> int:
    """Keys that a row carries: the power of two, at least 2, that holds `topk`."""
    return max(2, triton.next_power_of_2(topk))

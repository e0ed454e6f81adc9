"""Merge the ranks' candidates: the best `topk` keys of all, for the heads this rank owns, read in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3cp.kernels import pages
from m3cp.kernels.candidates import kept, store_choice
from m3cp.kernels.fused import WAIT_ERROR
from m3cp.kernels.pages import store_pages
from m3cp.kernels.tile import row_tokens
from m3cp.pagetable import Emission
from m3cp.shapes import IndexerShape

WARPS = 4  # up to 16 ranks x 64 keys a row; four warps sort 1,024 keys without spills


@triton.jit(
    do_not_specialize=[
        "keys_ptr", "out_ptr", "tokens", "first_head", "stride_rank", "lens_ptr", "query_len", "max_context",
        "state_ptr", "pages_ptr", "attended_ptr", "table_ptr", "stride_table", "cache_pages", "entry_stride",
    ]
)  # fmt: skip
def merge_kernel(
    keys_ptr, out_ptr, state_ptr, tokens, first_head, stride_rank, lens_ptr, query_len, max_context,
    pages_ptr, attended_ptr, table_ptr, stride_table, cache_pages, entry_stride,
    WORLD: tl.constexpr, RANKS: tl.constexpr, TOPK: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0)
    i_head = tl.program_id(1)
    o = tl.arange(0, RANKS * KEEP)
    o_rank = o // KEEP
    o_k = o % KEEP
    row = ((first_head + i_head).to(tl.int64) * tokens + i_token) * TOPK
    p_key = keys_ptr + o_rank.to(tl.int64) * stride_rank + row + o_k
    there = (o_rank < WORLD) & (o_k < TOPK)
    if state_ptr is not None:  # what a gather waited for in vain is not merged
        there &= tl.load(state_ptr + 1) != WAIT_ERROR
    b_key = tl.load(p_key, mask=there, other=0)  # [RANKS * KEEP]
    i_row = i_head.to(tl.int64) * tokens + i_token
    ids = store_choice(tl.topk(b_key, KEEP), out_ptr + i_row * TOPK, TOPK, KEEP)
    if PER_BLOCK > 0:
        n = row_tokens(tl.load(lens_ptr + i_token // query_len), i_token % query_len, query_len, max_context)
        p_table = table_ptr + (i_token // query_len).to(tl.int64) * stride_table
        p_pages = pages_ptr + i_row * (TOPK * PER_BLOCK)
        store_pages(ids, n, p_table, p_pages, attended_ptr + i_row, cache_pages, entry_stride, TOPK, KEEP, BLOCK, PER_BLOCK)


def merge(
    gathered: torch.Tensor, *, shape: IndexerShape, owned: range, out: torch.Tensor, emit: Emission | None = None, state: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """`reference.merge` as one kernel.

    Args:
        gathered: `[ranks, heads, tokens, topk]` int64, contiguous but for the stride between ranks.
        out: contiguous `[owned heads, tokens, topk]` int32.
        emit: a page table to write with the ids.
        state: `[4]` int64 with the error word: after an expired wait the rows are -1.
    """
    ranks, _, tokens, _ = gathered.shape
    if tokens:
        merge_kernel[(tokens, len(owned))](
            gathered, out, state, tokens, owned.start, gathered.stride(0),
            emit.seq_lens if emit else out, emit.query_len if emit else 1, emit.max_context if emit else 0,
            WORLD=ranks, RANKS=triton.next_power_of_2(ranks), TOPK=shape.topk, KEEP=kept(shape.topk), BLOCK=shape.block_size,
            num_warps=WARPS, **pages.arguments(emit, shape, out),
        )  # fmt: skip
    return out

"""Merge the ranks' candidates: the best `topk` keys of all, for the heads this rank owns, read in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3cp.kernels.candidates import kept, store_choice
from m3cp.shapes import IndexerShape

WARPS = 4  # up to 16 ranks x 64 keys a row; four warps sort 1,024 keys without spills


@triton.jit(do_not_specialize=["keys_ptr", "out_ptr", "tokens", "first_head", "stride_rank"])
def merge_kernel(
    keys_ptr, out_ptr, tokens, first_head, stride_rank,
    WORLD: tl.constexpr, RANKS: tl.constexpr, TOPK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0)
    i_head = tl.program_id(1)
    o = tl.arange(0, RANKS * KEEP)
    o_rank = o // KEEP
    o_k = o % KEEP
    row = ((first_head + i_head).to(tl.int64) * tokens + i_token) * TOPK
    p_key = keys_ptr + o_rank.to(tl.int64) * stride_rank + row + o_k
    b_key = tl.load(p_key, mask=(o_rank < WORLD) & (o_k < TOPK), other=0)  # [RANKS * KEEP]
    store_choice(tl.topk(b_key, KEEP), out_ptr + (i_head.to(tl.int64) * tokens + i_token) * TOPK, TOPK, KEEP)


def merge(gathered: torch.Tensor, *, shape: IndexerShape, owned: range, out: torch.Tensor) -> torch.Tensor:
    """`reference.merge` as one kernel.

    Args:
        gathered: `[ranks, heads, tokens, topk]` int64, contiguous but for the stride between ranks.
        out: contiguous `[owned heads, tokens, topk]` int32.
    """
    ranks, _, tokens, _ = gathered.shape
    if tokens:
        merge_kernel[(tokens, len(owned))](
            gathered, out, tokens, owned.start, gathered.stride(0),
            WORLD=ranks, RANKS=triton.next_power_of_2(ranks), TOPK=shape.topk, KEEP=kept(shape.topk), num_warps=WARPS,
        )  # fmt: skip
    return out

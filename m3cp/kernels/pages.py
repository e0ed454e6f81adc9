"""Translate a row's chosen blocks into physical pages, in the pass that chose them (`m3cp.pagetable`)."""

from __future__ import annotations

import triton
import triton.language as tl

from m3cp.pagetable import Emission
from m3cp.shapes import IndexerShape


@triton.jit
def store_pages(
    ids, n, p_table, p_pages, p_attended, cache_pages, entry_stride,
    TOPK: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the pages and the attended tokens of one row.

    ids: [KEEP], ascending, then -1, so the row's own last block is the last one. n: tokens that the row sees.
    """
    PAGE: tl.constexpr = BLOCK // PER_BLOCK
    chosen = ids >= 0
    entry = tl.load(p_table + tl.where(chosen, ids, 0), mask=chosen, other=-1)  # [KEEP]
    named = chosen & (entry >= 0) & (entry < cache_pages)
    held = tl.where(named, tl.minimum(n - ids * BLOCK, BLOCK), 0)
    first = (tl.cumsum(named.to(tl.int32), 0) - 1) * PER_BLOCK  # only the last block is ever partial
    o_page = tl.arange(0, PER_BLOCK)
    within = o_page[None, :] * PAGE < held[:, None]
    tl.store(p_pages + first[:, None] + o_page[None, :], entry[:, None] * entry_stride + o_page[None, :], mask=within)
    o_out = tl.arange(0, KEEP * PER_BLOCK)
    written = tl.sum((held + PAGE - 1) // PAGE, 0)
    tl.store(p_pages + o_out, -1, mask=(o_out >= written) & (o_out < TOPK * PER_BLOCK))
    tl.store(p_attended, tl.sum(held, 0))


@triton.jit
def store_row_pages(
    ids_ptr, row, i_request, n, table_ptr, stride_table, pages_ptr, attended_ptr, cache_pages, entry_stride,
    TOPK: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """`store_pages` of a row whose ids this program has stored: the barrier lets every thread read what the others wrote."""
    tl.debug_barrier()
    o_k = tl.arange(0, KEEP)
    ids = tl.load(ids_ptr + row * TOPK + o_k, mask=o_k < TOPK, other=-1)
    p_table = table_ptr + i_request.to(tl.int64) * stride_table
    store_pages(ids, n, p_table, pages_ptr + row * (TOPK * PER_BLOCK), attended_ptr + row, cache_pages, entry_stride, TOPK, KEEP, BLOCK, PER_BLOCK)


def arguments(emit: Emission | None, shape: IndexerShape, unused) -> dict:
    """Arguments of a choosing kernel: (pages_ptr, attended_ptr, table_ptr, stride_table, cache_pages, entry_stride, PER_BLOCK).

    Without an emission PER_BLOCK is 0 and the tensor `unused` stands in for the pointers.
    """
    if emit is None:
        return dict(pages_ptr=unused, attended_ptr=unused, table_ptr=unused, stride_table=0, cache_pages=0, entry_stride=0, PER_BLOCK=0)
    return dict(
        pages_ptr=emit.table.pages, attended_ptr=emit.table.attended, table_ptr=emit.block_table, stride_table=emit.block_table.stride(0),
        cache_pages=emit.cache_pages, entry_stride=emit.stride(shape), PER_BLOCK=emit.table.per_block(shape),
    )  # fmt: skip

"""Score prefill rows: as `score`, for requests that bring many query rows each, every row with its own length.

A tile is up to `PAIRS` (row, head) pairs of one request; each key tile is loaded once for all of them, and dots have
the geometry of decode, so a token's scores have the same bits whether it is prefilled, in chunks of any size, or decoded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3cp.kernels import tile
from m3cp.kernels.candidates import CHUNK, candidates_kernel, kept
from m3cp.kernels.candidates import WARPS as CHOICE_WARPS
from m3cp.kernels.pages import arguments
from m3cp.kernels.score import LENGTH_ERROR, page_alignment, request_bucket
from m3cp.kernels.tile import (
    NATIVE,
    blocks_of,
    column_tokens,
    load_columns,
    load_keys,
    longest_row,
    operands,
    score_columns,
)
from m3cp.shapes import IndexerShape

# Pairs that share a key tile: 64 are eight dots (four on CDNA) on a loaded tile, with queries from cache; four warps as in `score`.
PAIRS, WARPS, STAGES = 64, 4, 2


@triton.jit(
    do_not_specialize=[
        "q_ptr", "cache_ptr", "table_ptr", "lens_ptr", "starts_ptr", "scores_ptr", "rows_ptr", "state_ptr", "requests", "first_row", "last_row",
        "pages", "rank", "max_context", "init", "local", "stride_token", "stride_head", "stride_page", "stride_table", "width",
    ]
)  # fmt: skip
def prefill_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, scores_ptr, rows_ptr, state_ptr,
    requests, first_row, last_row, pages, rank, max_context, init, local, stride_token, stride_head, stride_page, stride_table, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, REQUESTS: tl.constexpr, ALIGN: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    o_request = tl.arange(0, REQUESTS)
    m_request = o_request < requests
    starts = tl.load(starts_ptr + o_request, mask=m_request, other=0)  # [REQUESTS]
    ends = tl.load(starts_ptr + o_request + 1, mask=m_request, other=0)
    # Rows of each request that lie in the window, and the tiles they need.
    begin = tl.minimum(tl.maximum(starts, first_row), last_row)
    count = tl.maximum(tl.minimum(ends, last_row) - begin, 0)
    tiles = (count + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    passed = tile_ends <= i_tile
    i_request = tl.sum(passed.to(tl.int32), 0)
    if i_tile == 0 and i_split == 0:
        too_long = tl.max(tl.where(ends > starts, tl.load(lens_ptr + o_request, mask=m_request, other=0), 0), 0) > max_context
        report = too_long & (tl.load(state_ptr) == 0)
        tl.store(state_ptr, LENGTH_ERROR, mask=report)
        tl.store(state_ptr + 1, rank.to(tl.int64), mask=report)
    if i_request < requests:
        start = tl.load(starts_ptr + i_request)
        end = tl.load(starts_ptr + i_request + 1)
        row = tl.maximum(start, first_row) + (i_tile - tl.sum(tl.where(passed, tiles, 0), 0)) * ROWS
        rows = tl.minimum(tl.minimum(end, last_row) - row, ROWS)
        # The tile is `rows` query rows of a request that is as long as its last row sees.
        seq_len = tl.load(lens_ptr + i_request) - (end - row - rows)
        if i_split == 0:
            o_row = tl.arange(0, ROWS)
            n = seq_len - rows + o_row + 1
            tl.store(rows_ptr + (row - first_row) + o_row, tl.where((n > 0) & (n <= max_context), n, 0), mask=o_row < rows)
        visible = blocks_of(longest_row(seq_len, rows, max_context), BLOCK)
        last = tl.where(visible > TOPK, visible - local, 0)
        p_q = q_ptr + row.to(tl.int64) * stride_token
        p_table = table_ptr + i_request.to(tl.int64) * stride_table
        p_scores = scores_ptr + (row - first_row).to(tl.int64) * HEADS * width
        for block in tl.range(init + i_split, last, tl.num_programs(1), num_stages=STAGES):
            page = tl.load(p_table + block)
            b_k = load_keys(cache_ptr, page, pages, stride_page, BLOCK, DIM, ALIGN, FORMAT)  # [BLOCK, DIM]
            valid = (page >= 0) & (page < pages)
            lossy = 0
            for group in tl.static_range(GROUPS):
                b_q = load_columns(p_q, i_request * 0, group, rows, 0, stride_token, stride_head, HEADS, HEADS, 1, DIM, COLUMNS)
                n_column = column_tokens(seq_len, group, rows, max_context, HEADS, COLUMNS)
                columns = operands(b_q, FORMAT)
                best = score_columns(b_k, columns, n_column, block, valid, BLOCK, FORMAT, UPCAST)  # [COLUMNS]
                o_column = group * COLUMNS + tl.arange(0, COLUMNS)
                kept = o_column < rows * HEADS
                if FORMAT != NATIVE:
                    kept &= columns[2] == 0
                    lossy = tl.maximum(lossy, columns[3])
                tl.store(p_scores + o_column.to(tl.int64) * width + block, best, mask=kept)
            if FORMAT != NATIVE:
                if lossy > 0:  # as in `score`
                    b_exact = b_k.to(tl.bfloat16)
                    for group in tl.static_range(GROUPS):
                        b_q = load_columns(p_q, i_request * 0, group, rows, 0, stride_token, stride_head, HEADS, HEADS, 1, DIM, COLUMNS)
                        n_column = column_tokens(seq_len, group, rows, max_context, HEADS, COLUMNS)
                        best = score_columns(b_exact, operands(b_q, NATIVE), n_column, block, valid, BLOCK, NATIVE, UPCAST)
                        o_column = group * COLUMNS + tl.arange(0, COLUMNS)
                        kept = (o_column < rows * HEADS) & (operands(b_q, FORMAT)[2] > 0)
                        tl.store(p_scores + o_column.to(tl.int64) * width + block, best, mask=kept)


def prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    *,
    shape: IndexerShape,
    rank: int,
    max_context: int,
    first_row: int,
    last_row: int,
    scores: torch.Tensor,
    row_tokens: torch.Tensor,
    state: torch.Tensor,
    splits: int,
    out: torch.Tensor,
) -> None:
    """Choose for the prefill rows `[first_row, last_row)`: two launches and a memset.

    Args:
        q: `[rows, heads, D]`, the heads owned here; any strides but the last.
        starts: `[requests + 1]` int32: where each request's rows begin, ascending from 0.
        scores: `[>= last_row - first_row, heads, blocks of max_context]` fp32, contiguous: scratch.
        row_tokens: `[>= last_row - first_row]` int32: scratch.
        state: `[2]` int64: the error word (kind, rank).
        splits: programs that share a tile's blocks.
        out: `[heads, >= rows, topk]` int32, contiguous rows of topk: the rows' slice of a buffer that may be longer.
    """
    heads, count = q.shape[1], last_row - first_row
    row_tokens[:count].zero_()  # rows that no request claims choose nothing
    fixed = constants(shape, heads, seq_lens.numel(), cache)
    tiles = -(-count // fixed["ROWS"]) + seq_lens.numel()  # each request's last tile may be partial
    prefill_kernel[(tiles, splits)](
        q, tile.as_stored(cache), block_table, seq_lens, starts, scores, row_tokens, state,
        seq_lens.numel(), first_row, last_row, cache.shape[0], rank, max_context, shape.init_blocks, shape.local_blocks,
        q.stride(0), q.stride(1), cache.stride(0), block_table.stride(0), scores.shape[2],
        **fixed, FORMAT=tile.cache_format(cache.dtype), STAGES=STAGES, UPCAST=tile.INTERPRETED, num_warps=WARPS,
    )  # fmt: skip
    # A prefill row is a request of one query row to the kernel that chooses; `out.stride(0)` steps over decode rows.
    candidates_kernel[(count, heads)](
        scores, row_tokens, out[:, first_row:], out.stride(0) // shape.topk, 1, 0, 1, max_context, shape.init_blocks, shape.local_blocks,
        scores.shape[2], HEADS=heads, BLOCK=shape.block_size, TOPK=shape.topk, KEEP=kept(shape.topk), CHUNK=CHUNK, CHOOSE=True,
        num_warps=CHOICE_WARPS, **arguments(None, shape, out),
    )  # fmt: skip


def constants(shape: IndexerShape, heads: int, requests: int, cache: torch.Tensor, columns: int = tile.COLUMNS) -> dict:
    """Compile-time constants: none depends on a length."""
    rows = 1 << (max(1, PAIRS // heads).bit_length() - 1)
    return dict(
        HEADS=heads, DIM=shape.head_dim, BLOCK=shape.block_size, TOPK=shape.topk, ROWS=rows, GROUPS=-(-rows * heads // columns), COLUMNS=columns,
        REQUESTS=request_bucket(requests), ALIGN=page_alignment(cache),
    )  # fmt: skip

"""Score a shard: the unscaled maximum of q . k over each of its blocks, for all heads and query rows at once.

A persistent grid takes equal contiguous shares of the flattened (request, block) list, formed on the device from the
lengths: balanced for any mix, independent of the bound, and every key tile is loaded once for all heads and rows.
TP is the shard of a world of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3cp.kernels import tile
from m3cp.kernels.tile import (
    NATIVE,
    column_tokens,
    load_columns,
    load_keys,
    my_share,
    operands,
    read_span,
    score_columns,
)
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

LENGTH_ERROR = tl.constexpr(1)


@triton.jit
def begin_launch(state_ptr, too_long, rank):
    """Count the launch; write the error word (kind, rank, launch) for a length beyond the bound. One program calls it."""
    launch = tl.load(state_ptr) + 1
    tl.store(state_ptr, launch)
    report = too_long & (tl.load(state_ptr + 1) == 0)
    tl.store(state_ptr + 1, LENGTH_ERROR, mask=report)
    tl.store(state_ptr + 2, rank.to(tl.int64), mask=report)
    tl.store(state_ptr + 3, launch, mask=report)


@triton.jit(
    do_not_specialize=[
        "q_ptr", "cache_ptr", "table_ptr", "lens_ptr", "scores_ptr", "state_ptr", "requests", "query_len", "pages", "rank", "world",
        "max_context", "init", "local", "stride_rank", "stride_token", "stride_head", "stride_page", "stride_table", "width",
    ]
)  # fmt: skip
def score_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, scores_ptr, state_ptr,
    requests, query_len, pages, rank, world, max_context, init, local,
    stride_rank, stride_token, stride_head, stride_page, stride_table, width,
    HEADS: tl.constexpr, LOCAL_HEADS: tl.constexpr, REPLICAS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, REQUESTS: tl.constexpr, ALIGN: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_request = tl.arange(0, REQUESTS)
    lens = tl.load(lens_ptr + o_request, mask=o_request < requests, other=0)  # [REQUESTS]
    first, last = read_span(lens, query_len, rank, world, max_context, init, local, TOPK, BLOCK)
    item, stop, i_request, start = my_share(last - first, i_program, tl.num_programs(0), REQUESTS)
    if i_program == 0:
        begin_launch(state_ptr, tl.max(lens, 0) > max_context, rank)
    while item < stop:
        seq_len = tl.load(lens_ptr + i_request)
        first_here, last_here = read_span(seq_len, query_len, rank, world, max_context, init, local, TOPK, BLOCK)
        end = start + last_here - first_here
        upto = tl.minimum(stop, end)
        p_table = table_ptr + i_request.to(tl.int64) * stride_table
        p_scores = scores_ptr + i_request.to(tl.int64) * query_len * HEADS * width
        # The columns of two groups are kept; of more, the loop loads them again.
        first_columns = operands(
            load_columns(q_ptr, i_request, 0, query_len, stride_rank, stride_token, stride_head, HEADS, LOCAL_HEADS, REPLICAS, DIM, COLUMNS), FORMAT
        )  # fmt: skip
        lossy = first_columns[3]
        for group in tl.static_range(1, GROUPS if FORMAT != 0 else min(GROUPS, 2)):
            second_columns = operands(
                load_columns(q_ptr, i_request, group, query_len, stride_rank, stride_token, stride_head, HEADS, LOCAL_HEADS, REPLICAS, DIM, COLUMNS),
                FORMAT,
            )  # fmt: skip
            lossy = tl.maximum(lossy, second_columns[3])
        for i in tl.range(item, upto, num_stages=STAGES):
            i_local = first_here + i - start
            block = i_local * world + rank
            page = tl.load(p_table + block)
            b_k = load_keys(cache_ptr, page, pages, stride_page, BLOCK, DIM, ALIGN, FORMAT)  # [BLOCK, DIM]
            for group in tl.static_range(GROUPS):
                if group == 0:
                    columns = first_columns
                elif GROUPS == 2:
                    columns = second_columns
                else:
                    columns = operands(
                        load_columns(
                            q_ptr, i_request, group, query_len, stride_rank, stride_token, stride_head, HEADS, LOCAL_HEADS, REPLICAS, DIM, COLUMNS
                        ), FORMAT
                    )  # fmt: skip
                n_column = column_tokens(seq_len, group, query_len, max_context, HEADS, COLUMNS)
                valid = (page >= 0) & (page < pages)
                best = score_columns(b_k, columns, n_column, block, valid, BLOCK, FORMAT, UPCAST)  # [COLUMNS]
                o_column = group * COLUMNS + tl.arange(0, COLUMNS)
                kept = o_column < query_len * HEADS
                if FORMAT != NATIVE:
                    kept &= columns[2] == 0
                tl.store(p_scores + o_column.to(tl.int64) * width + i_local, best, mask=kept)
            if FORMAT != NATIVE:
                if lossy > 0:
                    # The scores of lossy columns, from bf16 dots: rare, so what they need is loaded again.
                    b_exact = b_k.to(tl.bfloat16)
                    for group in tl.static_range(GROUPS):
                        b_q = load_columns(
                            q_ptr, i_request, group, query_len, stride_rank, stride_token, stride_head, HEADS, LOCAL_HEADS, REPLICAS, DIM, COLUMNS
                        )  # fmt: skip
                        n_column = column_tokens(seq_len, group, query_len, max_context, HEADS, COLUMNS)
                        best = score_columns(b_exact, operands(b_q, NATIVE), n_column, block, (page >= 0) & (page < pages), BLOCK, NATIVE, UPCAST)
                        o_column = group * COLUMNS + tl.arange(0, COLUMNS)
                        kept = (o_column < query_len * HEADS) & (operands(b_q, FORMAT)[2] > 0)
                        tl.store(p_scores + o_column.to(tl.int64) * width + i_local, best, mask=kept)
        item = upto
        start = end
        i_request += 1


def score(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    shape: IndexerShape,
    shard: Shard,
    query_len: int,
    max_context: int,
    out: torch.Tensor,
    state: torch.Tensor,
    programs: int,
) -> torch.Tensor:
    """`reference.score` as one kernel, without the -inf of blocks that are not read (their entries keep old bits).

    Args:
        q: `[tokens, heads, D]` or gathered `[ranks, tokens, local heads, D]`; any strides but the last.
        out: `[>= tokens, heads, local blocks of max_context]` fp32, contiguous.
        state: `[4]` int64 on the device: launches so far, then the error word (kind, rank, launch).
        programs: size of the persistent grid.
    """
    gathered = q.dim() == 4
    heads = out.shape[1]
    form = tile.cache_format(cache.dtype)
    fixed = constants(shape, heads, q.shape[2] if gathered else heads, q.shape[0] if gathered else 1, query_len, seq_lens.numel(), cache)
    setting = tile.setting(form, fixed["GROUPS"], staged=True)
    score_kernel[(programs,)](
        q, tile.as_stored(cache), block_table, seq_lens, out, state,
        seq_lens.numel(), query_len, cache.shape[0], shard.rank, shard.world, max_context, shape.init_blocks, shape.local_blocks,
        q.stride(0) if gathered else 0, q.stride(-3), q.stride(-2), cache.stride(0), block_table.stride(0), out.shape[2],
        **fixed, FORMAT=form, STAGES=setting.stages, UPCAST=tile.INTERPRETED, **setting.options,
    )  # fmt: skip
    return out


def constants(
    shape: IndexerShape, heads: int, local_heads: int, ranks: int, query_len: int, requests: int, cache: torch.Tensor, columns: int = tile.COLUMNS
) -> dict:  # fmt: skip
    """Compile-time constants of a scoring call: none depends on a context length."""
    return dict(
        HEADS=heads, LOCAL_HEADS=local_heads, REPLICAS=max(1, ranks * local_heads // heads), DIM=shape.head_dim, BLOCK=shape.block_size,
        TOPK=shape.topk, GROUPS=-(-query_len * heads // columns), COLUMNS=columns, REQUESTS=request_bucket(requests), ALIGN=page_alignment(cache),
    )  # fmt: skip


def request_bucket(requests: int) -> int:
    """Width of the vector of lengths: few, so that few kernels are compiled; up to 32 one warp reduces it alone."""
    bucket = 1
    while bucket < requests:
        bucket *= 32 if bucket == 1 else 8
    return bucket


def page_alignment(cache: torch.Tensor) -> int:
    """Bytes, at most 16, that divide the address of every page: what the loads of keys may assume."""
    both = (cache.stride(0) * cache.element_size()) | cache.data_ptr() | 16
    return both & -both

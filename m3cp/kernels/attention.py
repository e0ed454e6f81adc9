"""Decode attention over chosen blocks: each query head attends to the blocks that its KV head's indexer chose.

One program takes one (token, KV head) and a share of its chosen blocks, with all query heads of the group as rows of
the matrix unit; a second kernel merges the shares by their log-sum-exps. Splitting wins while tokens are few, which
is where sparse decode lives: 16 blocks a row are little work for one program and too much for the latency of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3cp.kernels import tile
from m3cp.kernels.tile import NATIVE, decode_e4m3, row_tokens

STAGES = 2
PROGRAMS_PER_UNIT = 2  # splits are made until the grid has this many
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(cache_ptr, page, stride_page, i_head, stride_head, stride_token, m_token, BLOCK: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr, FORMAT: tl.constexpr):
    """A block's keys or values of one head, [BLOCK, DIM]; tokens that the row does not see are zeros, whatever stands there.

    Strides come in units of 16 bytes, and the host has checked the base: loads are 16 bytes wide.
    """
    p_page = tl.multiple_of(cache_ptr + (page * stride_page + i_head * stride_head) * UNIT, 16)
    p_rows = p_page + tl.arange(0, BLOCK)[:, None] * (stride_token * UNIT) + tl.arange(0, DIM)[None, :]
    b_rows = tl.load(p_rows, mask=m_token[:, None], other=0)
    return decode_e4m3(b_rows, FORMAT).to(tl.bfloat16) if FORMAT != NATIVE else b_rows


@triton.jit(
    do_not_specialize=[
        "q_ptr", "k_ptr", "v_ptr", "table_ptr", "lens_ptr", "ids_ptr", "parts_ptr", "lse_ptr", "query_len", "pages", "max_context",
        "stride_q_token", "stride_q_head", "stride_k_page", "stride_k_token", "stride_k_head", "stride_v_page", "stride_v_token", "stride_v_head",
        "stride_table", "stride_ids",
    ]
)  # fmt: skip
def attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, ids_ptr, parts_ptr, lse_ptr,
    scale, query_len, pages, max_context, stride_q_token, stride_q_head, stride_k_page, stride_k_token, stride_k_head,
    stride_v_page, stride_v_token, stride_v_head, stride_table, stride_ids,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr,
    SPLITS: tl.constexpr, UNIT: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0)
    i_head = tl.program_id(1)  # KV head
    i_split = tl.program_id(2)
    i_request = i_token // query_len
    n = row_tokens(tl.load(lens_ptr + i_request), i_token % query_len, query_len, max_context)
    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM)
    m_row = o_row < GROUP
    p_q = tl.multiple_of(q_ptr + (i_token.to(tl.int64) * stride_q_token + i_head * GROUP * stride_q_head) * 8, 16)
    b_q = tl.load(p_q + o_row[:, None] * (stride_q_head * 8) + o_dim[None, :], mask=m_row[:, None], other=0.0)  # [ROWS, DIM]
    p_ids = ids_ptr + i_head.to(tl.int64) * stride_ids + i_token.to(tl.int64) * TOPK
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, DIM], tl.float32)
    PART: tl.constexpr = (TOPK + SPLITS - 1) // SPLITS
    for i in tl.range(i_split * PART, tl.minimum(i_split * PART + PART, TOPK), num_stages=STAGES):
        block = tl.load(p_ids + i)
        page = tl.load(table_ptr + i_request.to(tl.int64) * stride_table + tl.maximum(block, 0), mask=block >= 0, other=-1)
        m_token = (block * BLOCK + tl.arange(0, BLOCK) < n) & (block >= 0) & (page >= 0) & (page < pages)  # [BLOCK]
        page = tl.where((page >= 0) & (page < pages), page, 0).to(tl.int64)
        b_k = _load_rows(k_ptr, page, stride_k_page, i_head, stride_k_head, stride_k_token, m_token, BLOCK, DIM, UNIT, FORMAT)
        b_v = _load_rows(v_ptr, page, stride_v_page, i_head, stride_v_head, stride_v_token, m_token, BLOCK, DIM, UNIT, FORMAT)
        if UPCAST:
            dots = tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")
        else:
            dots = tl.dot(b_q, tl.trans(b_k))  # [ROWS, BLOCK]
        dots = tl.where(m_token[None, :], dots * (scale * _LOG2E), float("-inf"))
        b_new = tl.maximum(b_max, tl.max(dots, 1))
        shift = tl.where(b_new == float("-inf"), 0.0, b_new)  # nothing seen yet: exp2(-inf - 0) is 0, not NaN
        b_p = tl.exp2(dots - shift[:, None])
        decay = tl.exp2(b_max - shift)
        b_sum = b_sum * decay + tl.sum(b_p, 1)
        if UPCAST:
            b_acc = b_acc * decay[:, None] + tl.dot(b_p, b_v.to(tl.float32), input_precision="ieee")
        else:
            b_acc = b_acc * decay[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_max = b_new
    i_part = ((i_token.to(tl.int64) * KV_HEADS + i_head) * SPLITS + i_split) * GROUP
    total = tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(parts_ptr + (i_part + o_row[:, None]) * DIM + o_dim[None, :], b_acc / total[:, None], mask=m_row[:, None])
    tl.store(lse_ptr + i_part + o_row, tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(total)), mask=m_row)


@triton.jit(do_not_specialize=["parts_ptr", "lse_ptr", "out_ptr"])
def merge_parts_kernel(
    parts_ptr, lse_ptr, out_ptr, v_scale, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    i_head = tl.program_id(0).to(tl.int64)  # of all tokens' query heads, `[tokens, KV heads, GROUP]`
    o_split = tl.arange(0, LANES)
    o_dim = tl.arange(0, DIM)
    o_part = i_head // GROUP * SPLITS * GROUP + o_split * GROUP + i_head % GROUP
    lse = tl.load(lse_ptr + o_part, mask=o_split < SPLITS, other=float("-inf"))  # [LANES], base 2
    best = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weight, 0)
    b_part = tl.load(parts_ptr + o_part[:, None] * DIM + o_dim[None, :], mask=(o_split < SPLITS)[:, None], other=0.0)
    b_out = tl.sum(b_part * weight[:, None], 0) * (v_scale / tl.where(total == 0.0, 1.0, total))  # a row of nothing is zeros
    tl.store(out_ptr + i_head * DIM + o_dim, b_out)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    ids: torch.Tensor,
    *,
    query_len: int,
    max_context: int,
    scale: float,
    v_scale: float,
    splits: int,
    out: torch.Tensor,
    parts: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor:
    """Two launches; arguments are checked by `m3cp.attention.sparse_attention`.

    Args:
        scale: of a dot, the cache's own scale included.
        splits: programs that share a row's blocks, 1 to topk.
        out: `[tokens, query heads, D]`, contiguous.
        parts, lse: scratch, `[tokens, query heads, splits, D]` and without D, fp32 (laid out split by split).
    """
    tokens, kv_heads, dim = q.shape[0], ids.shape[0], q.shape[2]
    group, unit = q.shape[1] // kv_heads, 16 // k_cache.element_size()
    attention_kernel[(tokens, kv_heads, splits)](
        q, tile.as_stored(k_cache), tile.as_stored(v_cache), block_table, seq_lens, ids, parts, lse,
        scale, query_len, k_cache.shape[0], max_context, q.stride(0) // 8, q.stride(1) // 8, *(s // unit for s in (*k_cache.stride()[:3], *v_cache.stride()[:3])),
        block_table.stride(0), ids.stride(0), **constants(kv_heads, group, dim, k_cache.shape[1], ids.shape[2], splits),
        UNIT=unit, FORMAT=cache_format(k_cache.dtype), STAGES=STAGES, UPCAST=tile.INTERPRETED,
        **options(cache_format(k_cache.dtype)),
    )  # fmt: skip
    merge_parts_kernel[(tokens * q.shape[1],)](
        parts, lse, out, v_scale, GROUP=group, DIM=dim, SPLITS=splits, LANES=triton.next_power_of_2(splits), num_warps=1
    )
    return out


def options(form: int, hip: bool = bool(torch.version.hip)) -> dict[str, int]:
    """The compiler's options for a `cache_format`.

    A 16 x 128 query tile against 128 keys, then 128 values: four warps hold both without spills on all three GPUs, and the
    conversion of fp8 needs the registers of eight. By NVIDIA's instruction two such programs fit a unit, if it is told so
    (a quarter faster at 32 requests, LOG.md, 2026-11-30); by integer moves they would spill.
    """
    if form == NATIVE.value:
        return {"num_warps": 4}
    return {"num_warps": 8} | ({"maxnreg": 128} if form == tile.E4M3FN_CAST.value and not hip else {})


def cache_format(dtype: torch.dtype, hip: bool = bool(torch.version.hip), cast: bool | None = None) -> int:
    """As `tile.cache_format`; on CDNA by integer moves alone: with gfx950's instruction 264 registers spill."""
    return tile.cache_format(dtype, False if hip else cast)


def constants(kv_heads: int, group: int, dim: int, block: int, topk: int, splits: int) -> dict:
    """Compile-time constants: none depends on a context length."""
    rows = max(16, triton.next_power_of_2(group))  # rows of the smallest dot
    return dict(KV_HEADS=kv_heads, GROUP=group, ROWS=rows, DIM=dim, BLOCK=block, TOPK=topk, SPLITS=splits)

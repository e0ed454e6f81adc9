"""The attention that follows the indexer: decode rows over the blocks that were chosen for them."""

from __future__ import annotations

import torch

from m3cp.kernels import attention as attention_op
from m3cp.kernels import tile
from m3cp.reference import row_lengths
from m3cp.shapes import require, require_int


def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    ids: torch.Tensor,
    *,
    query_len: int = 1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    splits: int | None = None,
) -> torch.Tensor:
    """Softmax attention of each query row over its chosen blocks, `[tokens, query heads, D]` in q's dtype.

    Args:
        q: `[tokens, query heads, D]` bf16 or fp16, `tokens = requests * query_len`; the heads of a KV head's group adjacent.
        k_cache, v_cache: `[pages, block_size, kv_heads, D]`, any strides but the last: q's dtype, or fp8 e4m3.
        block_table: `[requests, width]` int32.
        seq_lens: `[requests]` int32, this step's tokens included; 0 for a padding row.
        ids: `[kv_heads, tokens, topk]` int32: chosen blocks, -1 padded, each at most once, as the indexer returns them.
        k_scale, v_scale: of an fp8 cache, one positive number per tensor; dots are also scaled by `D ** -0.5`.
        splits: programs that share a row's blocks; None: enough to fill the device.

    A row attends to the tokens of its chosen blocks up to itself; one with nothing to attend to is zeros. Blocks whose
    table entry names no page are skipped, and bits beyond a row's length never matter.

    On a GPU, or in Triton's interpreter, two kernels; elsewhere the eager form, which is the specification.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    tokens, heads, dim = q.shape
    require("q.dtype", q.dtype, q.dtype in (torch.bfloat16, torch.float16), "torch.bfloat16 or torch.float16")
    require_int("query_len", query_len, 1, max(1, tokens))
    kv_heads, topk = ids.shape[0], ids.shape[2]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape[2:] != (kv_heads, dim) or cache.stride(3) != 1 or cache.shape != k_cache.shape:
            raise ValueError(f"{name} of shape {tuple(cache.shape)} and strides {cache.stride()}: must be [pages, block_size, kv_heads={kv_heads}, head_dim={dim}], K and V alike")
        known = cache.dtype == q.dtype or cache.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        require(f"{name}.dtype", cache.dtype, known and cache.dtype == k_cache.dtype, f"{q.dtype} or an fp8 e4m3 format, K and V alike")
        aligned = cache.data_ptr() % 16 == 0 and all(s * cache.element_size() % 16 == 0 for s in cache.stride()[:3])
        require(f"{name}.stride()", cache.stride(), aligned, "multiples of 16 bytes, from an aligned address")
    require("q.shape[1]", heads, heads % kv_heads == 0, f"a multiple of the {kv_heads} KV heads of ids")
    require("head_dim", dim, dim in (64, 128), "64 or 128")
    requests = seq_lens.shape[0]
    for name, value, size in (("ids", ids, (kv_heads, requests * query_len, topk)), ("block_table", block_table, (requests, *block_table.shape[1:]))):
        if tuple(value.shape) != size or value.dtype != torch.int32 or value.stride()[1:] != ((topk, 1) if name == "ids" else (1,)):
            raise ValueError(f"{name} of shape {tuple(value.shape)}, {value.dtype} and strides {value.stride()}: must be {size} int32, its rows contiguous")
    require("seq_lens", tokens, tokens == requests * query_len, f"{requests} requests x query_len {query_len} rows of q")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        require(name, value, isinstance(value, (int, float)) and 0 < value < float("inf"), "a positive finite number")
    scale = dim**-0.5 * k_scale
    if q.device.type != "cuda" and not tile.INTERPRETED:
        return _eager(q, k_cache, v_cache, block_table, seq_lens, ids, query_len, scale, v_scale)
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    if q.stride(2) != 1 or q.data_ptr() % 16 or any(q.stride(d) * q.element_size() % 16 for d in (0, 1)):
        q = q.contiguous()
    splits = _splits(tokens * kv_heads, topk, q.device) if splits is None else splits
    require_int("splits", splits, 1, topk)
    parts = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=q.device)
    return attention_op.attention(
        q, k_cache, v_cache, block_table, seq_lens, ids, query_len=query_len, max_context=2**31 - 1, scale=scale, v_scale=v_scale,
        splits=splits, out=out, parts=parts, lse=lse,
    )  # fmt: skip


def _splits(rows: int, topk: int, device: torch.device) -> int:
    """Few values, so that few kernels are compiled: the power of two that fills the device, at most topk."""
    if device.type != "cuda":
        return min(4, topk)
    wanted = attention_op.PROGRAMS_PER_UNIT * torch.cuda.get_device_properties(device).multi_processor_count // rows
    return min(1 << max(0, wanted.bit_length() - 1), topk)


def _eager(q, k_cache, v_cache, block_table, seq_lens, ids, query_len: int, scale: float, v_scale: float) -> torch.Tensor:
    """The chosen blocks' tokens gathered, then softmax in fp32."""
    kv_heads, tokens, topk = ids.shape
    block, group, dim = k_cache.shape[1], q.shape[1] // kv_heads, q.shape[2]
    if not tokens:
        return torch.empty_like(q)
    n = row_lengths(seq_lens, query_len, 2**31 - 1)
    chosen = ids.clamp(min=0).to(torch.int64)
    request = torch.arange(tokens, device=q.device) // query_len
    page = block_table[request[None, :, None], chosen].to(torch.int64)  # [kv_heads, tokens, topk]
    valid = (ids >= 0) & (page >= 0) & (page < k_cache.shape[0])
    position = chosen[..., None] * block + torch.arange(block, device=q.device)
    seen = (valid[..., None] & (position < n[None, :, None, None])).flatten(2)  # [kv_heads, tokens, topk * block]
    head = torch.arange(kv_heads, device=q.device)[:, None, None]
    page = torch.where(valid, page, 0)
    keys, values = (_rows(cache, page, head).flatten(2, 3) for cache in (k_cache, v_cache))
    rows = q.float().view(tokens, kv_heads, group, dim).transpose(0, 1)
    dots = (rows @ torch.where(seen[..., None], keys, 0.0).transpose(2, 3)) * scale
    weight = torch.where(seen[:, :, None], dots, float("-inf")).softmax(3).nan_to_num(0.0)  # NaN: a row that sees nothing
    found = weight @ torch.where(seen[..., None], values, 0.0) * v_scale
    return found.transpose(0, 1).reshape(q.shape).to(q.dtype)


def _rows(cache: torch.Tensor, page: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, tokens, topk, block, D]` fp32; fp8 is gathered as bytes, since not every device indexes it."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[page, :, head].view(cache.dtype).float()
    return cache[page, :, head].float()

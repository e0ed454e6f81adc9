"""Sparse attention against dense attention under the same mask, in fp64: the eager form, the interpreter, GPUs."""

from __future__ import annotations

import pytest
import torch

from m3cp.attention import sparse_attention

BF16, FP16, FN, FNUZ = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
# name: (query heads, KV heads, lengths, query_len, topk, cache dtype, splits)
CASES = {
    "m3": (64, 4, (128 * 9 - 5, 128 * 2, 0), 1, 6, BF16, 4),
    "one rank of four, all of topk": (16, 1, (128 * 20 + 1,), 1, 16, BF16, 8),
    "fp8": (64, 4, (128 * 9 - 5,), 1, 6, FN, 3),
    "fnuz, draft tokens": (8, 2, (128 * 7 + 2, 3), 4, 5, FNUZ, 2),
    "draft tokens, groups of two": (4, 2, (128 * 6 + 1, 130, 2), 4, 4, BF16, 1),
    "fp16": (32, 2, (128 * 6 - 1,), 2, 4, FP16, 4),
    "topk 1": (16, 1, (128 * 5, 0), 1, 1, BF16, 1),
}


def problem(name: str, device="cpu", dim: int = 128, block: int = 128):
    """(q, k, v, table, lens, ids, query_len): values where nobody may look are NaN, one chosen block names no page."""
    heads, kv_heads, lengths, query_len, topk, dtype, _ = CASES[name]
    g = torch.Generator().manual_seed(len(name))
    blocks = [-(-n // block) for n in lengths]
    width, pages = max(blocks) + 1, sum(blocks) + 3
    kv = torch.full((pages, 2, block, kv_heads, dim), float("nan"))
    order = torch.randperm(pages, generator=g).to(torch.int32)
    table, used = torch.full((len(lengths), width), 1 << 20, dtype=torch.int32), 0
    for r, n in enumerate(lengths):
        table[r, : blocks[r]] = order[used : used + blocks[r]]
        for b in range(blocks[r]):
            held = min(block, n - b * block)
            kv[order[used + b], :, :held] = torch.randn(2, held, kv_heads, dim, generator=g)
        used += blocks[r]
    if blocks[0] > 4:
        table[0, 2] = -1
    tokens = len(lengths) * query_len
    ids = torch.full((kv_heads, tokens, topk), -1, dtype=torch.int32)
    for h in range(kv_heads):
        for t in range(tokens):
            visible = max(0, -(-(lengths[t // query_len] - query_len + t % query_len + 1) // block))
            chosen = torch.randperm(visible, generator=g)[:topk].sort().values
            ids[h, t, : len(chosen)] = chosen.to(torch.int32)
    q = torch.randn(tokens, heads, dim, generator=g).to(FP16 if dtype == FP16 else BF16)
    kv = kv.to(dtype).to(device)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return q.to(device), kv[:, 0], kv[:, 1], table.to(device), lens.to(device), ids.to(device), query_len


def dense(q, k, v, table, lens, ids, query_len, k_scale=1.0, v_scale=1.0):
    """Attention over every token of the context with all but the chosen blocks' masked, row by row in fp64."""
    lens = lens.tolist()
    q, k, v, table, ids = q.cpu().double(), k.cpu().to(torch.float64), v.cpu().to(torch.float64), table.cpu(), ids.cpu()
    entries = table.tolist()
    out, group, block = torch.zeros_like(q), q.shape[1] // ids.shape[0], k.shape[1]
    for t in range(q.shape[0]):
        r, n = t // query_len, lens[t // query_len] - query_len + t % query_len + 1
        for h in range(ids.shape[0]):
            chosen = set(ids[h, t].tolist())
            where = [p for p in range(max(0, n)) if p // block in chosen and 0 <= entries[r][p // block] < k.shape[0]]
            if where:
                page, slot = table[r, torch.tensor(where) // block].long(), torch.tensor(where) % block
                mine = slice(h * group, (h + 1) * group)
                dots = q[t, mine] @ k[page, slot, h].T * (k_scale * q.shape[2] ** -0.5)
                out[t, mine] = dots.softmax(1) @ v[page, slot, h] * v_scale
    return out


def check(name: str, device="cpu", splits: int | None = 0, **options) -> torch.Tensor:
    """Within what bf16 (fp16) inputs to the second product and outputs round: 2**-7 of the values' size, 2**-9 on average."""
    given = problem(name, device, **options)
    expect = dense(*given, 0.5, 2.0)
    got = sparse_attention(*given[:6], query_len=given[6], k_scale=0.5, v_scale=2.0, splits=CASES[name][6] if splits == 0 else splits)
    error = (got.cpu().double() - expect).abs()
    assert got.dtype == given[0].dtype and error.max() <= 2**-7 * expect.abs().max(), (name, float(error.max()))
    assert error.mean() <= 2**-9 * expect.abs().max(), (name, float(error.mean()))
    assert torch.equal((got.cpu() == 0).all(2), (expect == 0).all(2)), "rows that see nothing are zeros, others are not"
    return got


def check_refusals() -> None:
    q, k, v, table, lens, ids, query_len = problem("m3")
    for change, named in (
        (dict(q=q.float()), "q.dtype=torch.float32"),
        (dict(k_cache=k[..., :64]), r"k_cache of shape .*must be \[pages, block_size, kv_heads=4, head_dim=128"),
        (dict(v_cache=v.to(FN)), "v_cache.dtype=torch.float8_e4m3fn.*K and V alike"),
        (dict(ids=ids[:3]), "k_cache of shape .*kv_heads=3"),
        (dict(ids=ids.long()), "ids of shape .*torch.int64"),
        (dict(q=q[:2]), "seq_lens=2: must be 3 requests x query_len 1"),
        (dict(q=q[:, :30]), "q.shape.1.=30: must be a multiple of the 4 KV heads"),
        (dict(k_scale=0), "k_scale=0: must be a positive finite number"),
        (dict(block_table=table[:2]), r"block_table of shape \(2, 10\)"),
    ):
        given = dict(q=q, k_cache=k, v_cache=v, block_table=table, seq_lens=lens, ids=ids) | change
        with pytest.raises(ValueError, match=named):
            sparse_attention(**given)

"""The indexer in plain PyTorch: the specification that kernels are compared with, and the CPU's own backend.

Stages: `score` a shard, `candidates` of a shard, `merge` of all shards' candidates. `select_blocks` is the three of
them in a world of one. `m3cp.kernels` offers the same three stages with the same arguments.
"""

from __future__ import annotations

import torch

from m3cp import keys
from m3cp.pagetable import Emission
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

COLUMNS = 16  # (row, head) pairs go through dots in groups of 16, whatever the heads, rows, ranks or form
_BLOCKS_A_PRODUCT = {"cpu": 16}  # a fixed batch of products: every block's dot is then the same call, bit for bit
_BLOCKS_A_PRODUCT_ON_DEVICE = 2048


def row_lengths(seq_lens: torch.Tensor, query_len: int, max_context: int) -> torch.Tensor:
    """Tokens that each query row sees, [tokens] int64; 0 for rows that see none or that exceed `max_context`."""
    steps = torch.arange(query_len, device=seq_lens.device) - (query_len - 1)
    n = (seq_lens.to(torch.int64)[:, None] + steps).flatten()
    return torch.where((n > 0) & (n <= max_context), n, 0)


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unscaled fp32 block scores of a shard, `[tokens, heads, local blocks]`.

    Args:
        q: `[tokens, heads, D]`, or gathered `[ranks, tokens, local heads, D]`.
        cache: `[pages, block_size, D]`, any page stride.
        block_table: `[requests, width]` int32.
        seq_lens: `[requests]` int32, tokens including this step's.
        shard: which blocks (`block % world == rank`); a world of one is all of them.
        out: `[>= tokens, heads, >= local blocks]` fp32 to write into.

    Only blocks whose keys decide something are read (see `traffic.read_range`); the other entries are -inf.
    """
    q = all_heads(q, shape)
    tokens, heads, dim = q.shape
    device = q.device
    requests = seq_lens.numel()
    width = shard.local_blocks(block_table.shape[1])
    if out is None:
        out = torch.empty(tokens, heads, width, dtype=torch.float32, device=device)
    scores = out[:tokens, :, :width]
    scores.fill_(float("-inf"))
    n = row_lengths(seq_lens, query_len, max_context)
    request, block = _blocks_to_read(seq_lens, shape=shape, shard=shard, max_context=max_context, width=block_table.shape[1])
    if request.numel() == 0:
        return scores
    pairs = query_len * heads
    groups = -(-pairs // COLUMNS)
    columns = torch.zeros(requests, groups * COLUMNS, dim, dtype=torch.float32, device=device)
    columns[:, :pairs] = q.reshape(requests, pairs, dim)
    columns = columns.reshape(requests, groups, COLUMNS, dim).transpose(2, 3).contiguous()  # [requests, groups, D, 16]
    row_n = n.reshape(requests, query_len).repeat_interleave(heads, 1)  # [requests, pairs]
    position = torch.arange(shape.block_size, device=device)
    batch = _BLOCKS_A_PRODUCT.get(device.type, _BLOCKS_A_PRODUCT_ON_DEVICE)
    tile = torch.zeros(batch, shape.block_size, dim, dtype=torch.float32, device=device)
    best = torch.empty(request.numel(), groups * COLUMNS, dtype=torch.float32, device=device)
    for start in range(0, request.numel(), batch):
        r, b = request[start : start + batch], block[start : start + batch]
        page = block_table[r, b].to(torch.int64)
        valid = (page >= 0) & (page < cache.shape[0])
        tile[: r.numel()] = _pages(cache, torch.where(valid, page, 0))
        weights = columns[r] if r.numel() == batch else torch.cat([columns[r], columns[r[:1]].expand(batch - r.numel(), -1, -1, -1)])
        n_column = torch.nn.functional.pad(row_n[r], (0, groups * COLUMNS - pairs))
        seen = (b[:, None] * shape.block_size + position)[:, :, None] < n_column[:, None, :]  # [blocks, block_size, columns]
        for g in range(groups):
            span = slice(g * COLUMNS, (g + 1) * COLUMNS)
            dots = torch.bmm(tile, weights[:, g])[: r.numel()]
            usable = seen[:, :, span] & ~torch.isnan(dots) & valid[:, None, None]
            best[start : start + r.numel(), span] = torch.where(usable, dots, float("-inf")).amax(1)
    rows = scores.view(requests, query_len, heads, -1) if scores.is_contiguous() else scores.unflatten(0, (requests, query_len))
    rows[request, :, :, torch.div(block, shard.world, rounding_mode="floor")] = best[:, :pairs].reshape(-1, query_len, heads)
    return scores


def candidates(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    shape: IndexerShape,
    shard: Shard,
    query_len: int,
    max_context: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The shard's best `topk` keys of each row, `[heads, tokens, topk]` int64, best first, then EMPTY.

    Args:
        scores: `[tokens, heads, local blocks]` fp32, as `score` returns them.
        out: contiguous tensor of the result's shape to write into.
    """
    tokens, heads, width = scores.shape
    n = row_lengths(seq_lens, query_len, max_context)
    visible = ((n + shape.block_size - 1) // shape.block_size)[:, None, None]
    block = (torch.arange(width, device=scores.device) * shard.world + shard.rank)[None, None]
    key = keys.encode(keys.order_code(scores), block, visible, shape.init_blocks, shape.local_blocks)
    best = key.topk(min(shape.topk, width), dim=2).values.transpose(0, 1)
    if out is None:
        out = torch.empty(heads, tokens, shape.topk, dtype=torch.int64, device=scores.device)
    out[:, :, best.shape[2] :] = keys.EMPTY
    out[:, :, : best.shape[2]] = best
    return out


def merge(gathered: torch.Tensor, *, shape: IndexerShape, owned: range, out: torch.Tensor | None = None) -> torch.Tensor:
    """The choice of the heads `owned`, `[owned heads, tokens, topk]` int32: ids ascending, then -1.

    Args:
        gathered: `[ranks, heads, tokens, topk]` int64 candidates of every rank, read in place.
    """
    mine = gathered[:, owned.start : owned.stop]
    pool = mine.permute(1, 2, 0, 3).flatten(2)
    ids = keys.block_of(pool.topk(shape.topk, dim=2).values)
    ids = torch.where(ids < 0, keys.MAX_BLOCKS, ids).sort(2).values
    ids = torch.where(ids == keys.MAX_BLOCKS, -1, ids).to(torch.int32)
    return ids if out is None else out.copy_(ids)


def select_blocks(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, shape: IndexerShape, query_len: int = 1
) -> torch.Tensor:
    """The blocks that each query row attends to, `[heads, tokens, topk]` int32: ids ascending, then -1.

    Args:
        q: `[tokens, heads, D]` for all heads, `tokens = requests * query_len`, request-major.
        cache: `[pages, block_size, D]`.
        block_table: `[requests, width]` int32, logical block to page.
        seq_lens: `[requests]` int32: total tokens *including* this step's queries (0: a padding row). Passing the
            committed prefix instead hides the draft tokens from every row.

    Rows longer than the table is wide are all -1.

    Raises:
        ValueError: a cache of integers, whose format nobody stated.
    """
    if not cache.dtype.is_floating_point:
        raise ValueError(f"cache.dtype={cache.dtype}: must be a floating-point type; view bytes as the fp8 format they hold")
    shard = Shard(0, 1, shape.heads)
    bound = block_table.shape[1] * shape.block_size
    common = dict(shape=shape, shard=shard, query_len=query_len, max_context=bound)
    found = candidates(score(q, cache, block_table, seq_lens, **common), seq_lens, **common)
    return merge(found[None], shape=shape, owned=range(shape.heads))


def emit_pages(ids: torch.Tensor, emit: Emission, *, shape: IndexerShape) -> None:
    """Write the page table of chosen `ids` `[owned heads, tokens, topk]` (see `m3cp.pagetable`)."""
    r = emit.table.per_block(shape)
    page_size = emit.table.page_size
    n = row_lengths(emit.seq_lens, emit.query_len, emit.max_context)  # [tokens]
    table = emit.block_table.repeat_interleave(emit.query_len, 0).to(torch.int64)
    chosen = ids >= 0
    block = torch.where(chosen, ids, 0).to(torch.int64)
    entry = table[torch.arange(len(n), device=ids.device)[None, :, None], block]
    named = chosen & (entry >= 0) & (entry < emit.cache_pages)
    held = torch.where(named, (n[None, :, None] - block * shape.block_size).clamp(max=shape.block_size), 0)
    offset = torch.arange(r, device=ids.device)
    page = torch.where(offset * page_size < held[..., None], entry[..., None] * emit.stride(shape) + offset, -1).flatten(2)
    order = (page < 0).to(torch.int8).argsort(dim=2, stable=True)
    emit.table.pages.copy_(page.gather(2, order))
    emit.table.attended.copy_(held.sum(2))


def scaled(scores: torch.Tensor, shape: IndexerShape, *, k_scale: float = 1.0) -> torch.Tensor:
    """Block scores as an engine wants to see them: times `head_dim ** -0.5`, and an fp8 cache's one scale per tensor.

    Only scores that are returned are scaled, after ranking: rounding could make equal what was not.

    Raises:
        ValueError: a `k_scale` that is not a positive finite number.
    """
    if not (isinstance(k_scale, (int, float)) and 0 < k_scale < float("inf")):
        raise ValueError(f"k_scale={k_scale!r}: must be a positive finite number, one for the whole cache")
    return scores * (shape.head_dim**-0.5 * k_scale)


def all_heads(q: torch.Tensor, shape: IndexerShape) -> torch.Tensor:
    """`[tokens, heads, D]` from queries that may be gathered: `[ranks, tokens, local heads, D]`, replicas dropped."""
    if q.dim() == 3:
        return q
    ranks, tokens, local_heads, dim = q.shape
    distinct = q[:: max(1, ranks * local_heads // shape.heads)]
    return distinct.transpose(0, 1).reshape(tokens, -1, dim)


def _pages(cache: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
    """Pages `[count, block_size, D]` as fp32; fp8 is gathered as bytes, since not every device indexes it."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[page].view(cache.dtype).float()
    return cache[page].float()


def _blocks_to_read(seq_lens, *, shape: IndexerShape, shard: Shard, max_context: int, width: int):
    """(request, logical block) of every block of the shard whose keys must be read, two int64 vectors."""
    length = seq_lens.to(torch.int64).clamp(0, max_context)
    visible = (length + shape.block_size - 1) // shape.block_size
    last = torch.where(visible > shape.topk, visible - shape.local_blocks, 0)
    block = torch.arange(shard.local_blocks(width), device=seq_lens.device) * shard.world + shard.rank
    request, index = torch.nonzero((block >= shape.init_blocks) & (block < last[:, None]), as_tuple=True)
    return request, block[index]

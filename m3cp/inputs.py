"""Seeded problems: the same global tensors for every world size and rank, and adversarial ones for tests.

Queries and keys are multiples of 1/8 in [-2, 2], so every order of summation gives the same bits (`spec.md`,
section 1) and ids can be compared exactly. Pages of a cache lie permuted at random over one pool; entries of a block
table beyond what a row sees, and all of a padding row's, are garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from m3cp import traffic
from m3cp.shapes import DTYPES, IndexerShape, Point, require
from m3cp.shard import Shard

TORCH_DTYPES = dict(
    zip(DTYPES, (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz), strict=True)
)
STEPS = 16  # values are k / 8 for k in [-16, 16]
SPARE_PAGES = 7  # of a pool made for one problem: never referenced, so that pages never lie side by side
_CHUNK_PAGES = 2048  # a pool is drawn in chunks, each from its own seed, so that its temporaries stay small
_GARBAGE = (-1, -7, 1 << 20, 2**31 - 1)


@dataclass(frozen=True)
class Problem:
    """One decode step's inputs, for all heads.

    Args:
        shape: the indexer's constants.
        query_len: query tokens a request.
        q: `[tokens, heads, D]` bf16 (fp16 with an fp16 cache), `tokens = requests * query_len`, request-major.
        cache: `[pages, block_size, D]`: the pool that all tables point into.
        block_tables: tables `[requests, width]` int32 of distinct caches: no page stands in two of them.
        seq_lens: `[requests]` int32, this step's queries included; 0 for padding rows, which come last.
    """

    shape: IndexerShape
    query_len: int
    q: torch.Tensor
    cache: torch.Tensor
    block_tables: list[torch.Tensor]
    seq_lens: torch.Tensor

    @property
    def block_table(self) -> torch.Tensor:
        """The first cache's table."""
        return self.block_tables[0]

    def local_q(self, shard: Shard) -> torch.Tensor:
        """The queries of the heads that a rank owns, `[tokens, local heads, D]`, contiguous."""
        owned = shard.owned_heads
        return self.q[:, owned.start : owned.stop].contiguous()

    def pages_read(self, point: Point, rank: int, cache: int = 0) -> torch.Tensor:
        """Ids of the pages whose keys rank `rank` reads in a call of the Point's arm, int32, request by request."""
        table, shards = self.block_tables[cache], traffic.shards(point)
        lists = [torch.empty(0, dtype=torch.int32, device=table.device)]
        for row, tokens in enumerate(traffic.context_lengths(point)):
            first, last = traffic.read_range(point, tokens)
            start = first + (rank - first) % shards
            lists.append(table[row, start : max(start, last) : shards])
        return torch.cat(lists)


def build(
    point: Point,
    device: torch.device | str,
    *,
    caches: int = 1,
    pool: torch.Tensor | None = None,
    pool_bytes: int | None = None,
    poison: bool = False,
) -> Problem:
    """The inputs of a Point.

    Args:
        point: what to build; the arm, the world size and the transport do not matter.
        device: where the tensors go.
        caches: distinct caches, each with a block table of its own, their pages disjoint.
        pool: a cache from `make_pool` to draw pages from; None makes one.
        pool_bytes: size of the pool to make; what the caches need, and a little more, when None.
        poison: write NaN into key positions at or beyond each request's length and into every unreferenced page.
            Only with a pool of its own.

    Raises:
        ValueError: a pool that is too small or of another shape or dtype, or a shared pool to poison.
    """
    shape, dtype, device = point.shape, TORCH_DTYPES[point.dtype], torch.device(device)
    require("caches", caches, caches >= 1, "1 or more")
    need = pages_of_a_cache(point)
    if pool is None:
        pages = need * caches + SPARE_PAGES if pool_bytes is None else pool_bytes // shape.key_bytes(point.dtype)
        require(
            "pool_bytes",
            pool_bytes,
            pages >= need * caches,
            f"at least {need * caches * shape.key_bytes(point.dtype)} for {caches} caches",
        )
        pool = make_pool(shape, dtype, device, pages=max(1, pages), seed=point.seed)
    elif poison:
        raise ValueError("poison=True with a pool given: a pool that others share can't be poisoned")
    if (
        tuple(pool.shape[1:]) != (shape.block_size, shape.head_dim)
        or pool.dtype != dtype
        or pool.device.type != device.type
    ):
        raise ValueError(
            f"pool of shape {tuple(pool.shape)}, {pool.dtype} on {pool.device}: must be [pages, {shape.block_size}, {shape.head_dim}] {dtype} on {device}"
        )
    if pool.shape[0] < need * caches:
        raise ValueError(f"pool of {pool.shape[0]} pages: {caches} caches of {need} pages need {need * caches}")
    generator = torch.Generator().manual_seed(_mix(point.seed, 1))
    lengths = traffic.context_lengths(point) + [0] * point.rows_padded
    tokens = len(lengths) * point.query_len
    q = _exact((tokens, shape.heads, shape.head_dim), generator)
    permuted = torch.randperm(pool.shape[0], generator=generator, dtype=torch.int64).to(torch.int32)
    tables = [
        _table(point, lengths, permuted[i * need : (i + 1) * need], pool.shape[0], generator) for i in range(caches)
    ]
    if poison:
        _poison(pool, shape, lengths, tables)
    return Problem(
        shape=shape,
        query_len=point.query_len,
        q=q.to(torch.float16 if dtype == torch.float16 else torch.bfloat16).to(device),
        cache=pool,
        block_tables=[t.to(device) for t in tables],
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def make_pool(
    shape: IndexerShape, dtype: torch.dtype, device: torch.device | str, *, pages: int, seed: int
) -> torch.Tensor:
    """Random index keys, `[pages, block_size, D]`: the same values for a seed and a number of pages on one kind of device."""
    device = torch.device(device)
    pool = torch.empty(pages, shape.block_size, shape.head_dim, dtype=dtype, device=device)
    for number, chunk in enumerate(pool.split(_CHUNK_PAGES)):
        generator = torch.Generator(device).manual_seed(_mix(seed, 1000 + number))
        chunk.copy_(_exact(chunk.shape, generator))
    return pool


def pages_of_a_cache(point: Point) -> int:
    """Distinct pages that one cache of a Point occupies: a shared prefix is counted once."""
    shared = _shared_blocks(point)
    visible = [point.shape.blocks(n) for n in traffic.context_lengths(point)]
    return max(min(v, shared) for v in visible) + sum(max(0, v - shared) for v in visible)


def refuse_constant(name: str, values: torch.Tensor) -> None:
    """Raise if a tensor that is about to be timed holds one value only: zeros and constants run faster than data.

    Raises:
        ValueError: naming the tensor and the value.
    """
    flat = values.reshape(-1).to(torch.float32)
    if flat.numel() < 2 or bool((flat == flat[0]).all()):
        value = float(flat[0]) if flat.numel() else None
        raise ValueError(
            f"{name} is constant ({value}): inputs that are timed must vary, constants run faster than real data"
        )


def _shared_blocks(point: Point) -> int:
    return point.shared_prefix_tokens // point.shape.block_size


def _mix(seed: int, stream: int) -> int:
    """A seed of its own for each stream (splitmix64's increment keeps neighbours apart)."""
    return (seed * 0x9E3779B97F4A7C15 + stream * 0xBF58476D1CE4E5B9) % 2**63


def _exact(size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    values = torch.randint(
        -STEPS, STEPS + 1, tuple(size), dtype=torch.int8, generator=generator, device=generator.device
    )
    return values.to(torch.bfloat16).mul_(1 / 8)


def _table(
    point: Point, lengths: list[int], pages: torch.Tensor, pool_pages: int, generator: torch.Generator
) -> torch.Tensor:
    """A block table over `pages`: shared prefix first, then each request's own; garbage beyond what a row sees."""
    width = point.shape.blocks(point.max_context)
    garbage = torch.tensor([*_GARBAGE, pool_pages], dtype=torch.int32)
    table = garbage[torch.randint(0, len(garbage), (len(lengths), width), generator=generator)]
    shared = _shared_blocks(point)
    used = max((min(point.shape.blocks(n), shared) for n in lengths), default=0)
    prefix, own = pages[:used], pages[used:]
    for row, tokens in enumerate(lengths):
        visible = point.shape.blocks(tokens)
        common = min(visible, shared)
        table[row, :common] = prefix[:common]
        table[row, common:visible] = own[: visible - common]
        own = own[visible - common :]
    return table


def _poison(pool: torch.Tensor, shape: IndexerShape, lengths: list[int], tables: list[torch.Tensor]) -> None:
    nan = float("nan")
    used = torch.zeros(pool.shape[0], dtype=torch.bool)
    for table in tables:
        for row, tokens in enumerate(lengths):
            pages = table[row, : shape.blocks(tokens)].to(torch.int64)
            used[pages] = True
            if tokens % shape.block_size:
                pool[int(pages[-1]), tokens % shape.block_size :] = nan
    pool[(~used).to(pool.device)] = nan


def from_scores(
    scores: torch.Tensor,
    *,
    shape: IndexerShape,
    device: torch.device | str = "cpu",
    low: float = -4.0,
    position: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> Problem:
    """A one-request problem whose block scores are given, by one-hot queries: head h's score is `k[h]`, one product.

    Args:
        scores: `[heads, blocks]` (or `[blocks]`, the same for all heads), exact in bf16; NaN and infinities allowed.
        low: the value at all other positions of a block; at or below every finite score.
        position: token of each block that carries head 0's score, head h's stands h tokens on (so that one head's NaN
            spoils no other's score); block number modulo block size when None.
        tokens: the request's length; all of the last block when None.
        seed: of the page permutation.
    """
    scores = scores.to(torch.float32)
    scores = scores.expand(shape.heads, -1) if scores.dim() == 1 else scores
    heads, blocks = scores.shape
    require(
        "scores",
        tuple(scores.shape),
        heads == shape.heads and heads <= shape.head_dim,
        f"[heads={shape.heads}, blocks] or [blocks]",
    )
    keys = torch.zeros(blocks, shape.block_size, shape.head_dim)
    keys[:, :, :heads] = low
    where = torch.arange(blocks) % shape.block_size if position is None else torch.full((blocks,), position)
    for head in range(heads):
        keys[torch.arange(blocks), (where + head) % shape.block_size, head] = scores[head]
    q = torch.zeros(1, heads, shape.head_dim)
    q[0, torch.arange(heads), torch.arange(heads)] = 1.0
    return from_keys(keys, q, shape=shape, device=device, tokens=tokens, seed=seed)


def from_keys(
    keys: torch.Tensor,
    q: torch.Tensor,
    *,
    shape: IndexerShape,
    device: torch.device | str = "cpu",
    tokens: int | None = None,
    seed: int = 0,
) -> Problem:
    """A one-request bf16 problem over given keys `[blocks, block_size, D]` and queries `[1, heads, D]`, pages permuted."""
    blocks = keys.shape[0]
    generator = torch.Generator().manual_seed(_mix(seed, 2))
    pages = torch.randperm(blocks + SPARE_PAGES, generator=generator)[:blocks]
    cache = torch.full((blocks + SPARE_PAGES, shape.block_size, shape.head_dim), float("nan"), dtype=torch.bfloat16)
    cache[pages] = keys.to(torch.bfloat16)
    length = blocks * shape.block_size if tokens is None else tokens
    return Problem(
        shape=shape,
        query_len=1,
        q=q.to(torch.bfloat16).to(device),
        cache=cache.to(device),
        block_tables=[pages.to(torch.int32)[None].to(device)],
        seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
    )


def all_zero(shape: IndexerShape, blocks: int, device: torch.device | str = "cpu") -> Problem:
    """Every key zero, so every score ties: the lowest ids win."""
    return from_scores(torch.zeros(blocks), shape=shape, low=0.0, device=device)


def few_winners(
    shape: IndexerShape, blocks: int, winners: Sequence[int], device: torch.device | str = "cpu"
) -> Problem:
    """Distinct positive scores at `winners`, the first the highest, and exact zeros elsewhere."""
    scores = torch.zeros(blocks)
    scores[list(winners)] = torch.arange(len(winners), 0, -1, dtype=torch.float32)
    return from_scores(scores, shape=shape, low=0.0, device=device)


def one_ulp_apart(shape: IndexerShape, blocks: int, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    """Scores 1 + i * 2**-23 in random order, neighbours one fp32 unit in the last place apart; `blocks` up to 2**16.

    Each score is a sum of three products on the same binary grid below 2, so every partial sum is exact in fp32.
    """
    require("blocks", blocks, 1 <= blocks <= 1 << 16, "1 to 65536")
    generator = torch.Generator().manual_seed(_mix(seed, 3))
    step = torch.stack([torch.randperm(blocks, generator=generator) for _ in range(shape.heads)])  # [heads, blocks]
    keys = torch.zeros(blocks, shape.block_size, shape.head_dim)
    at = torch.arange(blocks) % shape.block_size
    for head in range(shape.heads):
        parts = (torch.ones(blocks), (step[head] // 256) * 2.0**-15, (step[head] % 256) * 2.0**-23)
        for i, part in enumerate(parts):
            keys[torch.arange(blocks), at, 3 * head + i] = part
    q = torch.zeros(1, shape.heads, shape.head_dim)
    for head in range(shape.heads):
        q[0, head, 3 * head : 3 * head + 3] = 1.0
    return from_keys(keys, q, shape=shape, device=device, seed=seed)


def needle(shape: IndexerShape, blocks: int, position: int, device: torch.device | str = "cpu") -> Problem:
    """Keys all zero but for one token, at `position` of the context, that every head's query matches."""
    require("position", position, 0 <= position < blocks * shape.block_size, f"0 to {blocks * shape.block_size - 1}")
    keys = torch.zeros(blocks, shape.block_size, shape.head_dim)
    keys[position // shape.block_size, position % shape.block_size, 0] = 1.0
    q = torch.zeros(1, shape.heads, shape.head_dim)
    q[:, :, 0] = 1.0
    return from_keys(keys, q, shape=shape, device=device)


def negative_zero(
    shape: IndexerShape, blocks: int, minus: int, plus: int, device: torch.device | str = "cpu"
) -> Problem:
    """Block `minus` scores -0.0 and block `plus` +0.0, all others -1: they tie, the lower id wins.

    Queries are all ones and the keys of block `minus` all -0.0, so that its dots are -0.0 wherever sums start at -0.0.
    """
    keys = torch.zeros(blocks, shape.block_size, shape.head_dim)
    keys[:, :, 0] = -1.0
    keys[minus] = -0.0
    keys[plus] = 0.0
    return from_keys(keys, torch.ones(1, shape.heads, shape.head_dim), shape=shape, device=device)


def not_finite(shape: IndexerShape, blocks: int, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    """Moderate scores with, spread over them: blocks all NaN, blocks with one NaN token, +inf and -inf scores.

    Head h's special blocks are shifted by h, so heads choose differently.
    """
    require("blocks", blocks, blocks >= 16 + shape.heads, f"at least {16 + shape.heads}")
    generator = torch.Generator().manual_seed(_mix(seed, 4))
    scores = torch.randint(-16, 17, (shape.heads, blocks), generator=generator) / 8
    for head in range(shape.heads):
        for first, value in ((1, float("inf")), (4, float("-inf")), (7, float("nan"))):
            scores[head, first + head :: 11] = value
    problem = from_scores(scores, shape=shape, device=device, position=1)
    problem.cache[problem.block_table[0, ::5].to(torch.int64), 0, 0] = float("nan")  # one bad token, for every head
    return problem


def recycled_nan(
    shape: IndexerShape, blocks: int, tokens_in_last: int, device: torch.device | str = "cpu", seed: int = 0
) -> Problem:
    """Random exact keys; positions at and beyond the length, in the last visible block, hold NaN and infinities."""
    require("tokens_in_last", tokens_in_last, 1 <= tokens_in_last < shape.block_size, f"1 to {shape.block_size - 1}")
    generator = torch.Generator().manual_seed(_mix(seed, 5))
    keys = _exact((blocks, shape.block_size, shape.head_dim), generator).to(torch.float32)
    keys[-1, tokens_in_last:] = float("nan")
    keys[-1, tokens_in_last::2] = float("inf")
    q = _exact((1, shape.heads, shape.head_dim), generator)
    return from_keys(
        keys, q, shape=shape, device=device, tokens=(blocks - 1) * shape.block_size + tokens_in_last, seed=seed
    )

"""Seeded decode problems with garbage wherever nothing may read, and an oracle that shares no code with the package."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from m3cp.shapes import IndexerShape

GARBAGE_PAGES = (1 << 20, -7, 2**31 - 1, -(2**31))  # in the table, where no row may look
HUGE_LENGTH = 2**31 - 1  # stands before and behind `seq_lens`: a read past its ends is a length beyond any bound
POISON = 0x7F  # bytes of fresh memory: a huge score, a key above every other, a block id of two thousand million

_empty = torch.empty


def poison_fresh_memory(byte: int = POISON) -> None:
    """From now on `torch.empty` returns memory full of `byte`, so that nothing passes by luck.

    Code that is being traced stays as it is: a fill would become part of the graph, and compilers refuse one through a view.
    """

    def empty(*args, **kwargs):
        made = _empty(*args, **kwargs)
        if torch.compiler.is_compiling() or type(made) is not torch.Tensor:  # Dynamo's trace; what decompositions are traced with
            return made
        if made.numel() and made.is_contiguous() and made.device.type != "meta":
            made.view(-1).view(torch.uint8).fill_(byte)
        return made

    torch.empty = empty


@dataclass(frozen=True)
class Problem:
    """Arguments of one decode step; `q` has all heads."""

    shape: IndexerShape
    query_len: int
    max_context: int
    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.cache, self.block_table, self.seq_lens

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    def to(self, device) -> Problem:
        """The same problem elsewhere, strides and surrounding garbage included."""
        moved = {name: _move(getattr(self, name), device) for name in ("q", "cache", "block_table", "seq_lens")}
        return dataclasses.replace(self, **moved)

    def heads(self, owned: range) -> torch.Tensor:
        """Queries of some heads, as a rank is given them."""
        return self.q[:, owned.start : owned.stop].contiguous()

    def bounds(self, **changes) -> dict:
        """Constructor arguments that just fit this problem."""
        bounds = dict(
            max_requests=max(1, self.seq_lens.numel()), max_query_len=self.query_len, max_context=self.max_context,
            device=self.q.device, cache_dtype=self.cache.dtype,
        )  # fmt: skip
        return bounds | changes


def build(
    shape: IndexerShape = IndexerShape(),
    lengths=(700,),
    query_len: int = 1,
    *,
    kind: str = "exact",
    dtype: torch.dtype = torch.bfloat16,
    max_context: int | None = None,
    bad_pages: int = 0,
    page_slots: int = 2,
    seed: int = 0,
) -> Problem:
    """A problem on the CPU.

    Args:
        kind: "exact": multiples of 1/8 in [-2, 2], summable exactly in any order. "ties": few distinct scores, zeros of
            both signs. "special": exact, with infinities and NaN among the visible keys. "free": normal deviates.
            "infinite": most blocks score +inf. "late": the token that only a request's rows from the second on see wins.
            "codes": one-hot queries against every finite code of `dtype` (bf16's within 2**60), so that a dot is one product.
            "ulp": block scores a few units in the last place apart, so that another order of summation shows.
        max_context: the bound; the longest length when None.
        bad_pages: visible blocks (from every request's second on) whose table entry names no page.
        page_slots: pages of this many blocks' size, of which the cache is the first: the page stride.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = [int(n) for n in lengths]
    requests, tokens = len(lengths), len(lengths) * query_len
    max_context = max_context or max([*lengths, 1])
    width = shape.blocks(max_context)
    visible = [min(width, shape.blocks(n)) for n in lengths]
    q = _values(kind, (tokens, shape.heads, shape.head_dim), g, query=True).to(
        torch.float16 if dtype == torch.float16 else torch.bfloat16
    )
    pages = sum(visible) + 3
    order = torch.randperm(pages, generator=g)
    # Where nothing may look stand NaN and, so that masking NaN does not hide a missing mask, keys that would win.
    garbage = (
        torch.tensor([float("nan"), 200.0, -200.0]).repeat(43)[: shape.block_size, None].expand(-1, shape.head_dim)
    )
    buffer = garbage.repeat(pages, page_slots, 1, 1)
    table = (
        torch.tensor(GARBAGE_PAGES, dtype=torch.int64)
        .repeat(requests * (width + 1))[: requests * (width + 1)]
        .reshape(requests, width + 1)
    )
    size = (sum(visible), shape.block_size, shape.head_dim)
    keys = _codes(size, g, dtype) if kind == "codes" else _values(kind, size, g, query=False)
    if kind == "ulp":
        keys[:, :, :-1] = keys[:1, :1, :-1]  # every key is the same but for the lane that adds units in the last place
    used = 0
    for r, (n, blocks) in enumerate(zip(lengths, visible, strict=True)):
        mine = order[used : used + blocks]
        table[r, :blocks] = mine
        buffer[mine, 0] = keys[used : used + blocks]
        if blocks and n < blocks * shape.block_size:
            buffer[mine[-1], 0, n % shape.block_size :] = garbage[n % shape.block_size :]
        if kind == "late" and query_len > 1 and 1 < n - query_len + 1 < blocks * shape.block_size:
            late = n - query_len + 1
            buffer[mine[late // shape.block_size], 0, late % shape.block_size, : shape.head_dim // 2] = 2.0
        if blocks > 1 and bad_pages:
            at = 1 + torch.randperm(blocks - 1, generator=g)[:bad_pages]
            table[r, at] = torch.tensor([pages, -1, 2**31 - 1, pages + 7]).repeat(bad_pages)[: at.numel()]
        used += blocks
    around = torch.full((requests + 8,), HUGE_LENGTH, dtype=torch.int32)
    around[4 : 4 + requests] = torch.tensor(lengths, dtype=torch.int32)
    # The table is a slice of a wider one; lengths stand between lengths that would be errors.
    return Problem(
        shape,
        query_len,
        max_context,
        q,
        buffer.to(dtype)[:, 0],
        table.to(torch.int32)[:, :width],
        around[4 : 4 + requests],
    )


def far_apart(problem: Problem, which: slice = slice(None, None, 2)) -> Problem:
    """The problem where some (token, head) rows, by default every second, are no fp16 rows, whatever power of two they are multiplied by.

    Their first element is 2**60; keys are 0 there, so that every other element still decides.
    """
    q, cache = problem.q.clone(), problem.cache.clone()
    q.view(-1, problem.shape.head_dim)[which, 0] = 2.0**60
    cache.view(torch.uint8)[..., 0] = 0
    return dataclasses.replace(problem, q=q, cache=cache)


def oracle(problem: Problem, scores: np.ndarray | None = None) -> torch.Tensor:
    """The right choice, `[heads, tokens, topk]` int32, by fp64 dots and a sort in plain Python.

    Args:
        scores: `[tokens, heads, blocks]`: rank by these instead.
    """
    shape = problem.shape
    out = np.full((shape.heads, problem.tokens, shape.topk), -1, dtype=np.int32)
    own = fp64_scores(problem) if scores is None else scores
    for token, n in enumerate(rows(problem)):
        visible = -(-n // shape.block_size)
        for head in range(shape.heads):
            chosen = choose(own[token, head], visible, shape)
            out[head, token, : len(chosen)] = chosen
    return torch.from_numpy(out)


def choose(score, visible: int, shape: IndexerShape) -> list[int]:
    """Selection of one row, straight from the contract's words."""
    init = [b for b in range(visible) if b < shape.init_blocks]
    local = [b for b in range(visible) if b >= visible - shape.local_blocks and b >= shape.init_blocks]
    forced = init + local
    if visible <= shape.topk:
        return list(range(visible))
    rest = sorted(set(range(visible)) - set(forced), key=lambda b: (-float(score[b]), b))
    return sorted((forced + rest)[: shape.topk])


def rows(problem: Problem) -> list[int]:
    """Tokens that each row sees, 0 for rows that choose nothing."""
    seen = []
    for length in problem.seq_lens.tolist():
        for j in range(problem.query_len):
            n = length - problem.query_len + j + 1
            seen.append(n if 0 < n <= problem.max_context else 0)
    return seen


def fp64_scores(problem: Problem, margins: bool = False):
    """`[tokens, heads, blocks]` fp64 block scores; -inf where nothing counts. A NaN dot counts as -inf.

    With `margins`, also the sum of |q k| at the maximum, which bounds the rounding of an fp32 dot.
    """
    shape, block = problem.shape, problem.shape.block_size
    width = problem.block_table.shape[1]
    out = np.full((problem.tokens, shape.heads, width), -np.inf)
    margin = np.zeros_like(out)
    q, table = problem.q.double().numpy(), problem.block_table.numpy()
    for token, n in enumerate(rows(problem)):
        for b in range(-(-n // block)):
            page = table[token // problem.query_len, b]
            if not 0 <= page < problem.cache.shape[0]:
                continue
            k = problem.cache[page][: n - b * block].double().numpy()
            with np.errstate(invalid="ignore"):
                dots = k @ q[token].T  # [positions, heads]
                sizes = np.abs(k) @ np.abs(q[token].T)
            dots = np.where(np.isnan(dots), -np.inf, dots)
            out[token, :, b] = dots.max(0)
            margin[token, :, b] = sizes.max(0)
    return (out, margin) if margins else out


def assert_ids(got: torch.Tensor, expect: torch.Tensor, what: str = "") -> None:
    """Ids equal, with the first row that differs in the message; and rows are ascending, distinct, -1 padded."""
    got = got.cpu()
    assert got.dtype == torch.int32 and got.shape == expect.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, expected {tuple(expect.shape)}"
    )
    if not torch.equal(got, expect):
        bad = (got != expect).any(-1).nonzero()
        head, token = bad[0].tolist()
        raise AssertionError(
            f"{what}: {len(bad)} of {got.shape[0] * got.shape[1]} rows differ; head {head}, token {token}: "
            f"{got[head, token].tolist()}, expected {expect[head, token].tolist()}"
        )


def _values(kind: str, size, g: torch.Generator, query: bool) -> torch.Tensor:
    if kind in ("exact", "special"):
        values = torch.randint(-16, 17, size, generator=g) / 8
        if kind == "special" and not query:
            # About one key in sixty holds one value that is not finite, and every fifth block nothing but NaN.
            where = torch.rand(size, generator=g) < 1 / (60 * size[-1])
            odd = torch.tensor([float("inf"), float("-inf"), float("nan")])[torch.randint(0, 3, size, generator=g)]
            values = torch.where(where, odd, values)
            values[4::5] = float("nan")
        return values
    if kind == "ties":
        if query:
            lanes = torch.zeros(size)
            lanes[..., :2] = torch.tensor([1.0, 0.5])
            return lanes
        values = torch.tensor([-0.0, 0.0, 0.25])[torch.randint(0, 3, size, generator=g)]
        values[torch.rand(size[0], generator=g) < 0.7] = -0.0  # most blocks score zero, of either sign
        return torch.where(torch.rand(size[0], generator=g)[:, None, None] < 0.2, -values.abs() - 0.25, values)
    if kind == "infinite":
        values = torch.randint(-16, 17, size, generator=g) / 8
        values[..., 0] = 1.0 if query else 0.0
        if not query:
            values[:, 3, 0] = torch.where(torch.rand(size[0], generator=g) < 0.7, float("inf"), 0.0)
        return values
    if kind == "late":
        values = torch.randint(-16, 17, size, generator=g) / 8
        values[..., : size[-1] // 2] = 1.5 if query else 0.0
        return values
    if kind == "codes":
        powers = 2.0 ** torch.randint(-3, 4, size[:-1], generator=g) * (
            1 - 2 * torch.randint(0, 2, size[:-1], generator=g)
        )
        return (
            torch.nn.functional.one_hot(torch.randint(0, size[-1], size[:-1], generator=g), size[-1])
            * powers[..., None]
        )
    values = torch.randn(size, generator=g)
    if kind == "ulp":
        values[..., -1] = 2.0**-11 if query else torch.randint(0, 256, size[:-1], generator=g) * 2.0**-13
    elif kind != "free":
        raise ValueError(f"kind={kind!r}: must be exact, ties, special, infinite, late, codes, free or ulp")
    return values


def _codes(size, g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Random finite codes of a type as fp32; a code that is not finite becomes 0."""
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    info = torch.iinfo(bits)
    values = torch.randint(info.min, info.max + 1, size, generator=g).to(bits).view(dtype).float()
    keep = torch.isfinite(values) & (
        (values.abs() < 2.0**60) & (values.abs() > 2.0**-60) if dtype == torch.bfloat16 else True
    )
    return torch.where(keep, values, 0.0)


def _move(value: torch.Tensor, device) -> torch.Tensor:
    whole = value.new_empty(0).set_(
        value.untyped_storage(), 0, (value.untyped_storage().nbytes() // value.element_size(),)
    )
    return whole.to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def expected_pages(
    problem: Problem, ids: torch.Tensor, *, page_size: int, stride: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages, attended tokens) of a choice, block by block in plain Python."""
    shape = problem.shape
    r = shape.block_size // page_size
    pages = torch.full((*ids.shape[:2], shape.topk * r), -1, dtype=torch.int32)
    attended = torch.zeros(ids.shape[:2], dtype=torch.int32)
    for token, n in enumerate(rows(problem)):
        for head in range(ids.shape[0]):
            found = []
            for block in ids[head, token].tolist():
                entry = int(problem.block_table[token // problem.query_len, block]) if block >= 0 else -1
                if 0 <= entry < problem.cache.shape[0]:
                    tokens = min(shape.block_size, n - block * shape.block_size)
                    found += [entry * stride + j for j in range(r) if j * page_size < tokens]
                    attended[head, token] += tokens
            pages[head, token, : len(found)] = torch.tensor(found, dtype=torch.int32)
    return pages, attended


def assert_pages(
    problem: Problem, ids: torch.Tensor, *, page_size: int, stride: int | None = None, world: int = 1, form: str = "staged", paths=("tp", "cp"),
    device="cpu", **cp,
) -> None:  # fmt: skip
    """Ids of virtual ranks are `ids`, and each rank's pass writes the page table that they and the block table imply.

    Args:
        cp: what `select_virtual` is given for CP besides.
    """
    from m3cp.pagetable import PageTable
    from m3cp.shard import Shard
    from m3cp.testing import select_virtual

    shape, there = problem.shape, problem.to(device)
    pages, attended = expected_pages(problem, ids, page_size=page_size, stride=stride or shape.block_size // page_size)
    for path in paths:
        ranks = world if path == "cp" else min(world, shape.heads)  # replicas of a head do the same for TP
        shards = [Shard(r, ranks, shape.heads) for r in range(ranks)]
        given = dict(tokens=problem.tokens, page_size=page_size, stride=stride, device=there.q.device)
        tables = [PageTable.empty(shape, local_heads=s.local_heads, **given) for s in shards]
        got = select_virtual(
            *there.tensors, shape=shape, world=ranks, query_len=problem.query_len, path=path, form=form, max_context=problem.max_context, pages=tables,
            **(cp if path == "cp" else {}),
        )  # fmt: skip
        assert_ids(got, ids, f"{form} {path} of {ranks}")
        for shard, table in zip(shards, tables, strict=True):
            owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
            assert torch.equal(table.pages.cpu(), pages[owned]), (form, path, shard)
            assert torch.equal(table.attended.cpu(), attended[owned]), (form, path, shard)

"""A toy M3: few layers with random weights and the real structure, decoding under TP or CP on ranks of a group.

Each layer: norm; query, key and value projections with head norms and rotary; the indexer's queries and its one key;
both caches written by page; block selection; attention over the chosen blocks; the output projection summed over the
ranks; a gated MLP, sharded and summed likewise. What differs between TP and CP is who selects, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from m3cp.attention import sparse_attention
from m3cp.decode import CPDecode, TPDecode
from m3cp.indexer import WholeStep
from m3cp.prefill import Prefill
from m3cp.shapes import IndexerShape, require
from m3cp.shard import Shard


@dataclass(frozen=True)
class Size:
    """Of the toy; `shape` has the index heads, which are the KV heads. `max_context` in tokens."""

    shape: IndexerShape = IndexerShape(heads=4, head_dim=64, block_size=64, topk=2)
    layers: int = 2
    hidden: int = 128
    group: int = 2  # query heads a KV head
    inner: int = 128  # of the MLP
    vocabulary: int = 97
    max_context: int = 1024


@dataclass(frozen=True)
class Batch:
    """One step's tensors: `positions`, `page` and `slot` `[rows]` int64, where rows stand and are written.

    Args:
        table, lens, starts: of the requests, as `WholeStep` takes them; `counts` is the rest of its arguments.
        rows: table and lengths row by row: to attention each row is a request.
    """

    positions: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    page: torch.Tensor
    slot: torch.Tensor
    rows: tuple[torch.Tensor, torch.Tensor]
    counts: dict[str, int]


class ToyM3:
    """This rank's share of the model and its caches.

    Args:
        shard: index and KV heads of this rank; the world must not be larger than the heads.
        decode: a TPDecode or CPDecode of this rank.
        requests: that the caches hold.
        held_tokens: of each request that the caches hold; None: `size.max_context`.
        max_prefill: prefill rows a step.

    Raises:
        ValueError: more ranks than heads.
    """

    def __init__(
        self, size: Size, shard: Shard, decode: TPDecode | CPDecode, *, requests: int, held_tokens: int | None = None,
        max_prefill: int = 256, seed: int = 0,
    ):  # fmt: skip
        require("shard.world", shard.world, shard.world <= shard.heads, f"at most {shard.heads}: a toy shards its query heads like its KV heads")
        self.size, self.shard, device = size, shard, decode.device
        shape, dim = size.shape, size.shape.head_dim
        bounds = dict(max_context=size.max_context, device=device, cache_dtype=decode.cache_dtype)
        self.step = WholeStep(decode, Prefill(shape, shard, max_tokens=max_prefill, **bounds))
        self.select = self.step
        self.replicated = isinstance(decode, CPDecode) and decode.queries == "replicated"
        g = torch.Generator(device).manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=g, device=device) * shape[-2] ** -0.5).to(torch.bfloat16)

        owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
        inner = slice(shard.rank * size.inner // shard.world, (shard.rank + 1) * size.inner // shard.world)
        self.layers = []
        for _ in range(size.layers):
            # Whole weights are drawn on every rank, so that each rank's share is a share of the same model.
            q, k, v = (weight(shape.heads, size.hidden, n * dim)[owned] for n in (size.group, 1, 1))
            out = weight(shape.heads * size.group * dim, size.hidden).view(shape.heads, -1, size.hidden)[owned].flatten(0, 1)
            index_q, index_k = weight(shape.heads, size.hidden, dim), weight(size.hidden, dim)
            gate, up = (weight(size.hidden, size.inner)[:, inner] for _ in range(2))
            down = weight(size.inner, size.hidden)[inner]
            self.layers.append(dict(q=q, k=k, v=v, out=out, index_q=index_q, index_k=index_k, gate=gate, up=up, down=down))
        self.embedding = torch.randn(size.vocabulary, size.hidden, generator=g, device=device).to(torch.bfloat16)
        self.head = weight(size.hidden, size.vocabulary).float()
        blocks = shape.blocks(held_tokens or size.max_context)
        pages = requests * blocks
        self.table = torch.full((requests, shape.blocks(size.max_context)), -1, dtype=torch.int32, device=device)
        self.table[:, :blocks] = torch.randperm(pages, generator=g, device=device).to(torch.int32).view(requests, blocks)
        self.index_cache = torch.zeros(size.layers, pages, shape.block_size, dim, dtype=decode.cache_dtype, device=device)
        self.kv_cache = torch.zeros(size.layers, 2, pages, shape.block_size, shard.local_heads, dim, dtype=torch.bfloat16, device=device)
        angle = torch.arange(size.max_context)[:, None] * 10_000.0 ** (-torch.arange(dim // 2) / (dim // 2))
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)

    def __call__(self, tokens, positions, requests: list[int], **batch) -> torch.Tensor:
        """`forward` of a batch as `plan` takes it: `[rows, vocabulary]` fp32.

        Args:
            tokens: `[rows]` int64, decode rows first.
        """
        return self.forward(tokens, self.plan(positions, requests, **batch))

    def plan(self, positions, requests: list[int], *, decode_requests: int, query_len: int, chunks: list[int]) -> Batch:
        """What the host knows of one mixed step, on the device.

        Args:
            positions: `[rows]` int64, decode rows first.
            requests: which requests the step has, decode requests first.
            chunks: prefill rows of each request behind the decode requests.
        """
        device = self.table.device
        counts = torch.tensor([query_len] * decode_requests + chunks, device=device)
        row_request = torch.tensor(requests, device=device).repeat_interleave(counts)
        last = counts.cumsum(0) - 1
        block = self.size.shape.block_size
        return Batch(
            positions=positions, table=self.table[requests], lens=(positions[last] + 1).to(torch.int32),
            starts=torch.tensor([0, *chunks], device=device).cumsum(0).to(torch.int32),
            page=self.table[row_request, positions // block].long(), slot=positions % block,
            rows=(self.table[row_request], (positions + 1).to(torch.int32)), counts=dict(decode_requests=decode_requests, query_len=query_len),
        )  # fmt: skip

    def forward(self, tokens, batch: Batch) -> torch.Tensor:
        """Logits `[rows, vocabulary]` fp32 of one mixed step, with the caches written; without prefill rows it may be captured."""
        positions, page, slot = batch.positions, batch.page, batch.slot
        hidden = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            x = _norm(hidden)
            q, k, v = (torch.stack([x @ head for head in layer[name]], 1) for name in ("q", "k", "v"))
            q = q.unflatten(2, (self.size.group, -1)).flatten(1, 2)
            q, k = self._rotate(_norm(q), positions), self._rotate(_norm(k), positions)
            # Each head by its own product: a rank that projects all heads gets the bits of the ranks that own them.
            heads = range(self.shard.heads) if self.replicated else self.shard.owned_heads
            index_q = self._rotate(_norm(torch.stack([x @ layer["index_q"][h] for h in heads], 1)), positions)
            index_k = self._rotate(_norm(x @ layer["index_k"])[:, None], positions)[:, 0]
            self.index_cache[i, page, slot] = index_k.to(self.index_cache.dtype)
            self.kv_cache[i, 0, page, slot], self.kv_cache[i, 1, page, slot] = k, v
            ids = self.select(index_q, self.index_cache[i], batch.table, batch.lens, batch.starts, **batch.counts)
            found = sparse_attention(q, self.kv_cache[i, 0], self.kv_cache[i, 1], *batch.rows, ids)
            hidden = hidden + self._sum(found.flatten(1) @ layer["out"])
            x = _norm(hidden)
            hidden = hidden + self._sum((torch.nn.functional.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"])
        return _norm(hidden).float() @ self.head

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        total = part.float()
        if self.shard.world > 1:
            dist.all_reduce(total)
        return total.to(part.dtype)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

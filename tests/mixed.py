"""Mixed batches: decode requests (padding among them) before prefill chunks, with the right choice of every row."""

from __future__ import annotations

import dataclasses

import torch
from problems import Problem, assert_ids, build, oracle

from m3cp.decode import TPDecode
from m3cp.indexer import WholeStep
from m3cp.prefill import Prefill
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard


@dataclasses.dataclass(frozen=True)
class Mixed:
    """One batch. `problem` has the decode requests' and the prefill requests' tensors; `expect` the choice of all rows."""

    problem: Problem  # query_len is the decode part's; `q` has every row
    decode_requests: int
    starts: torch.Tensor
    expect: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        p = self.problem
        return p.q, p.cache, p.block_table, p.seq_lens, self.starts

    def to(self, device) -> Mixed:
        return dataclasses.replace(self, problem=self.problem.to(device), starts=self.starts.to(device))


def mixed(shape: IndexerShape, decode, chunks, *, query_len: int = 1, seed: int = 0, **options) -> Mixed:
    """A batch of decode requests of lengths `decode` and prefill chunks `(new tokens, length with them)`."""
    lengths = [*decode, *(length for _, length in chunks)]
    base = build(shape, lengths, seed=seed, **options)
    tokens = len(decode) * query_len + sum(new for new, _ in chunks)
    g = torch.Generator().manual_seed(seed + 1)
    q = (torch.randint(-16, 17, (tokens, shape.heads, shape.head_dim), generator=g) / 8).to(base.q.dtype)
    # The oracle takes each row as a request of its own, which sees just what that row may see.
    owner = [r for r in range(len(decode)) for _ in range(query_len)]
    owner += [len(decode) + r for r, (new, _) in enumerate(chunks) for _ in range(new)]
    sees = [n - query_len + j + 1 for n in decode for j in range(query_len)]
    sees += [length - new + j + 1 for new, length in chunks for j in range(new)]
    alone = dataclasses.replace(base, q=q, block_table=base.block_table[owner], seq_lens=torch.tensor(sees, dtype=torch.int32))
    starts = torch.tensor([0, *(new for new, _ in chunks)], dtype=torch.int32).cumsum(0).to(torch.int32)
    return Mixed(dataclasses.replace(base, q=q, query_len=query_len), len(decode), starts, oracle(alone))


M3 = IndexerShape(topk=3)
BATCHES = {
    "mixed": mixed(M3, [128 * 7, 0, 130, 0], [(17, 128 * 5 + 4), (1, 128 * 6), (51, 51)], query_len=2),
    "prefill alone": mixed(M3, [], [(20, 128 * 6 - 5), (9, 128 * 2)], seed=1),
    "decode alone": mixed(M3, [128 * 6, 128 * 4 + 3], [], query_len=4, seed=2),
    "a chunk over many blocks": mixed(IndexerShape(heads=1, topk=2, head_dim=64, block_size=64), [300], [(140, 210)], seed=3),
    "eight heads, forced on both sides": mixed(IndexerShape(heads=8, topk=4, init_blocks=1), [128 * 7], [(18, 128 * 7 - 9)], seed=4),
    "bad pages": mixed(M3, [128 * 6], [(12, 128 * 7), (5, 128 * 6)], seed=5, bad_pages=3),
    "NaN and infinities": mixed(IndexerShape(topk=3, local_blocks=0), [128 * 6], [(21, 128 * 8 + 7)], seed=6, kind="special"),
    "fp8": mixed(IndexerShape(topk=3, local_blocks=0), [128 * 6], [(21, 128 * 8 + 7)], seed=7, dtype=torch.float8_e4m3fn),
    "chunks longer than the bound": mixed(M3, [128 * 5], [(18, 128 * 6 + 7), (3, 128 * 5)], seed=8, max_context=128 * 6),
    "more tokens claimed than the length has": mixed(M3, [128 * 5], [(18, 12), (20, 0), (3, 128 * 5)], seed=9),
}  # fmt: skip


def step_of(batch: Mixed, shard: Shard, decode=None, *, scores_bytes: int = 1 << 28) -> WholeStep:
    """A whole step that just fits, around `decode` or a TP object."""
    bounds = batch.problem.bounds()
    decode = decode or TPDecode(batch.problem.shape, shard, **bounds)
    given = {k: bounds[k] for k in ("max_context", "device", "cache_dtype")}
    prefill = Prefill(batch.problem.shape, shard, max_tokens=max(1, batch.problem.tokens), scores_bytes=scores_bytes, **given)
    return WholeStep(decode, prefill)


def check_mixed(batch: Mixed, world: int, *, device="cpu", scores_bytes: int = 1 << 28) -> None:
    """Every rank's TP step chooses as the oracle, and rows around its output keep what they held."""
    there = batch.to(device)
    shape, heads = batch.problem.shape, batch.problem.shape.heads
    for rank in {0, world - 1}:
        shard = Shard(rank, world, heads)
        owned = slice(shard.owned_heads.start, shard.owned_heads.stop)
        step = step_of(there, shard, scores_bytes=scores_bytes)
        q = there.problem.q[:, owned]
        out = torch.full((shard.local_heads, q.shape[0], shape.topk), -9, dtype=torch.int32, device=device)
        got = step(q.contiguous(), *there.tensors[1:], decode_requests=batch.decode_requests, query_len=batch.problem.query_len, out=out)
        assert got.data_ptr() == out.data_ptr()
        assert_ids(got, batch.expect[owned], f"rank {rank} of {world}")

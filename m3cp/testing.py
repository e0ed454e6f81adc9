"""Shared checks, and virtual ranks: every rank's real kernels and the real merge in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from m3cp import reference
from m3cp.decode import WAIT_ERROR, CPDecode, CPLocal, TPDecode
from m3cp.exchange import SymmetricExchange
from m3cp.inputs import TORCH_DTYPES
from m3cp.pagetable import PageTable
from m3cp.shapes import IndexerShape, Point, require
from m3cp.shard import Shard


def select_virtual(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    shape: IndexerShape,
    world: int,
    query_len: int = 1,
    path: str = "cp",
    form: str = "staged",
    queries: str = "gathered",
    max_context: int | None = None,
    threshold_blocks: int | None = None,
    pages: Sequence[PageTable] | None = None,
) -> torch.Tensor:
    """The choice of all heads, `[heads, tokens, topk]` int32, by `world` ranks run in turn without a process group.

    On a GPU the compiled kernels run; on a CPU the interpreted ones when TRITON_INTERPRET=1 was set before import,
    else the eager backend.

    Args:
        q: `[tokens, heads, D]`, all heads; each rank gets its own, or the gathered layout, as `queries` says.
        path: "cp" or "tp".
        form: "staged" or "two_launch"; "one_launch" only where no rank awaits another: path "tp", or a world of one.
        queries: ranks of "two_launch" await each other's gathered queries inside a launch, so those of several are given
            all heads' whatever this says.
        max_context: tokens; what the table's width allows when None.
        threshold_blocks: with path "cp" in a form that is not staged: calls of at most so many blocks take TP's path.
        pages: a page table a rank, to write in the same pass.

    Raises:
        AssertionError: replicas of a head disagree, or a rank waited in vain.
        ValueError: naming the argument, what was given and what is allowed.
    """
    require("path", path, path in ("cp", "tp"), "'cp' or 'tp'")
    allowed = ("staged", "two_launch", *(("one_launch",) if path == "tp" or world == 1 else ()))
    require("form", form, form in allowed, f"one of {', '.join(allowed)} for path {path!r} and world={world}: ranks run in turn, none may wait for the next")
    require("threshold_blocks", threshold_blocks, threshold_blocks is None or (path == "cp" and form != "staged"), "None but for path 'cp' in a fused form")
    bounds = dict(
        max_requests=max(1, seq_lens.shape[0]), max_query_len=query_len, max_context=max_context or block_table.shape[1] * shape.block_size,
        device=q.device, cache_dtype=cache.dtype, form=form,
    )  # fmt: skip
    shards = [Shard(r, world, shape.heads) for r in range(world)]
    require("len(pages)", len(pages or shards), len(pages or shards) == world, f"{world}, a page table a rank")
    tables = list(pages or [None] * world)
    given, step = (cache, block_table, seq_lens), dict(query_len=query_len)
    if path == "tp":
        ranks = [TPDecode(shape, shard, **bounds) for shard in shards]
        per_rank = [
            rank(q[:, rank.shard.owned_heads.start : rank.shard.owned_heads.stop], *given, **step, pages=table)
            for rank, table in zip(ranks, tables, strict=True)
        ]
    elif form == "staged":
        ranks = [CPLocal(shape, shard, **bounds) for shard in shards]
        everyone = torch.stack([q[:, s.owned_heads.start : s.owned_heads.stop] for s in shards]) if queries == "gathered" else q
        gathered = torch.stack([_keys(rank, everyone, *given, query_len) for rank in ranks])
        per_rank = [rank._result(q.shape[0], None) for rank in ranks]
        for rank, ids, table in zip(ranks, per_rank, tables, strict=True):
            rank.peers(q.shape[0]).copy_(gathered)
            rank._merge(rank.peers(q.shape[0]), ids, rank._emission(table, *given, query_len) if q.shape[0] else None)
    else:
        transport = _OneProcess()
        cp = dict(exchange=transport, queries=queries if world == 1 else "replicated", threshold_blocks=threshold_blocks)
        ranks = [CPDecode(shape, shard, **cp, **bounds) for shard in shards]
        transport.connect()
        per_rank = [rank._result(q.shape[0], None) for rank in ranks]
        for phase in ranks[0]._fused.phases if q.shape[0] else ():
            for rank, ids, table in zip(ranks, per_rank, tables, strict=True):
                rank._fused.launch(phase, q, *given, query_len, ids, rank._emission(table, *given, query_len))
    late = [rank._state.tolist() for rank in ranks if int(rank._state[1]) == WAIT_ERROR]
    assert not late, f"virtual ranks waited in vain: (launch, kind, rank, at) = {late}"
    out = torch.full((shape.heads, q.shape[0], shape.topk), -2, dtype=torch.int32, device=q.device)
    for shard, ids in zip(shards, per_rank, strict=True):
        owned = out[shard.owned_heads.start : shard.owned_heads.stop]
        assert bool(((owned == -2) | (owned == ids)).all()), f"replicas of heads {shard.owned_heads} disagree at rank {shard.rank}"
        owned.copy_(ids)
    return out


def selection_overlap(ids: torch.Tensor, other: torch.Tensor) -> float:
    """Share of the chosen blocks of `ids` that `other` chose too; both `[heads, tokens, topk]`, -1 padded.

    Stands beside every fp8 speed-up: a cheaper cache also chooses other blocks. 1.0 where nothing was chosen.

    Raises:
        ValueError: different shapes.
    """
    if ids.shape != other.shape:
        raise ValueError(f"ids of shapes {tuple(ids.shape)} and {tuple(other.shape)}: must be equal")
    chosen = ids >= 0
    both = (ids[..., :, None] == other[..., None, :]).any(-1) & chosen
    return int(both.sum()) / int(chosen.sum()) if bool(chosen.any()) else 1.0


def overlap_bf16(point: Point, device: torch.device | str, requests: int = 4) -> float:
    """How far a Point's fp8 cache chooses bf16's blocks: `selection_overlap` of the two on the same free keys.

    The timed inputs can't tell: their values are exact in both. So queries and keys are drawn from a normal
    distribution, keys rounded once to bf16 and from there to fp8; both choices are the reference's.

    Args:
        point: an fp8 one; its longest context, batch and query_len are taken.
        requests: drawn at most; each is a context of its own.

    Raises:
        ValueError: a Point whose cache is not fp8.
    """
    require("point.dtype", point.dtype, point.dtype.startswith("fp8"), "one of the fp8 formats")
    shape, count = point.shape, min(point.batch, requests)
    blocks = shape.blocks(point.context_tokens)
    draw = torch.Generator(device=device).manual_seed(point.seed)
    given = dict(generator=draw, device=device, dtype=torch.float32)
    q = torch.randn(count * point.query_len, shape.heads, shape.head_dim, **given).bfloat16()
    wide = torch.empty(count * blocks, shape.block_size, shape.head_dim, dtype=torch.bfloat16, device=device)
    for part in wide.split(1024):
        part.copy_(torch.randn(part.shape, **given))
    table = torch.arange(count * blocks, dtype=torch.int32, device=device).view(count, blocks)
    lens = torch.full((count,), point.context_tokens, dtype=torch.int32, device=device)
    ids = [reference.select_blocks(q, cache, table, lens, shape=shape, query_len=point.query_len) for cache in (wide, wide.to(TORCH_DTYPES[point.dtype]))]
    return selection_overlap(*ids)


class _OneProcess(SymmetricExchange):
    """Every virtual rank's buffer in this process: `connect` tells each of all, once all were allocated."""

    def __init__(self):
        super().__init__()
        self._ranks: list[tuple[torch.Tensor, torch.Tensor]] = []

    def allocate(self, shard: Shard, device: torch.device, words: int):
        local = torch.zeros(words, dtype=torch.int64, device=device)
        peers = torch.zeros(shard.world, dtype=torch.int64, device=device)
        self._ranks.append((local, peers))
        return local, peers, []

    def connect(self) -> None:
        for _, peers in self._ranks:
            peers.copy_(torch.tensor([local.data_ptr() for local, _ in self._ranks]))


def _keys(rank: CPLocal, q, cache, block_table, seq_lens, query_len: int) -> torch.Tensor:
    keys = torch.empty(rank.shape.heads, seq_lens.shape[0] * query_len, rank.shape.topk, dtype=torch.int64, device=cache.device)
    if keys.numel():
        rank.local_keys(q, cache, block_table, seq_lens, query_len, keys)
    return keys

"""AITER's block selection for MiniMax-M3, called as its public signature says: NEVER RUN until somebody has gfx950.

`pa_sparse_block_score_decode` scores an fp8 index cache with fp8 queries, `pa_sparse_block_topk` keeps the best blocks
and writes their page table in the same launch (https://github.com/ROCm/aiter/blob/main/aiter/ops/msa_block_select.py;
callers: vLLM's models/minimax_m3/amd/indexer_msa.py). With `rank` and `world` the first scores one rank's blocks.

What is timed: TP (both launches); the scoring alone of one rank's shard with all heads; and CP between all ranks, scoring
and `pa_sparse_block_topk_cp`, which nominates, exchanges and merges in one launch. What the last one needs is stated by
its docstring there and by vLLM's models/minimax_m3/amd/indexer_cp.py: a candidate buffer of `topk_cp_candidate_numel`
int64 a rank, zeroed once and never again, whose addresses as mapped here are an int64 tensor on the host; `CP_MAX_BLOCKS`
int32 counters of the rank's own, zeroed once; `cand_rows`, the widest batch; the same sequence of calls on every rank, or it
waits for ever. vLLM maps uncached memory by HIP IPC; here it is torch's symmetric memory, whose grain the ping-pong says.

These figures are no rows: they stand in `aiter.json` and `aiter_cp.json`.
Queries are cast to fp8 outside the clock; test inputs are exact in it, so ids are compared with the reference's.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m3cp import sweep
from m3cp.shapes import IndexerShape, Point

MODULE = "aiter.ops.msa_block_select"
LABEL = "AITER kernels, our buffers, never run before this"
STRIP = 64  # blocks; a score row is a power of two of them
SHAPES = ((8192, 1), (8192, 32), (131072, 1), (131072, 32))  # context tokens, batch
CALLS = 16
STALL_S = 170.0  # AITER may build its module at the first call


def missing() -> str:
    """Why AITER's functions can't be called here, in words; "" when they can."""
    try:
        module = importlib.import_module(MODULE)
    except Exception as error:  # a library that is half there raises all kinds
        return f"import {MODULE}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    lacking = [name for name in ("pa_sparse_block_score_decode", "pa_sparse_block_topk") if not hasattr(module, name)]
    return f"{MODULE} has no {' or '.join(lacking)}" if lacking else ""


def missing_cp() -> str:
    """As `missing`, for CP between ranks."""
    why = missing()
    if why:
        return why
    module = importlib.import_module(MODULE)
    lacking = [name for name in ("pa_sparse_block_topk_cp", "topk_cp_candidate_numel", "CP_MAX_BLOCKS") if not hasattr(module, name)]
    if not _takes_a_shard(module):
        lacking.append("world of pa_sparse_block_score_decode")
    return f"{MODULE} has no {' or '.join(lacking)}: this release has no CP" if lacking else ""


def _takes_a_shard(module: Any) -> bool:
    return "world" in inspect.signature(module.pa_sparse_block_score_decode).parameters


def score_width(max_context: int, block_size: int) -> int:
    """Blocks that a score row must hold for AITER's top-k: whole strips, a power of two of them."""
    strips = -(-max_context // (block_size * STRIP))
    return STRIP << (strips - 1).bit_length()


def run(
    device: str, ranks: int, shapes: Sequence[tuple[int, int]] = SHAPES, module: str = "m3cp.aiter_arm", between: bool = False
) -> dict[str, Any]:
    """Start one worker that stands for one rank of `ranks`, and return {"node", "label", "arms"}: flat dicts.

    Args:
        between: start all ranks, for CP.

    Raises:
        sweep.WorkersFailed: wrong ids, or whatever AITER raised.
    """
    facts, found = sweep.job_facts(device), {}

    def look(scratch: Path) -> None:
        if not found and (scratch / "result.json").exists():
            found.update(json.loads((scratch / "result.json").read_text()))

    job = {**facts, "ranks": ranks, "shapes": [list(s) for s in shapes], "between": between}
    sweep.launch(module, job, ranks if between else 1, follow=look, stall_s=STALL_S)
    if not found:
        raise sweep.WorkersFailed("the rank ended without a result")
    return {"node": facts["node"], "label": LABEL, **found}


def body(place, job: dict[str, Any]) -> None:
    """What a worker does: each shape as TP and as one rank's shard, or as CP between the ranks; rank 0 leaves the result."""
    points = [
        Point(context, batch, world=job["ranks"], dtype="fp8_e4m3fn", arm="tp", form="staged", max_context=context) for context, batch in job["shapes"]
    ]
    arms = []
    candidates = Candidates(place, points) if job["between"] else None
    for point in points:
        arms += [between(place, point, candidates)] if candidates else measure(place, point)
        place.peers.beat()
    if place.peers.rank:
        return
    path = Path(job["scratch"]) / "result.json"
    path.with_suffix(".new").write_text(json.dumps({"arms": arms}))
    path.with_suffix(".new").rename(path)


class Candidates:
    """What CP exchanges through, one for all shapes: `mine`, `addresses` of all ranks' buffers, `counters`, `rows`."""

    def __init__(self, place, points: Sequence[Point]):
        import torch

        from m3cp.exchange import SymmetricExchange
        from m3cp.shard import Shard

        aiter, shape, world = importlib.import_module(MODULE), points[0].shape, points[0].world
        self.shard, self.rows = Shard(place.peers.rank, world, shape.heads), max(p.batch * p.query_len for p in points)
        words = aiter.topk_cp_candidate_numel(world, self.shard.local_heads, self.rows, shape.topk)
        self._exchange = SymmetricExchange()
        allocated = place.peers.together(lambda: self._exchange.allocate(self.shard, place.device, words))
        self.mine, addresses, self._mapped = allocated
        self.addresses = addresses.cpu()
        self.counters = torch.zeros(aiter.CP_MAX_BLOCKS, dtype=torch.int32, device=place.device)


def between(place, point: Point, candidates: Candidates) -> dict[str, Any]:
    """Check and time AITER's CP of a Point, warm, queries replicated: "aiter_cp", the slowest rank's microseconds.

    Raises:
        worker.Failed: ids that differ from the reference's, on all ranks.
    """
    import torch

    from m3cp import engine_kernels, inputs, reference, timing

    aiter, shape, shard = importlib.import_module(MODULE), point.shape, candidates.shard
    problem = inputs.build(point, place.device)
    tokens, peers = problem.q.shape[0], place.peers
    every = problem.q.to(torch.float8_e4m3fn)
    width = score_width(-(-point.max_context // point.world), shape.block_size)
    score = torch.full((shape.heads, tokens, width), float("-inf"), device=place.device)
    ids = torch.full((shard.local_heads, tokens, shape.topk), -2, dtype=torch.int32, device=place.device)
    table = torch.empty(tokens * shard.local_heads, shape.topk * 8, dtype=torch.int32, device=place.device)
    attended = torch.empty(tokens * shard.local_heads, dtype=torch.int32, device=place.device)
    common = dict(
        init_blocks=shape.init_blocks, local_blocks=shape.local_blocks, query_len=point.query_len, max_seq_len=point.max_context,
        rank=shard.rank, world=shard.world,
    )  # fmt: skip

    def cp() -> None:
        aiter.pa_sparse_block_score_decode(every, problem.cache, score, problem.block_table, problem.seq_lens, **common)
        aiter.pa_sparse_block_topk_cp(
            score, candidates.addresses, candidates.counters, ids, problem.seq_lens, problem.block_table, table, attended,
            block_size=shape.block_size, cand_rows=candidates.rows, num_kv_heads=shard.local_heads, pages_per_block=8, **common,
        )  # fmt: skip

    given = (problem.q, problem.cache, problem.block_table, problem.seq_lens)
    owned = shard.owned_heads
    expected = reference.select_blocks(*given, shape=shape, query_len=point.query_len)[owned.start : owned.stop]

    def right() -> tuple[int, int]:
        fine, tied = engine_kernels.same_up_to_ties(ids, expected, *given, shape=shape, query_len=point.query_len, heads=owned)
        if not bool(fine.all()):
            raise ValueError(f"aiter_cp {point.label}: {int((~fine).sum())} of {fine.numel()} rows differ from the reference")
        ids.fill_(-2)
        return fine.numel(), int(tied.sum())

    peers.together(cp)
    peers.together(right)
    timed = peers.together(lambda: _timed(place, cp, timing, align=place.align))
    counts = peers.exchange(peers.together(right))  # of what the timed calls chose
    samples = timing.slowest(peers.exchange(timed["samples_us"]))
    return {
        "arm": "aiter_cp", "context_tokens": point.context_tokens, "batch": point.batch, "world": point.world, "label": LABEL, "cache": "warm",
        "rows": sum(rows for rows, _ in counts), "ties": sum(ties for _, ties in counts), "us": timing.median(samples), "samples_us": samples,
        "memory": candidates._exchange.memory_type,
    }  # fmt: skip


def measure(place, point: Point) -> list[dict[str, Any]]:
    """Check and time AITER on a Point's inputs, warm: "aiter_tp" and, where it takes a shard, "aiter_cp_score".

    Raises:
        ValueError: ids or scores that differ from the reference's.
    """
    import torch

    from m3cp import engine_kernels, inputs, reference, timing
    from m3cp.shard import Shard

    aiter = importlib.import_module(MODULE)
    shape: IndexerShape = point.shape
    problem = inputs.build(point, place.device)
    shard = Shard(0, point.world, shape.heads)
    owned, tokens = shard.owned_heads, problem.q.shape[0]
    width = score_width(point.max_context, shape.block_size)
    given = (problem.q, problem.cache, problem.block_table, problem.seq_lens)
    forced = dict(init_blocks=shape.init_blocks, local_blocks=shape.local_blocks)
    bound = dict(query_len=point.query_len, max_seq_len=point.max_context)

    def scores(heads: int, blocks: int):
        return torch.full((heads, tokens, blocks), float("-inf"), device=place.device)

    local = problem.local_q(shard).to(torch.float8_e4m3fn)
    score, ids = scores(shard.local_heads, width), torch.empty(shard.local_heads, tokens, shape.topk, dtype=torch.int32, device=place.device)
    table = torch.empty(tokens * shard.local_heads, shape.topk * 8, dtype=torch.int32, device=place.device)
    attended = torch.empty(tokens * shard.local_heads, dtype=torch.int32, device=place.device)

    def tp() -> None:
        aiter.pa_sparse_block_score_decode(local, problem.cache, score, problem.block_table, problem.seq_lens, **forced, **bound)
        aiter.pa_sparse_block_topk(
            score, ids, problem.block_table, problem.seq_lens, block_size=shape.block_size, sparse_bt=table, sparse_ctx=attended,
            num_kv_heads=shard.local_heads, pages_per_block=8, **bound,
        )  # fmt: skip

    tp()
    expected = reference.select_blocks(*given, shape=shape, query_len=point.query_len)[owned.start : owned.stop]
    right, tied = engine_kernels.same_up_to_ties(ids, expected, *given, shape=shape, query_len=point.query_len, heads=owned)
    if not bool(right.all()):
        raise ValueError(f"aiter_tp {point.label}: {int((~right).sum())} of {right.numel()} rows differ from the reference")
    common = {"context_tokens": point.context_tokens, "batch": point.batch, "world": point.world, "label": LABEL, "cache": "warm"}
    found = [{"arm": "aiter_tp", **common, "rows": right.numel(), "ties": int(tied.sum()), **_timed(place, tp, timing)}]
    if _takes_a_shard(aiter) and point.world > 1:
        every = problem.q.to(torch.float8_e4m3fn)
        part = scores(shape.heads, score_width(-(-point.max_context // point.world), shape.block_size))

        def cp_score() -> None:
            shared = dict(rank=0, world=point.world)
            aiter.pa_sparse_block_score_decode(every, problem.cache, part, problem.block_table, problem.seq_lens, **forced, **bound, **shared)

        cp_score()
        mine = reference.score(*given, shape=shape, shard=Shard(0, point.world, shape.heads), query_len=point.query_len, max_context=point.max_context)
        mine = mine.transpose(0, 1)  # [heads, tokens, rank 0's blocks]; forced blocks and what nobody sees stay -inf there
        if not torch.equal(part[:, :, : mine.shape[2]][mine.isfinite()], mine[mine.isfinite()]):
            raise ValueError(f"aiter_cp_score {point.label}: scores of rank 0's blocks differ from the reference's")
        found.append({"arm": "aiter_cp_score", **common, "rows": int(mine.isfinite().sum()), "ties": 0, **_timed(place, cp_score, timing)})
    return found


def _timed(place, call, timing, align=lambda: None) -> dict[str, Any]:
    """Microseconds a call on this rank: in a graph on a GPU, the same cache again and again; as many calls on each rank."""
    if not place.on_gpu:
        samples = timing.measure({"aiter": timing.timed_calls([call], align=align)}, 3)["aiter"]
    else:
        graph = timing.capture([call] * CALLS)
        graph.replay()
        replays = timing.timed_replays(
            graph.replay, calls=CALLS, replays=50, align=align, hold=place.hold, timer=timing.DeviceTimer()
        )
        samples = timing.measure({"aiter": replays}, 7)["aiter"]
        graph.reset()
    return {"us": timing.median(samples), "samples_us": samples}


if __name__ == "__main__":
    from m3cp import worker

    worker.run(json.loads(Path(sys.argv[1]).read_text()), body)

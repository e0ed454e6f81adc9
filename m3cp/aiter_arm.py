"""AITER's block selection for MiniMax-M3, called as its public signature says: NEVER RUN until somebody has gfx950.

`pa_sparse_block_score_decode` scores an fp8 index cache with fp8 queries, `pa_sparse_block_topk` keeps the best blocks
and writes their page table in the same launch (https://github.com/ROCm/aiter/blob/main/aiter/ops/msa_block_select.py;
callers: vLLM's models/minimax_m3/amd/indexer_msa.py). With `rank` and `world` the first scores one rank's blocks.

What is timed: TP (both launches), and the scoring alone of one rank's shard with all heads, AITER's part of CP. Left out
by name: its CP selector `pa_sparse_block_topk_cp`, which exchanges through buffers that AITER's callers map by HIP IPC
and through a counter whose layout the signature does not state. These figures are no rows: they stand in `aiter.json`.
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


def missing() -> str:
    """Why AITER's functions can't be called here, in words; "" when they can."""
    try:
        module = importlib.import_module(MODULE)
    except Exception as error:  # a library that is half there raises all kinds
        return f"import {MODULE}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    lacking = [name for name in ("pa_sparse_block_score_decode", "pa_sparse_block_topk") if not hasattr(module, name)]
    return f"{MODULE} has no {' or '.join(lacking)}" if lacking else ""


def score_width(max_context: int, block_size: int) -> int:
    """Blocks that a score row must hold for AITER's top-k: whole strips, a power of two of them."""
    strips = -(-max_context // (block_size * STRIP))
    return STRIP << (strips - 1).bit_length()


def run(device: str, ranks: int, shapes: Sequence[tuple[int, int]] = SHAPES, module: str = "m3cp.aiter_arm") -> dict[str, Any]:
    """Start one worker that stands for one rank of `ranks`, and return {"node", "label", "arms"}: flat dicts.

    Raises:
        sweep.WorkersFailed: wrong ids, or whatever AITER raised.
    """
    facts, found = sweep.job_facts(device), {}

    def look(scratch: Path) -> None:
        if not found and (scratch / "result.json").exists():
            found.update(json.loads((scratch / "result.json").read_text()))

    sweep.launch(module, {**facts, "ranks": ranks, "shapes": [list(s) for s in shapes]}, 1, follow=look, stall_s=150.0)
    if not found:
        raise sweep.WorkersFailed("the rank ended without a result")
    return {"node": facts["node"], "label": LABEL, **found}


def body(place, job: dict[str, Any]) -> None:
    """What the worker does: each shape as TP and as one rank's shard."""
    arms = []
    for context, batch in job["shapes"]:
        point = Point(context, batch, world=job["ranks"], dtype="fp8_e4m3fn", arm="tp", form="staged", max_context=context)
        arms += measure(place, point)
        place.peers.beat()
    path = Path(job["scratch"]) / "result.json"
    path.with_suffix(".new").write_text(json.dumps({"arms": arms}))
    path.with_suffix(".new").rename(path)


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
    if "world" in inspect.signature(aiter.pa_sparse_block_score_decode).parameters and point.world > 1:
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


def _timed(place, call, timing) -> dict[str, Any]:
    """Microseconds a call on this rank: in a graph on a GPU, the same cache again and again."""
    if not place.on_gpu:
        samples = place.samples_us(call, 3)
    else:
        graph = timing.capture([call] * CALLS)
        graph.replay()
        replays = timing.timed_replays(
            graph.replay, calls=CALLS, replays=50, align=lambda: None, hold=place.hold, timer=timing.DeviceTimer()
        )
        samples = timing.measure({"aiter": replays}, 7)["aiter"]
        graph.reset()
    return {"us": timing.median(samples), "samples_us": samples}


if __name__ == "__main__":
    from m3cp import worker

    worker.run(json.loads(Path(sys.argv[1]).read_text()), body)

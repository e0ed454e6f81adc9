"""What a decode call's cost is made of: what a call asks of one rank, and the amounts that a cost model's terms multiply.

Pure Python. `fit` finds what each amount costs from rows, `policy` adds the same amounts up for a decode batch: one
definition, so that both are the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

OURS = ("tp", "cp", "cp_local")  # arms whose GPU kernels' steps are known; an engine's and a CPU's are not
CHUNK_BLOCKS = 256  # blocks that a program of the staged form or of the second launch chooses from at once
# Programs that score in a compute unit of an H200, and blocks that each holds before it must finish one to take the next. Calls get
# dearer where programs take a third (LOG.md, 2026-11-30).
PROGRAMS_PER_UNIT, BLOCKS_HELD = 4, 2
# vLLM's launch geometry. TP: programs that its scoring aims at, pieces of a request at most (TARGET_GRID, MAX_NUM_KV_CHUNKS). CP:
# blocks a program (DECODE_SCORE_MIN_BLOCKS as a power of two; more beyond 49,152 blocks of batch times bound), and programs that a
# compute unit holds: its calls jump where programs must wait for others to end, between 1,536 and 2,048 blocks (LOG.md, 2026-11-30).
VLLM_TP_GRID, VLLM_TP_PIECES, VLLM_CP_BLOCKS, VLLM_CP_PROGRAMS = 4096, 256, 4, 3


class Load(NamedTuple):
    """What a call asks of its busiest rank.

    Args:
        blocks, mb: key blocks and megabytes (1e6 bytes) read, pages of a shared prefix once.
        longest: blocks that the rank reads of the longest request.
        held: blocks of the longest request that the rank holds, forced ones included.
        visible: blocks of the longest request on all ranks.
        short: blocks that the other requests lack to the longest, on the rank.
        rows: query rows, padding included.
        heads: heads that the rank scores.
        exchanges: 1 where ranks exchange something, else 0.
        peers: ranks beyond the second that it exchanges with.
        sent_kib: KiB sent to all peers together.
    """

    blocks: float
    mb: float
    longest: float
    held: float
    visible: int
    short: float
    rows: int
    heads: int
    exchanges: float = 0.0
    peers: int = 0
    sent_kib: float = 0.0


class Kernels(NamedTuple):
    """What of the kernels and the machine shapes the amounts.

    Args:
        choice: how rows are chosen: "chunks" (staged: a program walks the row's local blocks), "levels" (one launch: the
            code grows with the row's length), "passes" (two launches: a program walks all of the row's blocks), or
            "unknown" (engines, CPUs).
        wave_blocks: blocks that the programs of the grid score at once; 0 where unknown.
        ramp_mb: megabytes at which half of the ramp has been paid.
        llc_mb: megabytes that the last-level cache serves; 0 where rows are cold.
        units: compute units of the GPU; 0 where unknown.
        grid: programs that an engine's scoring aims at, times the query length: over the rows, pieces of a request; 0 where unknown.
    """

    choice: str = "unknown"
    wave_blocks: int = 0
    ramp_mb: float = 10.0
    llc_mb: float = 0.0
    units: int = 0
    grid: int = 0


def choice(arm: str, form: str | None, units: int) -> str:
    """`Kernels.choice` of an arm and form on a GPU of `units` compute units; 0 units is no GPU."""
    if arm not in OURS or not units:
        return "unknown"
    return {"staged": "chunks", "one_launch": "levels", "two_launch": "passes"}[form]


class Term(NamedTuple):
    """One term: its unit, what it stands for, the amount it multiplies, and whether it can be part of an arm's cost."""

    unit: str
    meaning: str
    amount: Callable[[Load, Kernels], float]
    applies: Callable[[str, Kernels], bool] = lambda arm, k: True


def _steps(load: Load, k: Kernels) -> float:
    # A step sorts its 256 lanes however many hold a block: a half-full one costs as much as a full one.
    return float(max(0, math.ceil((load.held if k.choice == "chunks" else load.visible) / CHUNK_BLOCKS) - 1))


def _refill(load: Load, k: Kernels) -> float:
    if k.choice == "unknown":  # vLLM's CP
        return float(load.blocks > VLLM_CP_PROGRAMS * VLLM_CP_BLOCKS * k.units)
    return min(1.0, max(0.0, load.blocks / (PROGRAMS_PER_UNIT * k.units) - BLOCKS_HELD))


def _depth(load: Load, k: Kernels) -> float:
    if not k.grid:
        return math.log2(1.0 + load.longest)
    pieces = max(1, min(VLLM_TP_PIECES, k.grid // max(1, load.rows)))
    return math.log2(max(1, math.ceil(load.visible / 2 ** (pieces.bit_length() - 1))))


def _wave(load: Load, k: Kernels) -> float:
    waves = load.blocks / k.wave_blocks
    return math.ceil(waves) - waves


def _over(blocks: int) -> Term:
    return Term(
        "us", f"selection: a row of more than {blocks} blocks", lambda load, k: float(load.visible > blocks),
        lambda arm, k: k.choice == "levels",
    )  # fmt: skip


def _exchanging(arm: str, k: Kernels) -> bool:
    return arm.endswith("cp")


# In the order of precedence: what the data can't tell from earlier terms is part of their cost.
TERMS: dict[str, Term] = {
    "launch": Term("us", "fixed cost of a call", lambda load, k: 1.0),
    "bytes": Term("us/MB", "reading keys, at the fastest level that serves them", lambda load, k: load.mb),
    "beyond": Term(
        "us/MB", "extra for keys that the last-level cache does not hold", lambda load, k: max(0.0, load.mb - k.llc_mb),
        lambda arm, k: k.llc_mb > 0,
    ),
    "depth": Term(
        "us per doubling", "per doubling of the longest row's blocks that one program walks; of all on a rank where that is not known", _depth,
        lambda arm, k: k.choice == "unknown" and not (k.units and arm == "vllm_cp"),
    ),
    "unfilled": Term(
        "us", "reading keys: the share of compute units without a program", lambda load, k: max(0.0, 1.0 - load.blocks / (VLLM_CP_BLOCKS * k.units)),
        lambda arm, k: k.units > 0 and arm == "vllm_cp",
    ),
    "steps": Term(
        "us per step", "selection: steps one after another beyond the first 256 blocks of the longest row", _steps,
        lambda arm, k: k.choice in ("chunks", "passes"),
    ),
    "over256": _over(256),
    "refill": Term(
        "us", "reading keys: the share of programs that take more blocks than they hold at once", _refill,
        lambda arm, k: k.units > 0 and (arm in OURS or arm == "vllm_cp"),
    ),
    "ramp": Term(
        "us", "what small reads lose before bandwidth is reached", lambda load, k: load.mb / (load.mb + k.ramp_mb),
        lambda arm, k: not (k.units and arm == "vllm_cp"),  # "unfilled" says it
    ),
    "exchange": Term("us", "the exchange between ranks, fixed part", lambda load, k: load.exchanges, _exchanging),
    "peers": Term("us/peer", "the exchange, per peer beyond the first", lambda load, k: load.peers, _exchanging),
    "payload": Term(
        "us per doubling", "the exchange, per doubling of the KiB sent", lambda load, k: math.log2(1.0 + load.sent_kib), _exchanging
    ),
    "over64": _over(64),
    "wave": Term("us per wave", "programs that idle in the last wave of blocks", _wave, lambda arm, k: k.wave_blocks > 0),
    "rows": Term("us/row", "per query row", lambda load, k: load.rows),
    "row_heads": Term("us per row and head", "per query row and head scored", lambda load, k: load.rows * load.heads),
    "imbalance": Term("us per 1000 blocks", "blocks that the longest row has and the others have not", lambda load, k: load.short / 1000.0),
    "bend": Term(
        "us MB", "the ramp's size, chosen and not fitted: its share in the uncertainty", lambda load, k: load.mb / (load.mb + k.ramp_mb) ** 2,
        lambda arm, k: False,
    ),
}  # fmt: skip

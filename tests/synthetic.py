"""Synthetic rows with a known truth, for tests of the analysis. The truth is written out here, not taken from fit.py.

Figures are plausible for two H200 (microseconds), and the node's name says that they are synthetic.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from m3cp import records, traffic
from m3cp.shapes import Point

TP = {"launch": 4.0, "us_per_mb": 0.225, "depth": 0.15, "ramp": 3.5, "rows": 0.01}
CP = {"launch": 5.6, "us_per_mb": 0.225, "depth": 0.15, "ramp": 3.5, "rows": 0.02}
# Two machines whose kernels' steps are known: the staged form over a collective, and the one-launch form.
GPUS = [{"name": "synthetic", "units": 132}] * 2
PROVENANCE = {"code_hash": "synthetic000", "commit": "synthetic", "gpus": GPUS}
STAGED_TP = {"launch": 6.0, "us_per_mb": 0.22, "steps": 2.3, "ramp": 3.0, "ramp_mb": 5.0, "wave": 0.8, "refill": 0.9, "rows": 0.01}
STAGED_CP = {**STAGED_TP, "launch": 19.5, "payload": 0.7}
FUSED_TP = {"launch": 4.2, "us_per_mb": 0.22, "over256": 2.0, "ramp": 3.5, "ramp_mb": 10.0, "over64": 0.3, "wave": 0.7, "refill": 0.6, "rows": 0.01}
FUSED_CP = {**FUSED_TP, "launch": 5.5}
CONTEXTS = (1024, 8192, 32768, 131072, 524288)
BATCHES = (1, 8, 32, 64)


def spans(point: Point) -> list[tuple[int, int]]:
    """Blocks [first, last) that each request of a Point reads."""
    return [traffic.read_range(point, n) for n in traffic.context_lengths(point)]


def truth_us(point: Point, truth: dict[str, float]) -> float:
    """Microseconds that the planted machine needs for a Point (uniform, no shared prefix)."""
    ranks = point.world if point.arm in ("cp", "cp_local") else 1
    megabytes = traffic.distinct_bytes_read(point) / 1e6
    longest = (
        max(last - first for first, last in (traffic.read_range(point, n) for n in traffic.context_lengths(point)))
        / ranks
    )
    rows = (point.batch + point.rows_padded) * point.query_len
    us = truth["launch"] + truth["us_per_mb"] * megabytes + truth.get("rows", 0.0) * rows
    us += truth.get("depth", 0.0) * math.log2(1 + longest)
    us += truth.get("ramp", 0.0) * megabytes / (megabytes + truth.get("ramp_mb", 10.0))
    if point.arm == "cp" and point.world > 1:
        us += truth.get("exchange", 0.0)
    if "wave" in truth:
        visible = -(-point.context_tokens // 128)
        tiles, chunks = megabytes * 1e6 / 32_768 / 396, visible / ranks / 256
        walked = max(0, math.ceil(chunks) - 1)
        us += truth.get("steps", 0.0) * walked + truth.get("over64", 0.0) * (visible > 64) + truth.get("over256", 0.0) * (visible > 256)
        us += truth["wave"] * (math.ceil(tiles) - tiles) + truth["refill"] * min(1.0, max(0.0, tiles * 396 / 528 - 2))
        if point.arm == "cp":  # a row's four heads of 16 eight-byte candidates, and two gathered queries of 128 x 2 bytes
            us += truth.get("payload", 0.0) * math.log2(1 + rows * (4 * 16 * 8 + 2 * 256) / 1024)
    return us


def row(
    point: Point,
    us: float,
    rng: np.random.Generator,
    noise: float = 0.0,
    rounds: int = 7,
    jitter: float = 0.004,
    **changes,
) -> records.Row:
    """An ok row whose median is about `us`: `noise` moves the whole row, `jitter` each round (relative)."""
    level = us * (1 + noise * rng.standard_normal())
    samples = [float(level * (1 + jitter * v)) for v in rng.standard_normal(rounds)]
    read = traffic.distinct_bytes_read(point)
    ranks = point.world
    stages = {"tp": ["score", "select"], "cp": ["gather_queries", "score", "candidates", "gather_keys", "merge"]}
    values = {
        "path": point.arm if point.arm in ("tp", "cp") else point.arm, "node": "synthetic 2x H200", "ranks": ranks,
        "timed_region": stages.get(point.arm, ["score"]), "samples_us": samples, "rank_samples_us": [samples] * ranks, "calls_per_replay": 8,
        "replays_per_round": 50, "caches": 64, "cache_state": "cold", "footprint_over_l2": 4.0, "footprint_over_llc": 4.0,
        "bytes_read": traffic.bytes_read(point), "distinct_bytes_read": read, "bytes_exchanged": traffic.bytes_exchanged(point),
        "limit_us": read / 4.56e6, "page_read_us": 3.0 + read / 4.56e6, "check": {"passed": True, "rows": point.batch, "mismatches": 0, "against": "reference"},
        "provenance": {"code_hash": "synthetic000", "commit": "synthetic"},
    }  # fmt: skip
    return records.Row(point=point, status="ok", **{**values, **changes})


def rows(
    tp: dict[str, float] = TP, cp: dict[str, float] = CP, contexts=CONTEXTS, batches=BATCHES, world: int = 2, noise: float = 0.0,
    seed: int = 0, mix: str = "uniform", jitter: float = 0.004, form: str = "staged", **changes,
) -> list[records.Row]:  # fmt: skip
    """Rows of arms tp and cp over a grid."""
    rng = np.random.default_rng(seed)
    found = []
    for context in contexts:
        for batch in batches:
            base = Point(context, batch, mix=mix, world=world, max_context=2**20, form=form)
            exchange = "collective" if form == "staged" else "symmetric"
            for point, truth in (
                (base, tp),
                (dataclasses.replace(base, arm="cp", exchange=exchange, queries="gathered"), cp),
            ):
                found.append(row(point, truth_us(point, truth), rng, noise, jitter=jitter, **changes))
    return found

"""Rows to knowledge: comparable groups, cost models with intervals, CP against TP, and the break-even line.

A cost model is linear in parameters that mean something (microseconds a launch, microseconds a megabyte, ...), is
fitted with relative weights and parameters that can't be negative, and says which of them the data can't tell
apart. The two-term fit, a fixed cost plus bytes over bandwidth, is the same machinery with two terms. Neither torch
nor triton is imported here; pandas and scipy are imported where they are used.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from m3cp import records, traffic
from m3cp.shapes import IndexerShape, Point, require
from m3cp.shard import Shard

ROOT = records.PACKAGE.parent
MIB = 2**20

# What the timed region may hold without being another experiment; anything else ("attention", a projection, a
# surrounding layer) moves the boundary, and rows with different boundaries never meet in a fit or a plot.
OUTSIDE = ("attention", "projection", "layer", "weights")

# Rows that differ in any of these are different experiments: they never meet in one fit.
LABEL = (
    "arm", "form", "exchange", "queries", "threshold_blocks", "world", "dtype", "query_len", "shape", "mix",
    "cache_state", "launch", "node", "code_hash", "region",
)  # fmt: skip
# What a CP row and its TP baseline share. Worlds are equal: each rank of TP reads the whole cache.
PAIRED = (
    "context_tokens", "batch", "mix", "shared_prefix_tokens", "rows_padded", "world", "dtype", "query_len", "shape",
    "max_context", "cache", "launch", "node", "code_hash", "source",
)  # fmt: skip
VARIANT = ("arm", "form", "exchange", "queries", "threshold_blocks")
BASELINE = {"cp": "tp", "vllm_cp": "vllm_tp", "sglang_cp": "sglang_tp"}

TWO_TERMS = ("launch", "bytes")
ALL_TERMS = (
    "launch",
    "bytes",
    "beyond",
    "depth",
    "ramp",
    "rows",
    "row_heads",
    "imbalance",
    "exchange",
    "peers",
    "sent",
)
UNITS = {
    "launch": "us", "bytes": "us/MB", "beyond": "us/MB", "depth": "us per doubling", "ramp": "us", "rows": "us/row",
    "row_heads": "us per row and head", "imbalance": "us per 1000 blocks", "exchange": "us", "peers": "us/peer",
    "sent": "us/MB",
}  # fmt: skip
MEANING = {
    "launch": "fixed cost of a call",
    "bytes": "reading keys, at the fastest level that serves them",
    "beyond": "extra for keys that the last-level cache does not hold",
    "depth": "selection: per doubling of the longest row's blocks on a rank",
    "ramp": "what small reads lose before bandwidth is reached",
    "rows": "per query row",
    "row_heads": "per query row and head scored",
    "imbalance": "blocks that the longest row has and the others have not",
    "exchange": "the exchange between ranks, fixed part",
    "peers": "the exchange, per peer beyond the first",
    "sent": "bytes sent to the peers",
}
RAMP_MB = tuple(2.5 * 2.0**i for i in range(7))  # 2.5 to 160 MB: where half of the ramp has been paid


def boundary(timed_region: Sequence[str]) -> str:
    """What stands in a timed region beyond the indexer itself, as one word list; "" for the indexer alone."""
    return " ".join(sorted(stage for stage in timed_region if any(word in stage for word in OUTSIDE)))


def table(rows: Sequence[records.Row], source: str = "measured here"):
    """The frame that everything here takes: `records.frame` plus point, code_hash, region, boundary, source.

    Args:
        rows: of any runs.
        source: where they come from, in words, for legends: "measured here", "recorded", "synthetic", ...
    """
    data = records.frame(list(rows))
    data["point"] = [row.point for row in rows]
    data["code_hash"] = [row.provenance.get("code_hash", "unknown") for row in rows]
    data["commit"] = [row.provenance.get("commit", "unknown") for row in rows]
    data["region"] = [tuple(row.timed_region) for row in rows]
    data["boundary"] = [boundary(row.timed_region) for row in rows]
    data["source"] = source
    return data


def published(path: Path | str | None = None):
    """The published indexer latencies on four MI355X as such a frame (`data/published/README.md` has the source).

    Each figure is a single median without samples, warm; so `samples_us` holds one value.
    """
    path = Path(path) if path else ROOT / "data" / "published" / "indexer_latency_mi355x_tp4.csv"
    shape = IndexerShape(init_blocks=1, local_blocks=2)
    rows = []
    for line in csv.DictReader(path.read_text().splitlines()):
        for arm in ("sglang_tp", "sglang_cp"):
            ways = {"exchange": "collective", "queries": "gathered"} if arm == "sglang_cp" else {}
            point = Point(
                int(line["context_tokens"]), int(line["batch"]), mix=line["mix"], world=4, dtype="fp8_e4m3fn", shape=shape,
                arm=arm, cache="warm", **ways,
            )  # fmt: skip
            touched = traffic.distinct_bytes_read(point)
            rows.append(
                records.Row(
                    point=point,
                    status="ok",
                    path=arm[-2:],
                    node="4x MI355X",
                    ranks=4,
                    timed_region=["gather_queries", "score", "candidates", "gather_keys", "merge"]
                    if arm == "sglang_cp"
                    else ["score", "select"],
                    samples_us=[float(line["tp_us" if arm == "sglang_tp" else "cp_us"])],
                    calls_per_replay=8,
                    replays_per_round=100,
                    caches=1,
                    footprint_over_llc=touched / (256 * MIB),
                    bytes_read=traffic.bytes_read(point),
                    distinct_bytes_read=touched,
                    bytes_exchanged=traffic.bytes_exchanged(point),
                    check={"passed": True, "against": "the native path's ids, by its authors"},
                    provenance={"code_hash": "published 2026-09-28", "commit": "published"},
                )  # fmt: skip
            )
    return table(rows, source="published")


def find_run(run: str = "", root: Path | None = None) -> Path:
    """The folder that a run's name means.

    Args:
        run: a folder, a name under `data/runs` or `data/measured`, or "" for the latest local run, else the first
            recorded node.
        root: of the repository.

    Raises:
        FileNotFoundError: naming what was asked for and what is there.
    """
    root = root or ROOT
    kept = {
        p.parent.name: p.parent
        for base in ("measured", "runs")
        for p in sorted((root / "data" / base).glob(f"*/{records.ROWS_FILE}"))
    }
    if run:
        for folder in (Path(run), root / run, kept.get(run)):
            if folder and (folder / records.ROWS_FILE).exists():
                return folder
        raise FileNotFoundError(
            f"run={run!r}: no {records.ROWS_FILE} there; known runs: {', '.join(kept) or 'none yet'}"
        )
    local = sorted((root / "data" / "runs").glob(f"*/{records.ROWS_FILE}"), key=lambda p: p.stat().st_mtime_ns)
    recorded = sorted((root / "data" / "measured").glob(f"*/{records.ROWS_FILE}"))
    if not local and not recorded:
        raise FileNotFoundError("run='': no run yet under data/runs or data/measured; `m3cp sweep` makes one")
    return (local[-1] if local else recorded[0]).parent


def require_same(frame, fields: Sequence[str], what: str) -> None:
    """Raise when rows that are about to share a plot or a fit are different experiments.

    Raises:
        ValueError: naming the fields that differ and their values.
    """
    differ = {name: sorted({str(v) for v in frame[name]}) for name in fields}
    differ = {name: values for name, values in differ.items() if len(values) > 1}
    if differ:
        words = "; ".join(f"{name}: {', '.join(values)}" for name, values in differ.items())
        raise ValueError(f"{what}: rows of different experiments must not be mixed ({words})")


def timed(frame):
    """The rows that have a time: status "ok"."""
    return frame[frame["status"] == "ok"]


def groups(frame, fields: Sequence[str] = LABEL) -> dict[tuple, Any]:
    """Rows that may share a fit: {values of `fields`: frame}, timed rows only, in order of first appearance."""
    return _split(timed(frame), fields)


def _split(frame, fields: Sequence[str]) -> dict[tuple, Any]:
    found: dict[tuple, list[int]] = {}
    for position, values in enumerate(zip(*(frame[name] for name in fields), strict=True)):
        found.setdefault(tuple(None if _missing(v) else v for v in values), []).append(position)
    return {values: frame.iloc[positions] for values, positions in found.items()}


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass(frozen=True)
class Fit:
    """A linear fit: what `solve` returns.

    Args:
        names: of the columns, in order.
        values, low, high: estimates and their 95% intervals, in the columns' own units. NaN where a parameter is
            not identified. An estimate at its bound of 0 has the interval [0, what the data still allow].
        covariance: of the estimates, rows of parameters at 0 or not identified included as zeros.
        unidentified: {name: why}.
        relative: residuals are relative to the prediction.
        spread: standard deviation of the (relative) residuals, degrees of freedom allowed for.
        freedom: degrees of freedom left.
        residuals: observed minus fitted over fitted if relative, else observed minus fitted; in the data's order.
        r2: share of the variance explained.
        worst: largest |residual|.
        drawn: matrix that turns weighted residuals into shifts of `values`, for the bootstrap.
        leverage: of each observation.
    """

    names: tuple[str, ...]
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    covariance: np.ndarray
    unidentified: dict[str, str]
    relative: bool
    spread: float
    freedom: int
    residuals: np.ndarray
    r2: float
    worst: float
    drawn: np.ndarray
    leverage: np.ndarray

    def value(self, name: str) -> float:
        """The estimate of a named column; NaN when it is not identified."""
        return float(self.values[self.names.index(name)])

    def interval(self, name: str) -> tuple[float, float]:
        """The 95% interval of a named column."""
        i = self.names.index(name)
        return float(self.low[i]), float(self.high[i])

    @property
    def usable(self) -> np.ndarray:
        """Estimates with 0 for what is not identified: the vector that predicts."""
        return np.nan_to_num(self.values)

    def draws(self, count: int, seed: int = 0) -> np.ndarray:
        """Bootstrap of the estimates, `[count, parameters]`: residuals drawn anew, refitted.

        Residuals are widened for their leverage and by Student's t over the normal, so that a handful of points
        does not look certain. Parameters at 0 stay there.
        """
        from scipy import stats

        rng = np.random.default_rng(seed)
        n = len(self.residuals)
        if self.freedom < 1:
            noise = rng.normal(0.0, self.spread, (count, n))
        else:
            pool = self.residuals / np.sqrt(np.clip(1.0 - self.leverage, 0.05, None))
            pool = pool - pool.mean()
            pool = pool * (self.spread / max(float(np.sqrt(np.mean(pool**2))), 1e-300)) if np.any(pool) else pool
            noise = rng.choice(pool, (count, n))
            noise *= stats.t.ppf(0.975, self.freedom) / stats.norm.ppf(0.975)
        return self.usable + noise @ self.drawn.T


def solve(
    columns: Mapping[str, np.ndarray],
    observed: Sequence[float],
    relative: bool = True,
    nonnegative: bool = True,
    noise: float = 0.0,
) -> Fit:
    """Fit `observed = sum of value * column` with scaled columns, identifiability, and 95% intervals.

    Columns earlier in the mapping have precedence: one that is a combination of the earlier ones is reported as not
    identified and left out, its cost being part of theirs.

    Args:
        columns: name -> values, one per observation, in any unit.
        observed: positive where `relative`.
        relative: weigh by one over the prediction (refined once from one over the observation).
        nonnegative: costs can't be negative; False for a general linear fit.
        noise: known (relative) standard deviation of an observation; the spread is at least this. It is the only
            source of uncertainty when there are no more observations than parameters.

    Raises:
        ValueError: no observation, lengths that differ, values that are not finite, or nothing identified.
    """
    from scipy import optimize, stats

    names = tuple(columns)
    y = np.asarray(observed, dtype=float)
    design = (
        np.column_stack([np.broadcast_to(np.asarray(c, dtype=float), y.shape) for c in columns.values()])
        if names
        else np.empty((len(y), 0))
    )
    require("observed", observed, len(y) > 0 and bool(np.all(np.isfinite(y))), "at least one finite value")
    require("columns", names, bool(np.all(np.isfinite(design))), "finite everywhere")
    if relative:
        require("observed", observed, bool(np.all(y > 0)), "positive for relative weights")

    scale = np.abs(design).max(axis=0, initial=0.0)
    scaled = design / np.where(scale > 0, scale, 1.0)
    weight = 1.0 / y if relative else np.ones_like(y)
    kept, unidentified = _identified(scaled * weight[:, None], names)
    if not kept:
        raise ValueError(f"columns={names}: the data identify none of them ({unidentified})")

    bounds = (0.0 if nonnegative else -np.inf, np.inf)
    for again in range(2 if relative else 1):
        a, b = scaled[:, kept] * weight[:, None], y * weight
        best = (
            optimize.lsq_linear(a, b, bounds=bounds, method="bvls").x
            if nonnegative
            else np.linalg.lstsq(a, b, rcond=None)[0]
        )
        if relative and not again:
            guess = scaled[:, kept] @ best
            weight = 1.0 / np.where(guess > 0, guess, y)
    a, b = scaled[:, kept] * weight[:, None], y * weight
    best = optimize.lsq_linear(a, b, bounds=bounds, method="bvls").x if nonnegative else best
    best = np.where(best < 1e-12 * max(1e-300, np.abs(best).max()), 0.0, best) if nonnegative else best

    weighted = b - a @ best
    active = best != 0 if nonnegative else np.ones(len(kept), bool)
    active = active if active.any() else np.ones(len(kept), bool)
    freedom = len(y) - int(active.sum())
    spread = max(math.sqrt(float(weighted @ weighted) / freedom) if freedom > 0 else 0.0, noise)

    # Intervals come from the fit without bounds: it covers a true value of 0, and one-sided after clipping.
    free = np.linalg.lstsq(a, b, rcond=None)[0]
    inverse = np.linalg.pinv(a.T @ a)
    left = len(y) - len(kept)
    miss = b - a @ free
    sigma = max(math.sqrt(float(miss @ miss) / left) if left > 0 else 0.0, noise)
    half = (stats.t.ppf(0.975, left) if left > 0 else stats.norm.ppf(0.975)) * sigma * np.sqrt(np.diag(inverse))
    low, high = free - half, free + half
    if nonnegative:
        low, high = np.clip(low, 0, None), np.clip(np.maximum(high, best), 0, None)

    solver = np.zeros((len(kept), len(y)))
    solver[active] = np.linalg.pinv(a[:, active])
    leverage = np.einsum("ij,ji->i", a[:, active], solver[active])
    spreadable = solver @ solver.T * spread**2

    def whole(part: np.ndarray, missing: float) -> np.ndarray:
        full = np.full(len(names), missing)
        full[kept] = part / scale[kept]
        return full

    covariance = np.zeros((len(names), len(names)))
    covariance[np.ix_(kept, kept)] = spreadable / np.outer(scale[kept], scale[kept])
    drawn = np.zeros((len(names), len(y)))
    drawn[kept] = solver / scale[kept][:, None]
    fitted = scaled[:, kept] @ best
    residuals = (y - fitted) / (np.where(fitted > 0, fitted, y) if relative else 1.0)
    total = float(np.sum((y - y.mean()) ** 2))
    r2 = 1.0 - float(np.sum((y - fitted) ** 2)) / total if total > 0 else 1.0
    return Fit(
        names, whole(best, math.nan), whole(low, math.nan), whole(high, math.nan), covariance, unidentified, relative, spread, freedom,
        residuals, r2, float(np.abs(residuals).max()), drawn, leverage,
    )  # fmt: skip


def _identified(design: np.ndarray, names: Sequence[str]) -> tuple[list[int], dict[str, str]]:
    """Positions of columns that are no combination of earlier ones, and why the others are left out."""
    kept: list[int] = []
    why: dict[str, str] = {}
    for i, name in enumerate(names):
        column = design[:, i]
        size = float(np.linalg.norm(column))
        if size == 0.0:
            why[name] = "zero in every row"
            continue
        if kept:
            basis = design[:, kept]
            rest = column - basis @ np.linalg.lstsq(basis, column, rcond=None)[0]
            if float(np.linalg.norm(rest)) < 1e-6 * size:
                near = max(kept, key=lambda k: abs(float(design[:, k] @ column)) / float(np.linalg.norm(design[:, k])))
                why[name] = (
                    f"varies only together with {names[near]}"
                    if len(kept) > 1
                    else f"never varies apart from {names[near]}"
                )
                continue
        if len(kept) >= len(design):
            why[name] = "more parameters than rows"
            continue
        kept.append(i)
    return kept, why


def structure(fit: Fit, x: Sequence[float], seed: int = 0) -> str:
    """What is left in the residuals along `x`, in words; "" when nothing stands out.

    With repeats at the same x: the lack-of-fit F test. Without: the best split of the residuals into two straight
    pieces against the same split of shuffled residuals. Either is reported at 1% and above half a percent in size.
    """
    from scipy import stats

    x, r = np.asarray(x, dtype=float), fit.residuals
    sizes, where = np.unique(x, return_inverse=True)
    means = np.array([r[where == i].mean() for i in range(len(sizes))])
    if len(sizes) < 5 or float(np.abs(means).max()) < 0.005:
        return ""
    repeats = len(r) - len(sizes)
    spare = len(sizes) - int(np.sum(fit.usable != 0))
    if repeats >= len(sizes) and spare > 0:
        pure = float(np.sum((r - means[where]) ** 2)) / repeats
        lack = float(np.sum(np.bincount(where) * means**2)) / spare
        p = float(stats.f.sf(lack / max(pure, 1e-30), spare, repeats))
    else:
        rng = np.random.default_rng(seed)
        shuffled = np.array([rng.permutation(means) for _ in range(400)])
        gain = _split_gain(np.log(np.clip(sizes, 1e-12, None)), np.vstack([means, shuffled]))
        p = float((1 + np.sum(gain[1:] >= gain[0])) / 401)
    if p >= 0.01:
        return ""
    worst = int(np.argmax(np.abs(means)))
    return f"residuals follow the size (p = {p:.3g}; up to {means[worst]:+.1%} at {sizes[worst]:.4g}): one line does not describe these rows"


def _split_gain(x: np.ndarray, curves: np.ndarray) -> np.ndarray:
    """For each curve, the largest share of its sum of squares that two straight pieces explain."""
    total = np.sum(curves**2, axis=1)
    best = np.zeros(len(curves))
    for cut in range(2, len(x) - 1):
        left = 0.0
        for piece in (slice(None, cut), slice(cut, None)):
            basis = np.column_stack([np.ones(len(x[piece])), x[piece]])
            q, _ = np.linalg.qr(basis)
            part = curves[:, piece]
            left = left + np.sum((part - (part @ q) @ q.T) ** 2, axis=1)
        best = np.maximum(best, 1.0 - left / np.maximum(total, 1e-300))
    return best


@functools.lru_cache(maxsize=65_536)
def _amounts(point: Point) -> tuple[float, ...]:
    """(megabytes read, longest local row in blocks, blocks missing to it, rows, heads scored, exchanges, MB sent)."""
    shape, count = point.shape, traffic.shards(point)
    if point.mix == "uniform" and not point.shared_prefix_tokens:
        one = traffic.bytes_read(dataclasses.replace(point, batch=1)) / 1e6  # every request has the same busiest rank
        read, lengths = one * point.batch, [point.context_tokens]
    else:
        read, lengths = traffic.distinct_bytes_read(point) / 1e6, traffic.context_lengths(point)
    spans = [(last - first) / count for first, last in (traffic.read_range(point, n) for n in lengths)]
    short = 0.0 if len(spans) == 1 else max(spans) * len(spans) - sum(spans)
    rows = (point.batch + point.rows_padded) * point.query_len
    heads = Shard(0, point.world, shape.heads).local_heads if point.arm.endswith("tp") else shape.heads
    exchanges = float(point.arm.endswith("cp") and point.world > 1)
    sent = sum(traffic.bytes_exchanged(point).values()) * max(0, point.world - 1) / 1e6
    return read, max(spans), short, rows, heads, exchanges, sent


def features(point: Point, resident: float, ramp_mb: float) -> dict[str, float]:
    """What each term of a cost model multiplies, for a Point.

    Args:
        point: the experiment.
        resident: share of its bytes that the last-level cache holds, 0 (cold) to 1.
        ramp_mb: megabytes at which half of the ramp has been paid.
    """
    read, longest, short, rows, heads, exchanges, sent = _amounts(point)
    return {
        "launch": 1.0,
        "bytes": read,
        "beyond": read * (1.0 - resident),
        "depth": math.log2(1.0 + longest),
        "ramp": read / (read + ramp_mb),
        "rows": rows,
        "row_heads": rows * heads,
        "imbalance": short / 1000.0,
        "exchange": exchanges,
        "peers": exchanges * max(0, point.world - 2),
        "sent": sent,
    }


def resident_share(cache_state: str, footprint_over_llc: float | None) -> float:
    """Share of a call's bytes that the last-level cache can hold: 0 when cold, 1 when warm and small.

    A footprint larger than the cache keeps a cache's worth of it, as random replacement does.
    """
    if cache_state == "cold":
        return 0.0
    return 1.0 if _missing(footprint_over_llc) or not footprint_over_llc else min(1.0, 1.0 / footprint_over_llc)


@dataclass(frozen=True)
class Prediction:
    """Microseconds with a 95% interval; `extrapolated` names what lies outside the fitted range, "" if nothing."""

    us: float
    low_us: float
    high_us: float
    extrapolated: str = ""


@dataclass(frozen=True)
class CostModel:
    """One arm's microseconds a call as a sum of terms, with what it was fitted to.

    Args:
        label: what the rows have in common, {field: value}.
        terms: names of the terms used, of `ALL_TERMS`.
        fit: estimates in the units of `UNITS`.
        template: a Point of the group, from which others are made.
        cache_state: "cold" or "warm".
        llc_bytes: last-level cache, where a warm row told it; None otherwise.
        ramp_mb: size at which half of the ramp is paid.
        range: {"context_tokens": (low, high), "batch": ..., "mb": ...} of the fitted rows.
        worlds, mixes: present in the fitted rows.
        unread: rows left out because they read no key.
        structure: what is left in the residuals, in words.
    """

    label: dict[str, Any]
    terms: tuple[str, ...]
    fit: Fit
    template: Point
    cache_state: str
    llc_bytes: float | None
    ramp_mb: float
    range: dict[str, tuple[float, float]]
    worlds: tuple[int, ...]
    mixes: tuple[str, ...]
    unread: int = 0
    structure: str = ""
    frame: Any = field(default=None, repr=False, compare=False)

    @property
    def arm(self) -> str:
        """The arm it describes, such as "cp"."""
        return self.label["arm"]

    def point(self, context_tokens: int, batch: int, **changes: Any) -> Point:
        """A Point of this model's kind at another context and batch."""
        bound = max(self.template.max_context, context_tokens)
        shared = min(self.template.shared_prefix_tokens, context_tokens)
        return dataclasses.replace(
            self.template,
            context_tokens=context_tokens,
            batch=batch,
            max_context=bound,
            shared_prefix_tokens=shared,
            **changes,
        )

    def row(self, point: Point) -> np.ndarray:
        """The design row of a Point: what the estimates multiply, `[terms]`."""
        over = None if not self.llc_bytes else _amounts(point)[0] * 1e6 / self.llc_bytes
        values = features(point, resident_share(self.cache_state, over), self.ramp_mb)
        return np.array([values[name] for name in self.terms])

    def us(self, point: Point) -> float:
        """Predicted microseconds a call."""
        return float(self.row(point) @ self.fit.usable)

    def predict(self, point: Point) -> Prediction:
        """Predicted microseconds with the interval of a new measurement there."""
        from scipy import stats

        row = self.row(point)
        us = float(row @ self.fit.usable)
        t = stats.t.ppf(0.975, self.fit.freedom) if self.fit.freedom > 0 else stats.norm.ppf(0.975)
        half = t * math.sqrt(max(0.0, float(row @ self.fit.covariance @ row)) + (self.fit.spread * us) ** 2)
        return Prediction(us, max(0.0, us - half), us + half, self.outside(point))

    def outside(self, point: Point) -> str:
        """What of a Point lies outside the fitted rows, in words; "" when nothing does."""
        found = []
        for name, value in (("context_tokens", point.context_tokens), ("batch", point.batch)):
            low, high = self.range[name]
            if not low <= value <= high:
                found.append(f"{name}={value} outside {low:.0f} to {high:.0f}")
        if point.world not in self.worlds:
            found.append(f"world={point.world} not among {', '.join(map(str, self.worlds))}")
        if point.mix not in self.mixes and point.batch > 1:
            found.append(f"mix={point.mix} not among {', '.join(self.mixes)}")
        return "; ".join(found)

    @property
    def bandwidth_gbs(self) -> tuple[float, float, float]:
        """(GB/s, low, high) of the slope; `bandwidth_name` says of what. Infinite where the slope is 0."""
        cost = self.fit.value("bytes")
        low, high = self.fit.interval("bytes")
        return tuple(1e3 / v if v > 0 else math.inf for v in (cost, high, low))

    @property
    def bandwidth_name(self) -> str:
        """What the slope is the bandwidth of: warm rows never show memory."""
        return "memory" if self.cache_state == "cold" else "last-level cache"

    def describe(self) -> list[dict[str, Any]]:
        """One line a term: name, meaning, value, 95% interval, unit, note."""
        lines = []
        for i, name in enumerate(self.fit.names):
            note = self.fit.unidentified.get(name, "")
            lines.append(
                {
                    "term": name, "meaning": MEANING[name], "value": float(self.fit.values[i]), "low": float(self.fit.low[i]),
                    "high": float(self.fit.high[i]), "unit": UNITS[name], "note": f"not identified: {note}" if note else "",
                }
            )  # fmt: skip
        return lines


def fit_model(frame, terms: Sequence[str] = TWO_TERMS, vary: Sequence[str] = ()) -> CostModel:
    """Fit a cost model to the rows of one group.

    Args:
        frame: rows of one label (`groups`); rows that read no key (`bytes_read == 0`) are left out.
        terms: of `ALL_TERMS`; those the data can't tell apart are reported, not fitted.
        vary: fields of `LABEL` that may differ between the rows, each with a term that explains it.

    Raises:
        ValueError: mixed experiments, an unknown term, several mixes without the imbalance term, or too few rows.
    """
    require("terms", tuple(terms), set(terms) <= set(ALL_TERMS), f"of {', '.join(ALL_TERMS)}")
    rows = timed(frame)
    require_same(rows, [name for name in LABEL if name not in vary], "fit_model")
    if len(set(rows["mix"])) > 1 and "imbalance" not in terms:
        raise ValueError(
            f"terms={tuple(terms)}: rows of several mixes ({', '.join(sorted(set(rows['mix'])))}) need the term 'imbalance'"
        )
    unread = int((rows["bytes_read"] == 0).sum())
    rows = rows[rows["bytes_read"] > 0]
    if len(rows) < 2:
        raise ValueError(f"fit_model: {len(rows)} rows that read keys ({unread} read none): at least 2 are needed")

    points, times = list(rows["point"]), rows["median_us"].to_numpy(dtype=float)
    states, overs = list(rows["cache_state"]), list(rows["footprint_over_llc"])
    shares = [resident_share(state, over) for state, over in zip(states, overs, strict=True)]
    noise = measurement_noise(rows)
    order = [name for name in ALL_TERMS if name in terms]
    best: tuple[float, Fit] | None = None
    for ramp_mb in RAMP_MB if "ramp" in terms else RAMP_MB[:1]:
        design = [features(p, share, ramp_mb) for p, share in zip(points, shares, strict=True)]
        columns = {name: np.array([line[name] for line in design]) for name in order}
        found = solve(columns, times, noise=noise)
        loss = float(np.sum(found.residuals**2))
        if best is None or loss < best[0] * (1 - 1e-9):
            best, chosen = (loss, found), ramp_mb
    found = best[1]
    read = np.array([_amounts(p)[0] for p in points])
    sizes = [
        d * max(c, 1) / over
        for d, c, over, state in zip(rows["distinct_bytes_read"], rows["caches"], overs, states, strict=True)
        if state == "warm" and not _missing(over) and over
    ]
    label = {name: None if _missing(rows[name].iloc[0]) else rows[name].iloc[0] for name in LABEL if name not in vary}
    label["source"] = rows["source"].iloc[0]
    label["arm"] = "cp" if "arm" in vary else rows["arm"].iloc[0]
    template = next((p for p in points if p.arm == label["arm"]), points[0])
    return CostModel(
        label, tuple(order), found, template, states[0], float(np.median(sizes)) if sizes else None, chosen,
        {
            "context_tokens": (float(rows["context_tokens"].min()), float(rows["context_tokens"].max())),
            "batch": (float(rows["batch"].min()), float(rows["batch"].max())),
            "mb": (float(read.min()), float(read.max())),
        },
        tuple(sorted({int(w) for w in rows["world"]})), tuple(sorted(set(rows["mix"]))), unread, structure(found, read), rows,
    )  # fmt: skip


def measurement_noise(rows) -> float:
    """Relative standard error of the rows' medians, pooled: from the rounds of each row and from repeats of a Point.

    Repeats in fresh processes (the row's `process`) show more spread than rounds do; the larger of the two counts.
    """
    within = []
    for samples in rows["samples_us"]:
        if len(samples) > 2:
            low, middle, high = np.percentile(samples, [25, 50, 75])
            within.append(1.2533 * (high - low) / 1.349 / middle / math.sqrt(len(samples)))
    between = [
        float(group["median_us"].std(ddof=1) / group["median_us"].mean())
        for _, group in rows.groupby([str(p) for p in rows["point"]], sort=False)
        if len(group) > 1
    ]
    pooled = [math.sqrt(float(np.mean(np.square(v)))) for v in (within, between) if v]
    return max(pooled, default=0.0)


def two_term_fits(frame) -> list[CostModel]:
    """The two-term fit of every group that has enough rows at different sizes; floors and failed rows left out."""
    models = []
    for values, rows in groups(frame).items():
        read = rows[rows["bytes_read"] > 0]
        if values[0] != "page_read" and len(set(read["distinct_bytes_read"])) >= 2:
            models.append(fit_model(rows))
    return models


def median_draws(samples: Sequence[float], count: int, rng: np.random.Generator, noise: float = 0.0) -> np.ndarray:
    """Bootstrap of the median of `samples`, `[count]`, with a relative `noise` on top (one standard deviation)."""
    values = np.asarray(samples, dtype=float)
    drawn = (
        np.median(rng.choice(values, (count, len(values))), axis=1) if len(values) > 1 else np.full(count, values[0])
    )
    return drawn * (1.0 + noise * rng.standard_normal(count)) if noise else drawn


def verdict(low: float, high: float, same: float = 0.02) -> str:
    """A word for the interval of the ratio TP / CP: FASTER, SLOWER, SAME (within `same` of 1) or UNDECIDED."""
    if low > 1.0:
        return "FASTER" if high > 1.0 + same else "SAME"
    if high < 1.0:
        return "SLOWER" if low < 1.0 - same else "SAME"
    return "SAME" if low > 1.0 - same and high < 1.0 + same else "UNDECIDED"


def pairs(frame, noise: float = 0.0, draws: int = 400, seed: int = 0):
    """Each CP row beside its TP baseline: times, the ratio TP / CP and the difference CP - TP with 95% intervals.

    A CP arm meets the baseline of its own engine, in its own form where that was measured. Repeats in fresh
    processes are pooled, each counting once.

    Args:
        frame: of `table`.
        noise: relative standard deviation to assume on top of the samples' own spread, such as 0.05 for figures
            published without samples.
        draws: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        A frame with the fields of `PAIRED` and `VARIANT`, tp_us, cp_us, their sample ranges, ratio, ratio_low,
        ratio_high, delta_us, delta_low, delta_high, verdict, cache_state ("cold" only where both are), read (whether
        keys are read), unsteady, processes, and the draws of delta_us.

    Raises:
        ValueError: timed regions with different boundaries, or a pair whose rows ran the same path.
    """
    import pandas

    rng = np.random.default_rng(seed)
    rows = timed(frame)
    baseline = {arm: groups(rows[rows["arm"] == arm], (*PAIRED, "form")) for arm in set(BASELINE.values())}
    lines = []
    for values, cp in groups(rows[rows["arm"].isin(list(BASELINE))], (*PAIRED, *VARIANT)).items():
        key, variant = values[: len(PAIRED)], dict(zip(VARIANT, values[len(PAIRED) :], strict=True))
        known = baseline[BASELINE[variant["arm"]]]
        forms = {k[-1]: v for k, v in known.items() if k[:-1] == key}
        if not forms:
            continue
        tp = (
            forms[variant["form"]]
            if variant["form"] in forms
            else min(forms.values(), key=lambda v: v["median_us"].min())
        )
        context = f"{variant['arm']} against {BASELINE[variant['arm']]} at {key[0]} tokens x {key[1]}"
        bounds = {b for part in (tp, cp) for b in part["boundary"]}
        if len(bounds) > 1:
            raise ValueError(
                f"{context}: timed regions have different boundaries ({', '.join(repr(b) for b in sorted(bounds))})"
            )
        same = set(tp["path"]) & set(cp["path"])
        if same:
            raise ValueError(f"{context}: both arms ran path {', '.join(map(repr, sorted(same)))}; nothing is compared")
        t, tn = _pool(tp, draws, rng, noise)
        c, cn = _pool(cp, draws, rng, noise)
        tp_us, cp_us = float(tp["median_us"].median()), float(cp["median_us"].median())
        ratio, delta = t / c, c - t
        low, high = np.percentile(ratio, [2.5, 97.5])
        d_low, d_high = np.percentile(delta, [2.5, 97.5])
        cold = set(tp["cache_state"]) == {"cold"} and set(cp["cache_state"]) == {"cold"}
        lines.append(
            {
                **dict(zip(PAIRED, key, strict=True)), **variant, "tp_us": tp_us, "cp_us": cp_us, "tp_low": tn[0], "tp_high": tn[1],
                "cp_low": cn[0], "cp_high": cn[1], "ratio": tp_us / cp_us, "ratio_low": float(low), "ratio_high": float(high),
                "delta_us": cp_us - tp_us, "delta_low": float(d_low), "delta_high": float(d_high), "verdict": verdict(low, high),
                "cache_state": "cold" if cold else "warm", "read": bool((tp["bytes_read"] > 0).all()),
                "unsteady": bool(tp["unsteady"].any() or cp["unsteady"].any()), "processes": min(len(tp), len(cp)), "draws": delta,
            }
        )  # fmt: skip
    columns = [*PAIRED, *VARIANT, "tp_us", "cp_us", "tp_low", "tp_high", "cp_low", "cp_high", "ratio", "ratio_low", "ratio_high",
               "delta_us", "delta_low", "delta_high", "verdict", "cache_state", "read", "unsteady", "processes", "draws"]  # fmt: skip
    return pandas.DataFrame.from_records(lines, columns=columns)


def _pool(rows, draws: int, rng: np.random.Generator, noise: float) -> tuple[np.ndarray, tuple[float, float]]:
    """Draws of the pooled median over a point's processes, and the range of all samples."""
    each = np.stack([median_draws(samples, draws, rng, noise) for samples in rows["samples_us"]])
    if len(each) > 1:  # a process is the unit: draw processes, not only rounds
        pick = rng.integers(0, len(each), (len(each), draws))
        each = np.take_along_axis(each, pick, axis=0)
    flat = [v for samples in rows["samples_us"] for v in samples]
    return np.median(each, axis=0), (min(flat), max(flat))


ANSWERS = ("crosses", "none in range", "below range", "undecided", "extrapolated")


@dataclass(frozen=True)
class BreakEven:
    """Where CP begins to win along one axis, and how sure that is.

    Args:
        axis: "context_tokens" or "batch", along which CP begins to win.
        at: value of the other axis.
        answer: one of `ANSWERS`. "none in range": TP wins everywhere; "below range": CP wins everywhere;
            "undecided": the band reaches both ends, or the data allow both; "extrapolated": beyond what was measured.
        value: the break-even; None where there is none.
        low, high: its 95% band; 0 and infinity where it is open.
        bracket: measured neighbours that enclose it, None for a model's.
        sure: the band lies within the bracket (measured) or is closed (model).
        source: "measured", "published" or "model".
    """

    axis: str
    at: float
    answer: str
    value: float | None = None
    low: float = 0.0
    high: float = math.inf
    bracket: tuple[float, float] | None = None
    sure: bool = True
    source: str = "measured"

    @property
    def text(self) -> str:
        """The answer as a sentence."""
        show = tokens_about if self.axis == "context_tokens" else (lambda v: f"{v:.3g}")
        what, other = (
            ("context", f"batch {self.at:.0f}")
            if self.axis == "context_tokens"
            else ("batch", f"{tokens_about(self.at)} tokens")
        )
        if self.answer == "none in range":
            return f"at {other}: none in range, TP is faster throughout ({self.source})"
        if self.answer == "below range":
            return f"at {other}: below range, CP is faster throughout ({self.source})"
        if self.answer == "undecided" and self.value is None:
            return f"at {other}: undecided ({self.source})"
        low = f"{show(self.low)}" if self.low > 0 else "below the range"
        high = f"{show(self.high)}" if math.isfinite(self.high) else "beyond the range"
        extra = "" if self.sure or self.answer != "crosses" else ", uncertain"
        between = f", between {show(self.bracket[0])} and {show(self.bracket[1])}" if self.bracket else ""
        word = {"undecided": "undecided, about", "extrapolated": "extrapolated to"}.get(self.answer, "about")
        return f"at {other}: {word} {what} {show(self.value)} (95% {low} to {high}{between}{extra}; {self.source})"


def tokens_about(tokens: float) -> str:
    """A token count in three digits: 9300 is "9.1k", 1.5e6 "1.4M"."""
    if not math.isfinite(tokens):
        return "infinity"
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.3g}"


def crossings(x: np.ndarray, delta: np.ndarray, unread: float = 0.0) -> np.ndarray:
    """Where each curve of CP - TP falls below 0 for good: `delta` is `[curves, x]`; 0 if always, infinity if never.

    Between two points the difference is taken to be linear in x, as bytes are; up to `unread` no byte is read, so
    that the difference stays what it is and then jumps.
    """
    delta, low = np.atleast_2d(delta), np.where(x > unread, x, 0.0)
    slower = delta >= 0
    last = np.where(slower.any(axis=1), delta.shape[1] - 1 - np.argmax(slower[:, ::-1], axis=1), -1)
    inside = (last >= 0) & (last < len(x) - 1)
    i = np.clip(last, 0, len(x) - 2)
    row = np.arange(len(delta))
    a, b = delta[row, i], delta[row, i + 1]
    step = np.divide(a, a - b, out=np.zeros_like(a), where=inside & (a > b))
    value = np.maximum(
        low[i] + step * (low[i + 1] - low[i]), np.maximum(x[i], np.where(x[i + 1] > unread, unread, 0.0))
    )
    return np.where(inside, value, np.where(last < 0, 0.0, np.inf))


def _answer(value: float, drawn: np.ndarray) -> tuple[str, float, float]:
    low, high = np.percentile(drawn, [2.5, 97.5], method="nearest")
    if math.isinf(value):
        return ("none in range" if math.isinf(low) else "undecided"), float(low), float(high)
    if value == 0:
        return ("below range" if high == 0 else "undecided"), float(low), float(high)
    return ("undecided" if low == 0 and math.isinf(high) else "crosses"), float(low), float(high)


def break_even_measured(paired, axis: str = "context_tokens") -> list[BreakEven]:
    """Break-even by interpolation between measured neighbours, one answer for each value of the other axis.

    Args:
        paired: rows of `pairs` of one variant and mix.
        axis: along which CP begins to win: "context_tokens" or "batch".

    Raises:
        ValueError: another axis, or several variants at once.
    """
    require("axis", axis, axis in ("context_tokens", "batch"), "'context_tokens' or 'batch'")
    require_same(
        paired,
        [n for n in (*PAIRED, *VARIANT) if n not in ("context_tokens", "batch", "max_context", "shared_prefix_tokens")],
        "break_even_measured",
    )
    other = "batch" if axis == "context_tokens" else "context_tokens"
    shape, source = paired["shape"].iloc[0], "published" if set(paired["source"]) == {"published"} else "measured"
    unread = shape.topk * shape.block_size if axis == "context_tokens" else 0
    found = []
    for at, rows in paired.groupby(other):
        rows = rows.sort_values(axis)
        x = rows[axis].to_numpy(dtype=float)
        delta, draws = rows["delta_us"].to_numpy(dtype=float), np.stack(list(rows["draws"]), axis=1)
        if len(x) < 2:
            answer = (
                "undecided"
                if rows["delta_low"].iloc[0] <= 0 <= rows["delta_high"].iloc[0]
                else ("none in range" if delta[0] > 0 else "below range")
            )
            found.append(BreakEven(axis, float(at), answer, sure=answer != "undecided", source=source))
            continue
        value = float(crossings(x, delta, unread)[0])
        answer, low, high = _answer(value, crossings(x, draws, unread))
        if not 0 < value < math.inf:
            found.append(BreakEven(axis, float(at), answer, None, low, high, sure=answer != "undecided", source=source))
            continue
        right = int(np.searchsorted(x, value))
        bracket = (float(x[max(0, right - 1)]), float(x[min(right, len(x) - 1)]))
        sure = answer == "crosses" and bracket[0] <= low and high <= bracket[1]
        found.append(BreakEven(axis, float(at), answer, value, low, high, bracket, sure, source))
    return found


@functools.lru_cache(maxsize=256)
def context_grid(low: int, high: int, step: int, count: int = 161) -> tuple[int, ...]:
    """Contexts spread evenly in their logarithm from `low` to `high`, whole multiples of `step` tokens."""
    raw = np.geomspace(low, high, count)
    return tuple(int(v) for v in np.unique(np.maximum(1, np.round(raw / step)) * step) if v <= high)


def difference(
    tp: CostModel, cp: CostModel, points: Sequence[tuple[int, int]], draws: int = 400, seed: int = 0, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """CP - TP in microseconds at (context, batch) pairs: the best estimate `[points]` and draws `[draws, points]`.

    A point where no row reads a key costs what it costs without bytes.
    """
    a = np.stack([tp.row(tp.point(c, b, **changes)) for c, b in points])
    z = np.stack([cp.row(cp.point(c, b, **changes)) for c, b in points])
    best = z @ cp.fit.usable - a @ tp.fit.usable
    drawn = cp.fit.draws(draws, seed + 1) @ z.T - tp.fit.draws(draws, seed) @ a.T
    return best, drawn


def break_even_model(
    tp: CostModel,
    cp: CostModel,
    batches: Sequence[int],
    axis: str = "context_tokens",
    low: int = 1024,
    high: int = 2**20,
    draws: int = 400,
    seed: int = 0,
    **changes: Any,
) -> list[BreakEven]:
    """Break-even from two cost models with a bootstrap band, one answer for each value of the other axis.

    Args:
        tp, cp: models of the same rows' labels, arms apart.
        batches: values of the other axis (batches for axis "context_tokens", contexts for "batch").
        axis: along which CP begins to win.
        low, high: tokens searched; for axis "batch" the batches searched are 1 to 256.
        draws, seed: of the bootstrap.
        changes: other fields of the Points, such as mix or world.

    Raises:
        ValueError: another axis, or models that describe different experiments.
    """
    require("axis", axis, axis in ("context_tokens", "batch"), "'context_tokens' or 'batch'")
    for name in ("node", "code_hash", "dtype", "query_len", "shape", "cache_state"):
        a, z = tp.label.get(name), cp.label.get(name)
        if a != z:
            raise ValueError(f"break_even_model: {name} of the models differs, {a!r} against {z!r}")
    step = cp.template.shape.block_size * max(1, cp.template.world)
    first = (
        cp.template.shape.topk + cp.template.shape.init_blocks + cp.template.shape.local_blocks
    ) * cp.template.shape.block_size
    found = []
    for at in batches:
        if axis == "context_tokens":
            x = np.array(context_grid(max(low, first), high, step), dtype=float)
            where = [(int(c), int(at)) for c in x]
        else:
            x = np.unique(np.round(np.geomspace(1, 256, 65)))
            where = [(int(at), int(b)) for b in x]
        best, drawn = difference(tp, cp, where, draws, seed, **changes)
        value = float(crossings(x, best)[0])
        answer, lower, upper = _answer(value, crossings(x, drawn))
        bounds = [model.range[axis] for model in (tp, cp)]
        inner = (max(b[0] for b in bounds), min(b[1] for b in bounds))
        if 0 < value < math.inf:
            beyond = not inner[0] <= value <= inner[1]
            answer = "extrapolated" if beyond and answer == "crosses" else answer
            found.append(
                BreakEven(
                    axis,
                    float(at),
                    answer,
                    value,
                    lower,
                    upper,
                    None,
                    answer == "crosses" and lower > 0 and math.isfinite(upper),
                    "model",
                )
            )
        else:
            found.append(BreakEven(axis, float(at), answer, None, lower, upper, None, answer != "undecided", "model"))
    return found


# What the rows of one comparison share; contexts and batches vary in it.
COMPARED = (
    "mix",
    "shared_prefix_tokens",
    "rows_padded",
    "world",
    "dtype",
    "query_len",
    "shape",
    "cache",
    "launch",
    "node",
    "code_hash",
    "source",
)


@dataclass(frozen=True)
class Comparison:
    """One CP variant against its baseline over the contexts and batches that were measured.

    Args:
        name: short and unique among its siblings, usable as a file name.
        frame: the rows of both arms.
        pairs: of `pairs`.
        tp, cp: fits, None where there are too few sizes.
        measured, model: break-even over context, one answer a batch.
    """

    name: str
    frame: Any
    pairs: Any
    tp: CostModel | None
    cp: CostModel | None
    measured: tuple[BreakEven, ...]
    model: tuple[BreakEven, ...]

    @property
    def models(self) -> list[CostModel]:
        """The fits there are."""
        return [m for m in (self.tp, self.cp) if m is not None]

    @property
    def source(self) -> str:
        """Where the rows come from, in words."""
        return str(self.pairs["source"].iloc[0])


def comparisons(frame, terms: Sequence[str] = TWO_TERMS, noise: float = 0.0, draws: int = 400) -> list[Comparison]:
    """Every CP variant of a frame against its baseline, most pairs first.

    Args:
        frame: of `table`.
        terms: of the fits; the band of the modelled break-even comes from them.
        noise: relative standard deviation to assume on top of the samples' spread.
        draws: of the bootstraps.
    """
    rows, found = timed(frame), []
    paired = pairs(frame, noise=noise, draws=draws)
    for values, part in _split(paired, (*COMPARED, *VARIANT)).items():
        shared = dict(zip((*COMPARED, *VARIANT), values, strict=True))
        same = np.ones(len(rows), bool)
        for name in COMPARED:
            same &= np.array([(None if _missing(v) else v) == shared[name] for v in rows[name]])
        variant = same & np.all([[(None if _missing(v) else v) == shared[n] for v in rows[n]] for n in VARIANT], axis=0)
        base = same & (rows["arm"] == BASELINE[shared["arm"]]).to_numpy()
        forms = [None if _missing(v) else v for v in rows["form"]]
        if shared["form"] in {f for f, b in zip(forms, base, strict=True) if b}:
            base &= np.array([f == shared["form"] for f in forms])
        fits = [_try_fit(rows[mask], terms) for mask in (base, variant)]
        batches = sorted(set(part["batch"]))
        model = ()
        if all(fits) and fits[0].cache_state == fits[1].cache_state:
            model = tuple(break_even_model(*fits, batches, draws=draws))
        name = "_".join(
            str(v).replace(" ", "-") for v in (
                shared["arm"], shared["form"], shared["exchange"], shared["queries"], f"p{shared['world']}", shared["dtype"],
                None if shared["mix"] == "uniform" else shared["mix"], f"q{shared['query_len']}" if shared["query_len"] > 1 else None, shared["cache"],
                f"padded{shared['rows_padded']}" if shared["rows_padded"] else None, f"prefix{shared['shared_prefix_tokens']}" if shared["shared_prefix_tokens"] else None,
            ) if v is not None
        )  # fmt: skip
        found.append(Comparison(name, rows[base | variant], part, *fits, tuple(break_even_measured(part)), model))
    order = {"cp": 0, "vllm_cp": 1, "sglang_cp": 2}
    return sorted(
        found,
        key=lambda c: (
            -len(c.pairs),
            order[c.pairs["arm"].iloc[0]],
            c.pairs["queries"].iloc[0] != "gathered",
            float(np.log(c.pairs["cp_us"]).mean()),
        ),
    )


def _try_fit(rows, terms: Sequence[str]) -> CostModel | None:
    """A fit of one arm's rows where they allow one: the state of most of them, at two sizes or more."""
    read = rows[rows["bytes_read"] > 0]
    if read.empty:
        return None
    state = read["cache_state"].value_counts().idxmax()
    read = read[read["cache_state"] == state]
    return fit_model(read, terms) if len(set(read["distinct_bytes_read"])) >= 2 else None


def fit_table(models: Sequence[CostModel]):
    """The fits as a frame, one line an arm and term: value, 95% interval, unit, bandwidth, worst error, R², remarks."""
    import pandas

    lines = []
    for model in models:
        for line in model.describe():
            note = line.pop("note")
            if line["term"] == "bytes" and model.fit.value("bytes") > 0:
                gbs, low, high = model.bandwidth_gbs
                top = f"{high:.0f}" if math.isfinite(high) else "unbounded"
                note = f"{gbs:.0f} GB/s of {model.bandwidth_name} ({low:.0f} to {top})"
            if line["term"] == model.terms[0] and model.structure:
                note = model.structure
            lines.append(
                {
                    "arm": model.arm,
                    "mix": model.label.get("mix"),
                    **line,
                    "rows": len(model.fit.residuals),
                    "worst_error": model.fit.worst,
                    "r2": model.fit.r2,
                    "note": note,
                }
            )
    return pandas.DataFrame.from_records(lines)


SPARSE_LAYERS = 57  # of MiniMax-M3's 60


def sentence(pair: Any, layers: int = SPARSE_LAYERS) -> str:
    """The verdict on one pair in words: who wins, by what factor with its interval, and what that is a step.

    Args:
        pair: a line of `pairs`.
        layers: sparse layers a step.
    """
    word = {
        "FASTER": "CP is faster",
        "SLOWER": "TP is faster",
        "SAME": "no difference that matters",
        "UNDECIDED": "undecided",
    }[pair["verdict"]]
    gain = -pair["delta_us"] * layers / 1000
    where = f"{tokens_about(pair['context_tokens'])} tokens, batch {pair['batch']}, P = {pair['world']}"
    return (
        f"{where}: {word}. TP takes {pair['tp_us']:.4g} µs and CP {pair['cp_us']:.4g} µs a layer, TP / CP = {pair['ratio']:.2f} "
        f"(95% {pair['ratio_low']:.2f} to {pair['ratio_high']:.2f}); over {layers} sparse layers CP changes a step by {-gain:+.3g} ms."
    )


@dataclass(frozen=True)
class Loaded:
    """A run read from disk: its name, where it comes from, the commits of its rows, and the frame."""

    name: str
    source: str
    commit: str
    frame: Any

    @property
    def title(self) -> str:
        """For a figure's panel: "recorded: 2x NVIDIA H200"."""
        return f"{self.source}: {', '.join(sorted(set(self.frame['node'])))}"

    @property
    def summary(self) -> str:
        """One line: how many rows of each status, and how many are unsteady or warm."""
        counts = ", ".join(f"{n} {status}" for status, n in self.frame["status"].value_counts().items())
        ok = timed(self.frame)
        return f"{self.name} ({self.title}): {counts}; {int(ok['unsteady'].sum())} unsteady, {int((ok['cache_state'] == 'warm').sum())} warm"


def load_run(run: str = "", root: Path | None = None) -> Loaded:
    """Read a run by its name (`find_run`); rows under `data/measured` are called recorded, others measured here.

    Raises:
        FileNotFoundError: no such run.
        ValueError: a run without a timed row, or a line that is no row.
    """
    folder = find_run(run, root)
    source = "recorded" if folder.parent.name == "measured" else "measured here"
    frame = table(records.load(folder), source=source)
    if timed(frame).empty:
        raise ValueError(f"run={run!r}: {folder.name} has no timed row; the first error was {frame['error'].iloc[0]!r}")
    commits = sorted(set(frame["commit"]))
    return Loaded(folder.name, source, ", ".join(commits), frame)


def load_compare(compare: str, here: Loaded, root: Path | None = None) -> Loaded | None:
    """The recorded node to put beside a run: a name, "" for the first recorded one that is another run, "none".

    Raises:
        FileNotFoundError: a name that is not recorded.
    """
    if compare == "none":
        return None
    if compare:
        return load_run(compare, root)
    recorded = sorted(((root or ROOT) / "data" / "measured").glob(f"*/{records.ROWS_FILE}"))
    names = [path.parent.name for path in recorded if path.parent.name != here.name]
    return load_run(names[0], root) if names else None


def headline(found: Sequence[Comparison]) -> Comparison | None:
    """The comparison that a single map shows: the first, uniform, with most pairs; None when there is none."""
    return next((c for c in found if c.pairs["mix"].iloc[0] == "uniform"), found[0] if found else None)


def grids(found: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons with at least two contexts at some batch: those that have a curve and a break-even."""
    return [c for c in found if int(c.pairs.groupby("batch")["context_tokens"].nunique().max()) > 1]


def curve_sets(frame, terms: Sequence[str] = TWO_TERMS) -> list[tuple[str, Any, list[CostModel]]]:
    """Rows that may share a plot of curves, each set with its name and fits; sets with one context are left out."""
    sets = []
    for values, rows in groups(frame, (*COMPARED, "boundary")).items():
        shared = dict(zip((*COMPARED, "boundary"), values, strict=True))
        arms = rows[rows["arm"] != "page_read"]
        if arms.empty or int(arms.groupby("batch")["context_tokens"].nunique().max()) < 2:
            continue
        words = [
            f"p{shared['world']}",
            shared["dtype"],
            shared["mix"],
            f"q{shared['query_len']}",
            shared["cache"],
            shared["launch"],
        ]
        words += [
            f"{name.split('_')[0]}{shared[name]}" for name in ("rows_padded", "shared_prefix_tokens") if shared[name]
        ]
        fits = [_try_fit(part, terms) for part in groups(arms, VARIANT).values()]
        sets.append(("_".join([*words, *shared["boundary"].split()]), rows, [m for m in fits if m]))
    return sets


def pair_table(found: Sequence[Comparison]):
    """All pairs as one table for reading: what, where, both times, the ratio with its interval, and the verdict."""
    import pandas

    columns = ["arm", "form", "exchange", "queries", "world", "dtype", "query_len", "mix", "context_tokens", "batch", "cache_state",
               "tp_us", "cp_us", "ratio", "ratio_low", "ratio_high", "verdict", "unsteady"]  # fmt: skip
    return (
        pandas.concat([c.pairs[columns] for c in found], ignore_index=True)
        if found
        else pandas.DataFrame(columns=columns)
    )

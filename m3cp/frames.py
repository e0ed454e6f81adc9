"""Rows as frames: where they come from, what they may be mixed with, and how noisy they are.

The handshake of the analysis side: `table` makes the frame that fits, comparisons and plots take. Pandas is imported
where it is used.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from m3cp import records, traffic
from m3cp.shapes import LAYER_ARMS, IndexerShape, Point

ROOT = records.PACKAGE.parent

MIB = 2**20
PAUSE_S = 1800.0  # between rows, and they are of two sittings

# What the timed region may hold without being another experiment; anything else ("attention", a projection, a
# surrounding layer) moves the boundary, and rows with different boundaries never meet in a fit or a plot.
OUTSIDE = ("attention", "projection", "layer", "weights")

CHARGED = ("extra_projection",)  # a cost that CP with replicated queries has and TP has not: part of the comparison

# Rows that differ in any of these are different experiments: they never meet in one fit.
LABEL = (
    "arm", "form", "exchange", "queries", "threshold_blocks", "world", "dtype", "query_len", "shape", "mix",
    "cache_state", "launch", "node", "code_hash", "region",
)  # fmt: skip


def boundary(timed_region: Sequence[str]) -> str:
    """What stands in a timed region beyond the indexer itself, as one word list; "" for the indexer alone."""
    return " ".join(
        sorted(stage for stage in timed_region if stage not in CHARGED and any(word in stage for word in OUTSIDE))
    )


def table(rows: Sequence[records.Row], source: str = "measured here"):
    """The frame that everything here takes: `records.frame` plus point, code_hash, commit, sitting, units, region, boundary, source.

    Args:
        rows: of any runs; those of `LAYER_ARMS` are left out (`m3cp.layer_shares` takes them). Of timed rows that share Point, node,
            code, timed region and process the newest counts: it was asked for again.
        source: where they come from, in words, for legends: "measured here", "recorded", "synthetic", ...
    """
    rows = [row for row in rows if row.point.arm not in LAYER_ARMS]
    keys = [(r.point, r.node, r.provenance.get("code_hash"), tuple(r.timed_region), r.process) for r in rows]
    timed_rows = [n for n, row in enumerate(rows) if row.status == "ok"]
    newest = {keys[n]: n for n in sorted(timed_rows, key=lambda n: rows[n].provenance.get("time_utc") or "")}  # files need not be in order
    rows = [row for n, (key, row) in enumerate(zip(keys, rows, strict=True)) if row.status != "ok" or newest[key] == n]
    data = records.frame(rows)
    data["point"] = [row.point for row in rows]
    data["code_hash"] = [row.provenance.get("code_hash", "unknown") for row in rows]
    data["units"] = [_units(row) for row in rows]
    data["commit"] = [row.provenance.get("commit", "unknown") for row in rows]
    data["sitting"] = _sittings(rows)
    data["region"] = [tuple(row.timed_region) for row in rows]
    data["boundary"] = [boundary(row.timed_region) for row in rows]
    data["overlap_bf16"] = [row.extra.get("overlap_bf16") for row in rows]
    data["source"] = source
    # The limit is computed, so it is computed from the best page read of all these rows: while a run is under way the
    # best is not known yet, and what the rows hold then may be slower than a later measurement.
    floors = data[(data["arm"] == "page_read") & (data["status"] == "ok") & (data["distinct_bytes_read"] > 0)]
    for node, reads in floors.groupby("node"):
        best = (reads["distinct_bytes_read"] / reads["median_us"]).max()
        mine = (data["node"] == node) & (data["status"] == "ok")
        data.loc[mine, "limit_us"] = data.loc[mine, "distinct_bytes_read"] / best
    return data


def _sittings(rows: Sequence[records.Row]) -> list[int]:
    """Of each row the ordinal of its sitting: rows of a node without a pause longer than PAUSE_S. Another one may be on another machine of the name."""
    times = [row.provenance.get("time_utc") for row in rows]
    seconds = [datetime.fromisoformat(t).timestamp() if t else math.nan for t in times]
    begins = {}
    for node in {row.node for row in rows}:
        known = sorted({at for at, row in zip(seconds, rows, strict=True) if row.node == node and not math.isnan(at)})
        begins[node] = [b for a, b in itertools.pairwise(known) if b - a > PAUSE_S]
    return [0 if math.isnan(at) else bisect.bisect_right(begins[row.node], at) for at, row in zip(seconds, rows, strict=True)]


def overlap_words(rows) -> str:
    """What stands beside every figure of an fp8 cache: how far its choice is bf16's; "" where no row is fp8.

    Args:
        rows: of `table`, or pairs of them: columns dtype and overlap_bf16, the share of bf16's chosen blocks that fp8
            chooses too (`testing.overlap_bf16`).
    """
    narrow = rows[rows["dtype"].str.startswith("fp8")]
    if narrow.empty:
        return ""
    known = [float(v) for v in narrow["overlap_bf16"] if not missing(v)]
    if not known:
        return "how many of bf16's blocks fp8 chooses is not known here"
    low, high = min(known), max(known)
    shared = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    return f"fp8 chooses {shared} of bf16's blocks"


def _units(row: records.Row) -> int:
    """Compute units of the GPU that a row was measured on; 0 where it names none."""
    gpus = row.provenance.get("gpus") or [{}]
    return int(gpus[0].get("units") or 0)


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
        p.name: p for base in ("measured", "runs") for p in sorted((root / "data" / base).glob("*")) if p.is_dir() and records.rows_files(p)
    }
    if run:
        for folder in (Path(run), root / run, kept.get(run)):
            if folder and folder.is_dir() and records.rows_files(folder):
                return folder
        raise FileNotFoundError(
            f"run={run!r}: no {records.ROWS_FILE} there; known runs: {', '.join(kept) or 'none yet'}"
        )
    local = sorted((root / "data" / "runs").glob(f"*/{records.ROWS_FILE}"), key=lambda p: p.stat().st_mtime_ns)
    recorded = sorted((root / "data" / "measured").glob(f"*/{records.ROWS_FILE}"))
    if not local and not recorded:
        raise FileNotFoundError("run='': no run yet under data/runs or data/measured; `m3cp sweep` makes one")
    return (local[-1] if local else recorded[0]).parent


def default_node() -> str:
    """The run that a decision is about when none is named: the latest local run on GPUs, else the first recorded node.

    Raises:
        FileNotFoundError: neither is there.
    """
    measured = sorted((ROOT / "data" / "measured").glob(f"*/{records.ROWS_FILE}"))
    local = (ROOT / "data" / "runs").glob(f"*/{records.ROWS_FILE}")
    for path in sorted(local, key=lambda p: p.stat().st_mtime_ns, reverse=True):
        rows = records.load(path)
        if any(row.status == "ok" and row.provenance.get("gpus") for row in rows):
            return str(path.parent)
    if not measured:
        raise FileNotFoundError("no run on GPUs under data/runs and no recorded node under data/measured")
    return str(measured[0].parent)


def require_same(frame, fields: Sequence[str], what: str) -> None:
    """Raise when rows that are about to share a plot or a fit are different experiments.

    Raises:
        ValueError: naming the fields that differ and their values.
    """
    present = {name: {None if missing(v) else v for v in frame[name]} for name in fields}
    differ = {name: sorted(map(str, values)) for name, values in present.items() if len(values) > 1}
    if differ:
        words = "; ".join(f"{name}: {', '.join(values)}" for name, values in differ.items())
        raise ValueError(f"{what}: rows of different experiments must not be mixed ({words})")


def timed(frame):
    """The rows that have a time: status "ok"."""
    return frame[frame["status"] == "ok"]


def groups(frame, fields: Sequence[str] = LABEL) -> dict[tuple, Any]:
    """Rows that may share a fit: {values of `fields`: frame}, timed rows only, in order of first appearance."""
    return split(timed(frame), fields)


def split(frame, fields: Sequence[str]) -> dict[tuple, Any]:
    found: dict[tuple, list[int]] = {}
    for position, values in enumerate(zip(*(frame[name] for name in fields), strict=True)):
        found.setdefault(tuple(None if missing(v) else v for v in values), []).append(position)
    return {values: frame.iloc[positions] for values, positions in found.items()}


def missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


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
    rows = records.load(folder)
    if not any(row.status == "ok" and row.point.arm not in LAYER_ARMS for row in rows):
        error = next((row.error for row in rows if row.error), "")
        raise ValueError(f"run={run!r}: {folder.name} has no timed row of the indexer" + (f"; the first error was {error!r}" if error else ""))
    frame = table(rows, source=source)
    commits = sorted(set(timed(frame)["commit"]))  # what was skipped ran no code
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


def measurement_noise(rows) -> float:
    """Relative standard error of the rows' medians, pooled: from the rounds of each row and from repeats of a Point.

    Repeats in fresh processes (the row's `process`) show more spread than rounds do; the larger of the two counts.
    """
    within = []
    for samples in rows["samples_us"]:
        if len(samples) > 2:
            ordered = sorted(samples)
            quarter = len(ordered) // 4
            spread = ordered[-1 - quarter] - ordered[quarter]
            within.append(1.2533 * spread / 1.349 / ordered[len(ordered) // 2] / math.sqrt(len(ordered)))
    repeats: dict[Point, list[float]] = {}
    for point, median_us in zip(rows["point"], rows["median_us"], strict=True):
        repeats.setdefault(point, []).append(median_us)
    between = [float(np.std(v, ddof=1) / np.mean(v)) for v in repeats.values() if len(v) > 1]
    pooled = [math.sqrt(float(np.mean(np.square(v)))) for v in (within, between) if v]
    return max(pooled, default=0.0)

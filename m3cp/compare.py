"""Two runs of the same Points, side by side: is the second faster, slower, or the same, and how sure is that?

The ratio of medians, B over A, with a bootstrap interval: processes are drawn first where a Point has several rows, then
rounds. Where a row is unsteady its probe's drift widens the interval. Runs that differ in what makes a measurement
another experiment are refused, by name, unless the difference is named.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from m3cp import frames, plots, records
from m3cp.shapes import IndexerShape, Point, require

SAME, FASTER, SLOWER, UNDECIDED = "SAME", "FASTER", "SLOWER", "UNDECIDED"
TOLERANCE = 0.03  # ratios this close to 1 are called the same
DRAWS, COVERAGE = 2000, 0.95
DRAWN = 60  # Points of a figure: of more, those furthest from 1
CLOCK_SLACK = 0.05
# What must be equal unless it is named, and how a row says it.
FIELDS = ("shape", "cache_state", "timed_region", "clocks", "variables")
VARIABLES = ("NCCL_", "RCCL_", "HSA_", "TORCH_SYMM_MEM")  # of the environment, that steer an exchange


@dataclass(frozen=True)
class Verdict:
    """One Point in two runs.

    Args:
        point: as A has it.
        a_us, b_us: medians, microseconds a call.
        ratio, low, high: B over A, with its interval of `COVERAGE`.
        word: SAME, FASTER, SLOWER or UNDECIDED, of B.
        processes: rows on either side; 1 and 1 hold no spread between processes.
    """

    point: Point
    a_us: float
    b_us: float
    ratio: float
    low: float
    high: float
    word: str
    processes: tuple[int, int]


def word(low: float, high: float, tolerance: float = TOLERANCE) -> str:
    """What an interval of the ratio B over A says.

    SAME: all of it within the tolerance of 1. FASTER, SLOWER: all of it on one side of 1, and not SAME. UNDECIDED: the
    rest: 1 is inside, and so are ratios beyond the tolerance.
    """
    if 1 - tolerance <= low and high <= 1 + tolerance:
        return SAME
    return FASTER if high < 1 else SLOWER if low > 1 else UNDECIDED


def interval(a: Sequence[records.Row], b: Sequence[records.Row]) -> tuple[float, float, float]:
    """(ratio of medians, low, high) of B over A, for rows of one Point; the same rows give the same numbers."""
    random = np.random.default_rng(zlib.crc32(a[0].point.label.encode()))
    medians = [_draws(rows, random) for rows in (a, b)]
    ratio = float(np.median(np.concatenate([r.samples_us for r in b])) / np.median(np.concatenate([r.samples_us for r in a])))
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(medians[1] / medians[0], [tail, 1 - tail])
    drift = max((abs(r.probe_drift or 0.0) for r in (*a, *b) if r.unsteady), default=0.0)
    return ratio, float(low) / (1 + drift), float(high) * (1 + drift)


def _draws(rows: Sequence[records.Row], random: np.random.Generator) -> np.ndarray:
    """Medians of resampled rows and rounds, `[DRAWS]`."""
    of_row = []
    for row in rows:
        samples = np.asarray(row.samples_us)
        of_row.append(np.median(samples[random.integers(len(samples), size=(DRAWS, len(samples)))], axis=1))
    chosen = random.integers(len(rows), size=(DRAWS, len(rows)))
    return np.median(np.stack(of_row)[chosen, np.arange(DRAWS)[:, None]], axis=1)


def compare(
    a: Iterable[records.Row], b: Iterable[records.Row], across: Sequence[str] = (), tolerance: float = TOLERANCE
) -> list[Verdict]:
    """A verdict for each Point that both have a time of, in A's order.

    Args:
        across: fields of `FIELDS` that may differ.

    Raises:
        ValueError: no Point in common, or a difference that was not named, with where it is and what it is.
    """
    for name in across:
        require("--across", name, name in FIELDS, f"among {', '.join(FIELDS)}")
    require("--tolerance", tolerance, 0 <= tolerance < 1, "from 0 to below 1")
    first, second = _timed(a), _timed(b)
    pairs = [(p, p) for p in first if p in second]
    loose = {_loose(p, across): p for p in second if p not in first}
    pairs += [(p, loose[_loose(p, across)]) for p in first if p not in second and _loose(p, across) in loose]
    if not pairs:
        every = {_loose(p, FIELDS): p for p in second}
        pairs = [(p, every[_loose(p, FIELDS)]) for p in first if _loose(p, FIELDS) in every]
        if not pairs:
            raise ValueError(f"no Point has a time in both runs ({len(first)} in A, {len(second)} in B)")
    _refuse([(first[p], second[q]) for p, q in pairs], across)
    verdicts = []
    for p, q in pairs:
        ratio, low, high = interval(first[p], second[q])
        a_us, b_us = (float(np.median(np.concatenate([r.samples_us for r in rows]))) for rows in (first[p], second[q]))
        verdicts.append(Verdict(p, a_us, b_us, ratio, low, high, word(low, high, tolerance), (len(first[p]), len(second[q]))))
    return verdicts


def _timed(rows: Iterable[records.Row]) -> dict[Point, list[records.Row]]:
    """Timed rows by Point; of rows that share a process number the newest, since that one was asked for again."""
    found: dict[Point, dict[int, records.Row]] = {}
    for row in rows:
        if row.status == "ok":
            found.setdefault(row.point, {})[row.process] = row
    return {point: list(by_process.values()) for point, by_process in found.items()}


def _loose(point: Point, across: Sequence[str]) -> Point:
    """The Point without what may differ."""
    plain = {"shape": {"shape": IndexerShape()}, "cache_state": {"cache": "cold"}}
    return replace(point, **{k: v for name in across for k, v in plain.get(name, {}).items()})


def _said(row: records.Row) -> dict[str, Any]:
    """A row's value of each of `FIELDS`."""
    variables = row.provenance.get("environment") or {}
    return {
        "shape": row.point.shape,
        "cache_state": row.cache_state,
        "timed_region": tuple(row.timed_region),
        "clocks": tuple(sorted((k, v) for gpu in row.provenance.get("clocks") or [] for k, v in gpu.items() if v is not None)),
        "variables": tuple(sorted((k, v) for k, v in variables.items() if k.startswith(VARIABLES))),
    }


def _equal(name: str, a: Any, b: Any) -> bool:
    if name != "clocks":
        return a == b
    if [k for k, _ in a] != [k for k, _ in b]:
        return False
    numbers = [(x, y) for (_, x), (_, y) in zip(a, b, strict=True) if isinstance(x, (int, float)) and isinstance(y, (int, float))]
    return all(abs(x - y) <= CLOCK_SLACK * max(abs(x), abs(y)) for x, y in numbers)


def _refuse(pairs: Sequence[tuple[list[records.Row], list[records.Row]]], across: Sequence[str]) -> None:
    found: dict[str, list[str]] = {}
    for a, b in pairs:
        for x, y in ((x, y) for x in a for y in b):
            here, there = _said(x), _said(y)
            for name in FIELDS:
                if name not in across and not _equal(name, here[name], there[name]):
                    found.setdefault(name, []).append(f"{x.point.label}: {_words(here[name])} in A, {_words(there[name])} in B")
    if found:
        lines = [f"  - {name} ({len(where)} pairs), first {where[0]}" for name, where in found.items()]
        raise ValueError(
            "these runs are different experiments:\n" + "\n".join(lines) + f"\ncompare all the same with --across {','.join(found)}"
        )


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join("=".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value) or "none"
    return str(value)


def beside(a: Sequence[records.Row], b: Sequence[records.Row]) -> list[str]:
    """What else differs between two runs, for their reader: nodes, code, commits, versions. Such runs may be compared."""
    lines = []
    for name, of in (
        ("node", lambda r: {r.node}),
        ("code", lambda r: {r.provenance.get("code_hash", "unknown")}),
        ("commit", lambda r: {str(r.provenance.get("commit", "unknown"))[:12]}),
        ("versions", lambda r: {f"{k} {v}" for k, v in r.provenance.get("versions", {}).items() if k in records.RUNTIME}),
    ):
        here, there = (set().union(*map(of, rows)) for rows in (a, b))
        if here != there:
            lines.append(f"  {name}: {', '.join(sorted(here - there)) or '-'} in A, {', '.join(sorted(there - here)) or '-'} in B")
    return lines


@plots.styled
def draw(verdicts: Sequence[Verdict], names: Mapping[str, str], tolerance: float = TOLERANCE):
    """A Figure: each Point's ratio and interval, one line a Point, in A's order; the band is what is called the same."""
    total = len(verdicts)
    furthest = sorted(range(total), key=lambda i: -abs(np.log(verdicts[i].ratio)))[:DRAWN]
    verdicts = [verdicts[i] for i in sorted(furthest)]
    colours = {SAME: "#777777", FASTER: "#0072b2", SLOWER: "#d55e00", UNDECIDED: "#cc79a7"}
    figure = Figure(figsize=(7.5, 1.3 + 0.17 * len(verdicts)), layout="constrained")
    axis = figure.add_subplot()
    axis.axvspan(1 - tolerance, 1 + tolerance, color="#eeeeee", zorder=0)
    axis.axvline(1, color="#333333", linewidth=0.8)
    for name, colour in colours.items():
        here = [(i, v) for i, v in enumerate(verdicts) if v.word == name]
        if here:
            y, found = zip(*here, strict=True)
            x = [v.ratio for v in found]
            reach = [[max(0, v.ratio - v.low) for v in found], [max(0, v.high - v.ratio) for v in found]]
            axis.errorbar(x, y, xerr=reach, fmt="o", color=colour, markersize=3.5, linewidth=1.2, label=f"{name} ({len(here)})")
    axis.set_yticks(range(len(verdicts)), [v.point.label for v in verdicts], fontsize=6)
    axis.set_ylim(len(verdicts) - 0.4, -0.6)
    axis.set_xlabel("time in B over time in A, ratio of medians with its 95% interval")
    some = f", the {DRAWN} of {total} Points furthest from 1" if total > DRAWN else ""
    axis.set_title(f"B = {names['b']} against A = {names['a']}{some}", fontsize=9)
    figure.legend(loc="outside upper right", ncols=4, fontsize=7, frameon=False)
    return figure


def main(
    run_a: str, run_b: str, across: Sequence[str] = (), tolerance: float = TOLERANCE, strict: bool = False, figures: Path | str = "figures"
) -> tuple[list[str], int]:
    """Lines to print and an exit status: 1 when a Point is SLOWER in B (with `strict`: or UNDECIDED), else 0.

    Raises:
        FileNotFoundError: no such run.
        ValueError: runs that can't be compared, and why.
    """
    folders = [frames.find_run(run) for run in (run_a, run_b)]
    a, b = (records.load(folder) for folder in folders)
    verdicts = compare(a, b, across, tolerance)
    names = {"a": folders[0].name, "b": folders[1].name}
    width = max(len(v.point.label) for v in verdicts)
    lines = [f"A = {names['a']} ({folders[0]}), B = {names['b']} ({folders[1]}); what differs beside the times:"]
    lines += beside(a, b) or ["  nothing that a row says"]
    lines += [f"{'Point':<{width}}  {'A us':>9} {'B us':>9}  B / A   95% interval"]
    lines += [
        f"{v.point.label:<{width}}  {v.a_us:9.2f} {v.b_us:9.2f}  {v.ratio:5.3f}  {v.low:5.3f} to {v.high:5.3f}  {v.word}"
        for v in verdicts
    ]
    counts = Counter(v.word for v in verdicts)
    lines += [", ".join(f"{counts[w]} {w}" for w in (SAME, FASTER, SLOWER, UNDECIDED))]
    if any(max(v.processes) == 1 for v in verdicts):
        lines += ["Points with one row a run: the spread between processes is not in their intervals"]
    commit = ", ".join(sorted({str(r.provenance.get("commit", "unknown")) for r in (*a, *b)}))
    name = f"compare_{names['a']}_{names['b']}"
    drawn = plots.save(draw(verdicts, names, tolerance), name, f"{names['a']}, {names['b']}", commit, figures)
    lines += [f"figure: {path}" for path in drawn]
    return lines, int(counts[SLOWER] > 0 or strict and counts[UNDECIDED] > 0)

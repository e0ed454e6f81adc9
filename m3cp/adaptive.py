"""What an adaptive call costs over the better of the two paths that it chooses between, against the aims for it.

An adaptive row (`threshold_blocks`) stands beside TP and plain CP of the same form at the same inputs; a sweep times all
three in alternating rounds (`data/grids/adaptive.json`). Its two aims are one-sided: at most so much, everywhere measured.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from m3cp import crossover, frames, records, traffic
from m3cp.shapes import Point, require, tokens_text

AIMED_US = {"replicated": 0.4, "gathered": 0.9}  # over the better path, by how CP's queries travel
CONFIDENCE, DRAWS = 0.95, 4000


@dataclass(frozen=True)
class Cost:
    """One adaptive row beside TP and CP of its shape and form; microseconds a call.

    Args:
        point: of the adaptive row.
        tp_us, cp_us, adaptive_us: medians.
        bound_us: with `CONFIDENCE` the adaptive call takes at most so much more than the better path.
        unsteady: whether the page-read probe drifted around any of the three.
    """

    point: Point
    tp_us: float
    cp_us: float
    adaptive_us: float
    bound_us: float
    unsteady: bool

    @property
    def over_us(self) -> float:
        """Over the better path, medians."""
        return self.adaptive_us - min(self.tp_us, self.cp_us)

    @property
    def aimed_us(self) -> float:
        """The aim for how its queries travel."""
        return AIMED_US[self.point.queries]

    @property
    def met(self) -> bool:
        """Whether the bound lies within the aim."""
        return self.bound_us <= self.aimed_us

    @property
    def blocks(self) -> int:
        """Sum of blocks of the batch, short requests included: what the threshold is held against."""
        return sum(self.point.shape.blocks(tokens) for tokens in traffic.context_lengths(self.point))

    @property
    def path(self) -> str:
        """ "TP" or "CP": which path the call took, as the kernel decides it from the lengths."""
        return "CP" if self.blocks > self.point.threshold_blocks else "TP"


def read(run: str = "") -> tuple[str, list[records.Row]]:
    """A run's name and its timed rows, the newest of each Point.

    Raises:
        ValueError: rows of several machines or code versions.
        FileNotFoundError: no such run.
    """
    folder = frames.find_run(run)
    rows = {r.point: r for r in records.scan(folder) if r.status == "ok"}
    kinds = {(r.node, r.provenance.get("code_hash", "unknown")) for r in rows.values()}
    require("run", run, len(kinds) <= 1, f"of one machine and one code version, found {sorted(kinds)}")
    return folder.name, list(rows.values())


def costs(rows: Iterable[records.Row]) -> tuple[list[Cost], list[Point]]:
    """What each adaptive row costs, and the adaptive Points that lack TP or CP beside them.

    Raises:
        ValueError: a row with a threshold that ran another path.
    """
    by_point = {r.point: r for r in rows}
    found, alone = [], []
    for point, row in by_point.items():
        if point.threshold_blocks is None:
            continue
        require(f"path of {point.label}", row.path, row.path == "adaptive", "adaptive: its Point has a threshold")
        cp = by_point.get(point.replace(threshold_blocks=None))
        tp = by_point.get(point.replace(arm="tp", exchange=None, queries=None, threshold_blocks=None))
        if tp is None or cp is None:
            alone.append(point)
            continue
        unsteady = any(r.unsteady for r in (tp, cp, row))
        found.append(Cost(point, tp.median_us, cp.median_us, row.median_us, upper_bound(tp, cp, row), unsteady))
    order = {"replicated": 0, "gathered": 1}
    return sorted(found, key=lambda c: (order[c.point.queries], c.point.world, c.point.dtype, c.point.mix, c.point.batch, c.point.context_tokens, c.point.threshold_blocks)), alone


def upper_bound(tp: records.Row, cp: records.Row, adaptive: records.Row) -> float:
    """Upper end of the one-sided interval of adaptive - min(TP, CP), medians, by a bootstrap over each row's rounds.

    The better path is found anew in each draw, so near break-even, where either may be it, the bound is the larger.
    """
    rng = np.random.default_rng(zlib.crc32(adaptive.point.label.encode()))
    a, b, c = (np.median(rng.choice(row.samples_us, size=(DRAWS, len(row.samples_us))), axis=1) for row in (tp, cp, adaptive))
    return float(np.quantile(c - np.minimum(a, b), CONFIDENCE))


def summary(found: Sequence[Cost]) -> list[str]:
    """A line for each way that queries travel: whether the aim is met everywhere, and where it is furthest from it."""
    lines = []
    for queries, aimed in AIMED_US.items():
        mine = [c for c in found if c.point.queries == queries]
        if not mine:
            lines.append(f"{queries}: not measured (aim: at most {aimed:g} µs over the better path)")
            continue
        worst, met = max(mine, key=lambda c: c.bound_us), sum(c.met for c in mine)
        taken = " and ".join(f"{n} on {path}'s path" for path in ("TP", "CP") if (n := sum(c.path == path for c in mine)))
        verdict = "met everywhere measured" if met == len(mine) else f"missed at {len(mine) - met} of {len(mine)}"
        lines.append(
            f"{queries}: {verdict}; {len(mine)} rows, {taken}; the highest bound is {worst.bound_us:+.2f} µs at {_where(worst.point)} (aim: at most {aimed:g} µs over the better path)"
        )
    return lines


def _where(point: Point) -> str:
    extra = [point.dtype] * (point.dtype != "bf16") + [point.mix] * (point.mix != "uniform") + [f"q{point.query_len}"] * (point.query_len > 1)
    return ", ".join([f"{tokens_text(point.context_tokens)}, {point.batch}", *extra])


def main(run: str = "") -> list[str]:
    """What `m3cp fit --adaptive` prints: a line an adaptive row, and whether the aims are met.

    Raises:
        ValueError: no adaptive row with TP and CP beside it, or as `read`.
        FileNotFoundError: no such run.
    """
    name, rows = read(run)
    found, alone = costs(rows)
    missing = "; ".join(p.label for p in alone)
    require("run", run, len(found) > 0, "a run with adaptive rows, TP and CP beside them: `m3cp sweep data/grids/adaptive.json` measures them" + f" (without TP or CP: {missing})" * bool(alone))
    head = ["context, batch", "P", "form", "queries", "TP µs", "CP µs", "adaptive µs", "took", "over the better µs", "at most (95%)", "aim"]
    table = [
        [_where(c.point), str(c.point.world), c.point.form.replace("_", " "), c.point.queries, f"{c.tp_us:.2f}", f"{c.cp_us:.2f}", f"{c.adaptive_us:.2f}",
         f"{c.path}, {c.blocks} of {c.point.threshold_blocks} blocks", f"{c.over_us:+.2f}", f"{c.bound_us:+.2f}",
         f"{c.aimed_us:g}: {'met' if c.met else 'missed'}" + ", unsteady" * c.unsteady]
        for c in found
    ]  # fmt: skip
    note = (
        "Microseconds a call, slowest rank, median of the rounds; the bound is one-sided. Took: which path, from the sum of blocks against the "
        "threshold, which is the kernel's own rule; rows hold no counts of the device."
    )
    lines = [f"{name}: {rows[0].node}", "", *crossover.markdown(head, table), "", note, *summary(found)]
    return lines + ([f"Without TP or CP beside them, so not judged: {missing}"] if alone else [])

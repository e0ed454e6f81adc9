"""Predictions that are written down before a run, and how they came out: for numbers of ranks that nobody has measured.

A file of predictions is made from the recorded rows of fewer ranks (`crossover.across_worlds`: bytes are known, what a
further peer costs rests on a stated prior) and never changed afterwards; `against` puts a later run's rows beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from m3cp import crossover, frames, grid, records
from m3cp.fit import ALL_TERMS, CostModel
from m3cp.shapes import Point, require

SCHEMA = 1
# What a Point must have in common with the rows that a model was fitted to.
ALIKE = ("arm", "form", "exchange", "queries", "threshold_blocks", "dtype", "query_len", "shape", "launch", "cache", "max_context", "mix")


def models(run: str) -> tuple[frames.Loaded, list[CostModel]]:
    """A run and the fits across worlds of every comparison in it that has both arms, most rows first.

    Raises:
        FileNotFoundError, ValueError: as `frames.load_run`.
    """
    loaded = frames.load_run(run or frames.default_node())
    fitted = [c for c in crossover.comparisons(loaded.frame, ALL_TERMS, draws=2) if c.tp is not None and c.cp is not None]
    return loaded, [model for c in fitted for model in crossover.across_worlds(loaded.frame, c)]


def make(run: str, given: Any, out: Path, world: int | None = None) -> list[str]:
    """Write predictions for a grid's Points of arms tp and cp, and say in words what they are.

    Args:
        run: whose rows the models are fitted to.
        given: as `grid.read_grid` takes it.
        out: the file; it must not exist, since a prediction is not changed after the fact.
        world: only Points of so many ranks; None is all.

    Raises:
        ValueError: `out` exists, or no Point of the grid is of a kind that the run's rows have.
    """
    require("out", str(out), not out.exists(), "a file that does not exist yet: predictions are not changed afterwards")
    loaded, fitted = models(run)
    points = [p for p in grid.read_grid(given, "cuda") if p.arm in ("tp", "cp") and (world is None or p.world == world)]
    found = []
    for point in points:
        model = next((m for m in fitted if _alike(m, point)), None)
        if model is not None:
            found.append({"point": point.to_dict(), **dataclasses.asdict(model.predict(point))})
    require("grid", str(given), bool(found), f"with Points of a kind that {loaded.name} has rows of (they agree in {', '.join(ALIKE)})")
    made = {
        "schema": SCHEMA, "made_utc": datetime.now(UTC).isoformat(timespec="seconds"), "run": loaded.name, "commit": loaded.commit,
        "code_hash": sorted(set(loaded.frame["code_hash"])), "predictions": found,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps(made, indent=1))
    os.replace(part, out)
    assumed = sorted({p["assumed"] for p in found} - {""})
    return [f"{len(found)} of {len(points)} Points predicted from {loaded.name}: {out}", *(f"assumed: {text}" for text in assumed)]


def _alike(model: CostModel, point: Point) -> bool:
    return all(getattr(model.template, name) == getattr(point, name) for name in ALIKE)


def against(path: Path, run: str) -> list[str]:
    """Markdown lines: every prediction of a file beside what a run measured, and how many lie inside their intervals.

    Raises:
        ValueError: no prediction of the file was measured by the run, or a file of another version.
        FileNotFoundError: no such file or run.
    """
    said = json.loads(path.read_text())
    require("schema", said.get("schema"), said.get("schema") == SCHEMA, f"{SCHEMA}")
    folder = frames.find_run(run or frames.default_node())
    measured = {row.point: row for row in records.scan(folder) if row.status == "ok"}
    lines, errors, inside = [], {}, {}
    for entry in said["predictions"]:
        point = Point.from_dict(entry["point"])
        if point not in measured:
            continue
        us = measured[point].median_us
        way = " ".join(str(v) for v in (point.arm, point.form, point.exchange, point.queries) if v is not None)
        errors.setdefault(way, []).append(us / entry["us"] - 1)
        inside.setdefault(way, []).append(entry["low_us"] <= us <= entry["high_us"])
        lines.append([
            f"{crossover.tokens_about(point.context_tokens)}, {point.batch}", way, f"{entry['us']:.1f} ({entry['low_us']:.1f} to {entry['high_us']:.1f})",
            f"{us:.1f}", f"{errors[way][-1]:+.1%}", "" if inside[way][-1] else "outside",
        ])  # fmt: skip
    require("run", run, bool(lines), f"one that measured Points of {path.name}")
    table = [
        [way, str(len(errors[way])), f"{statistics.median(map(abs, errors[way])):.1%}", f"{max(errors[way], key=abs):+.1%}", f"{sum(inside[way])} of {len(inside[way])}"]
        for way in errors
    ]  # fmt: skip
    return [
        f"Predicted {said['made_utc'][:10]} from {said['run']} (commit {said['commit'][:12]}), measured by {folder.name}:", "",
        *crossover.markdown(["arm", "points", "median error", "worst", "inside their interval"], table), "",
        *crossover.markdown(["context, batch", "arm", "predicted µs, 95%", "measured µs", "measured / predicted", ""], lines),
    ]  # fmt: skip

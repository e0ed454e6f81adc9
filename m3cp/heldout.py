"""How good a cost model is where it was not fitted: rows left out by context, batch or mix, against a straight line.

What counts is the difference CP - TP near break-even, not a few percent of each arm; so that is checked too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3cp.crossover import Comparison, arm_frames, break_even_model
from m3cp.fit import ALL_TERMS, TWO_TERMS, CostModel, fit_model
from m3cp.frames import LABEL, split, timed
from m3cp.shapes import require

HELD_OUT = ("context_tokens", "batch", "mix")
NEAR = 4.0  # a point is near break-even within this factor of its context
ARM_ERROR, DIFFERENCE_US, DIFFERENCE_SHARE, BREAK_EVEN_ERROR = 0.05, 0.5, 0.10, 0.15  # what is aimed at


def held_out(rows, by: str, terms: Sequence[str] = ALL_TERMS):
    """Predictions for each value of `by` from the rows that don't have it, beside a straight line's.

    Args:
        rows: of one arm and label; several mixes are allowed for `by="mix"` (the imbalance term explains them).
        by: "context_tokens", "batch" or "mix".
        terms: of the cost model; the straight line has two.

    Returns:
        A frame with context_tokens, batch, mix, measured_us, model_us, line_us, model_error and line_error (relative
        to the measurement); empty where nothing can be left out.

    Raises:
        ValueError: another `by`.
    """
    import pandas

    require("by", by, by in HELD_OUT, f"one of {', '.join(HELD_OUT)}")
    read = timed(rows)
    read = read[read["bytes_read"] > 0]
    lines = []
    for value in sorted(set(read[by])):
        train, test = read[read[by] != value], read[read[by] == value]
        if len(set(train["distinct_bytes_read"])) < 3:
            continue
        model = fit_model(train, terms, vary=_vary(train))
        plain = train[train["mix"] == train["mix"].value_counts().idxmax()]
        line = fit_model(plain, TWO_TERMS) if len(set(plain["distinct_bytes_read"])) > 1 else None
        for point, measured in zip(test["point"], test["median_us"], strict=True):
            guess, straight = model.us(point), line.us(point) if line else math.nan
            lines.append(
                (
                    point.context_tokens,
                    point.batch,
                    point.mix,
                    measured,
                    guess,
                    straight,
                    guess / measured - 1,
                    straight / measured - 1,
                )
            )
    names = ["context_tokens", "batch", "mix", "measured_us", "model_us", "line_us", "model_error", "line_error"]
    return pandas.DataFrame.from_records(lines, columns=names)


def _vary(rows) -> tuple[str, ...]:
    return ("mix",) if len(set(rows["mix"])) > 1 else ()


def error_table(frame, terms: Sequence[str] = ALL_TERMS):
    """Median and worst relative errors of every arm: in sample, and held out by batch, context and mix.

    A straight line is fitted to the same rows. Arms with fewer than four rows that read keys are left out.
    """
    import pandas

    lines = []
    for values, rows in split(timed(frame), [n for n in LABEL if n != "mix"]).items():
        label = dict(zip([n for n in LABEL if n != "mix"], values, strict=True))
        read = rows[rows["bytes_read"] > 0]
        if label["arm"] == "page_read" or len(read) < 4 or len(set(read["distinct_bytes_read"])) < 3:
            continue
        model, line = (
            fit_model(read, terms, vary=_vary(read)),
            fit_model(read[read["mix"] == "uniform"], TWO_TERMS) if (read["mix"] == "uniform").sum() > 1 else None,
        )
        name = {
            k: label[k] for k in ("arm", "form", "exchange", "queries", "world", "dtype", "query_len", "cache_state")
        }
        lines.append(
            {
                **name,
                "held_out": "nothing",
                **_summary(np.abs(model.fit.residuals), np.abs(line.fit.residuals) if line else np.empty(0)),
            }
        )
        for by in ("batch", "context_tokens", "mix"):
            found = held_out(read if by == "mix" else read[read["mix"] == "uniform"], by, terms)
            if len(found):
                lines.append(
                    {**name, "held_out": by, **_summary(found["model_error"].abs(), found["line_error"].abs())}
                )
    return pandas.DataFrame.from_records(lines)


def _summary(model: Any, line: Any) -> dict[str, Any]:
    found = {"rows": len(model)}
    for name, errors in (("model", np.asarray(model, dtype=float)), ("line", np.asarray(line, dtype=float))):
        errors = errors[np.isfinite(errors)]
        found[f"{name}_median"] = float(np.median(errors)) if len(errors) else math.nan
        found[f"{name}_worst"] = float(errors.max()) if len(errors) else math.nan
    return found


def differences(comparison: Comparison, terms: Sequence[str] = ALL_TERMS):
    """Predicted against measured CP - TP at the points near break-even, in sample and with their context left out.

    Returns:
        A frame with context_tokens, batch, measured_us, in_sample_us, held_out_us (NaN where nothing can be left
        out), allowed_us (the larger of 0.5 us and a tenth), in_sample_ok, held_out_ok.
    """
    import pandas

    tp, cp = arm_frames(comparison)
    lines, models = [], (fit_model(tp, terms), fit_model(cp, terms))
    centres = {
        a.at: a.value
        for a in (*break_even_model(*models, sorted(set(comparison.pairs["batch"])), draws=50), *comparison.measured)
        if a.value
    }
    left_out: dict[int, tuple[CostModel, CostModel] | None] = {}
    for _, pair in comparison.pairs.iterrows():
        context, batch = int(pair["context_tokens"]), int(pair["batch"])
        centre = centres.get(batch)
        if not pair["read"] or not centre or not centre / NEAR <= context <= centre * NEAR:
            continue
        if context not in left_out:
            rest = [arm[(arm["context_tokens"] != context) & (arm["bytes_read"] > 0)] for arm in (tp, cp)]
            enough = all(len(set(arm["distinct_bytes_read"])) > 2 for arm in rest)
            left_out[context] = tuple(fit_model(arm, terms) for arm in rest) if enough else None
        inside = _difference(models, context, batch)
        outside = _difference(left_out[context], context, batch) if left_out[context] else math.nan
        allowed = max(DIFFERENCE_US, DIFFERENCE_SHARE * abs(pair["delta_us"]))
        lines.append(
            (
                context,
                batch,
                pair["delta_us"],
                inside,
                outside,
                allowed,
                abs(inside - pair["delta_us"]) <= allowed,
                abs(outside - pair["delta_us"]) <= allowed,
            )
        )
    names = [
        "context_tokens",
        "batch",
        "measured_us",
        "in_sample_us",
        "held_out_us",
        "allowed_us",
        "in_sample_ok",
        "held_out_ok",
    ]
    return pandas.DataFrame.from_records(lines, columns=names)


def _difference(models: tuple[CostModel, CostModel], context: int, batch: int) -> float:
    tp, cp = models
    return cp.us(cp.point(context, batch)) - tp.us(tp.point(context, batch))


@dataclass(frozen=True)
class Target:
    """One aim of the model: what it is, what it came to, what was allowed, and whether it was met (None: no data)."""

    name: str
    value: float
    allowed: float
    met: bool | None

    @property
    def text(self) -> str:
        """The aim as a line."""
        word = {True: "met", False: "MISSED", None: "no data"}[self.met]
        return f"{self.name}: {self.value:.3g} (allowed {self.allowed:.3g}), {word}"


def targets(comparison: Comparison, terms: Sequence[str] = ALL_TERMS) -> list[Target]:
    """The aims of the cost model for one comparison: each arm, the difference near break-even, break-even itself."""
    tp, cp = arm_frames(comparison)
    models, found = (fit_model(tp, terms), fit_model(cp, terms)), []
    for model in models:
        error = float(np.median(np.abs(model.fit.residuals)))
        found.append(Target(f"{model.arm}: median error of a row", error, ARM_ERROR, error <= ARM_ERROR))
    near = differences(comparison, terms)
    for name, column in (("in sample", "in_sample_us"), ("context held out", "held_out_us")):
        share = (near[column] - near["measured_us"]).abs() / near["allowed_us"]
        share = share[np.isfinite(share)]
        worst = float(share.max()) if len(share) else math.nan
        found.append(
            Target(
                f"difference near break-even, {name}: worst error over what is allowed",
                worst,
                1.0,
                worst <= 1.0 if len(share) else None,
            )
        )
    modelled = {a.at: a for a in break_even_model(*models, sorted(set(comparison.pairs["batch"])), draws=50)}
    for answer in comparison.measured:
        if answer.value and modelled[answer.at].value and answer.answer == "crosses":
            error = abs(modelled[answer.at].value / answer.value - 1)
            found.append(
                Target(
                    f"break-even at batch {answer.at:.0f}: error against the measured one",
                    error,
                    BREAK_EVEN_ERROR,
                    error <= BREAK_EVEN_ERROR,
                )
            )
    return found


def markdown(frame, terms: Sequence[str] = ALL_TERMS) -> str:
    """The error table of `error_table` as Markdown, in percent; what `m3cp fit --errors` prints."""
    table = error_table(frame, terms)
    lines = [
        "| arm | left out | rows | model: median, worst | straight line: median, worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for _, row in table.iterrows():
        kind = "/".join(str(row[k]) for k in ("arm", "form", "exchange", "queries") if isinstance(row[k], str))
        state = (
            f"{kind} P={row['world']} {row['dtype']}"
            + (f" q{row['query_len']}" if row["query_len"] > 1 else "")
            + f" {row['cache_state']}"
        )
        show = [
            f"{100 * row[f'{n}_median']:.1f}%, {100 * row[f'{n}_worst']:.0f}%"
            if np.isfinite(row[f"{n}_median"])
            else "-"
            for n in ("model", "line")
        ]
        lines.append(f"| {state} | {row['held_out'].replace('_tokens', '')} | {row['rows']} | {show[0]} | {show[1]} |")
    return "\n".join(lines)


def main(run: str = "") -> list[str]:
    """What `m3cp fit --errors` does: the error tables, the aims, and what moves the line; returns the lines to print.

    Raises:
        ValueError, FileNotFoundError: in words, as the functions called do.
    """
    from m3cp.crossover import comparisons, grids, movers
    from m3cp.frames import load_run

    loaded = load_run(run)
    lines = [f"Errors of the cost model on {loaded.name}", "", markdown(loaded.frame)]
    for comparison in grids(comparisons(loaded.frame, ALL_TERMS, draws=100)):
        lines += ["", comparison.name]
        if comparison.tp is None or comparison.cp is None:
            lines.append("  too few sizes for a fit")
            continue
        if min(len(comparison.tp.fit.residuals), len(comparison.cp.fit.residuals)) >= 4:
            lines += [f"  {target.text}" for target in targets(comparison)]
        lines += [f"  {answer.text}" for answer in (*comparison.measured, *comparison.model)]
        known = [int(a.at) for a in comparison.model if a.answer == "crosses"] or [
            int(b) for b in comparison.pairs["batch"]
        ]
        lines += [f"  {line}" for line in movers(comparison.tp, comparison.cp, known[len(known) // 2])]
    return lines

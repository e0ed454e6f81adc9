"""How good a cost model is where it was not fitted: rows left out by context, batch or mix, against a straight line.

What counts is the difference CP - TP near break-even, not a few percent of each arm; so that is checked too. Where the
measurement's own interval is wider than the error allowed and holds the modelled value, it can tell neither a hit nor a
miss: such points and lines are counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3cp.crossover import (
    Comparison,
    across_worlds,
    arm_frames,
    break_even_model,
    comparisons,
    grids,
    movers,
    tokens_about,
)
from m3cp.fit import ALL_TERMS, TWO_TERMS, CostModel, fit_model, fittable
from m3cp.frames import LABEL, split, timed
from m3cp.shapes import require

STATE = ("arm", "form", "exchange", "queries", "world", "dtype", "query_len", "cache_state")  # what tells arms apart here
HELD_OUT = ("context_tokens", "batch", "mix")
LEAST_ROWS = 8  # of an arm in the error table, and to predict others from: on fewer the model is little more than a line
NEAR = 4.0  # a point is near break-even within this factor of its context
ARM_ERROR, DIFFERENCE_US, DIFFERENCE_SHARE, BREAK_EVEN_ERROR = 0.05, 0.5, 0.10, 0.15  # what is aimed at
UNDECIDED = "undecided by the measurement"


def held_out(rows, by: str, terms: Sequence[str] = ALL_TERMS):
    """Predictions for each value of `by` from the rows that don't have it, beside a straight line's.

    Args:
        rows: of one arm and label; several mixes are allowed for `by="mix"` (the imbalance term explains them).
        by: "context_tokens", "batch" or "mix".
        terms: of the cost model; the straight line has two.

    Returns:
        A frame with context_tokens, batch, mix, measured_us, model_us, line_us, model_error and line_error (relative
        to the measurement); empty where nothing can be left out. A value is left out only where eight rows or more are
        left to predict it from.

    Raises:
        ValueError: another `by`.
    """
    import pandas

    require("by", by, by in HELD_OUT, f"one of {', '.join(HELD_OUT)}")
    read, lines = fittable(timed(rows)), []
    for value in sorted(set(read[by])):
        train, test = read[read[by] != value], read[read[by] == value]
        if len(train) < LEAST_ROWS or len(set(train["distinct_bytes_read"])) < 3:
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

    A straight line is fitted to the same rows. Arms with fewer than eight rows to fit are left out: what is left out of
    those is mostly beyond the rest.
    """
    import pandas

    lines = []
    for values, rows in split(timed(frame), [n for n in LABEL if n != "mix"]).items():
        label = dict(zip([n for n in LABEL if n != "mix"], values, strict=True))
        read = fittable(rows)
        if label["arm"] == "page_read" or len(read) < LEAST_ROWS or len(set(read["distinct_bytes_read"])) < 3:
            continue
        model, line = (
            fit_model(read, terms, vary=_vary(read)),
            fit_model(read[read["mix"] == "uniform"], TWO_TERMS) if (read["mix"] == "uniform").sum() > 1 else None,
        )
        name = {k: label[k] for k in STATE}
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
    kinds = [f"{n}_{what}" for n in ("model", "line") for what in ("median", "worst")]
    return pandas.DataFrame.from_records(lines, columns=[*STATE, "held_out", "rows", *kinds])


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
        A frame with context_tokens, batch, measured_us and its interval's low_us and high_us, in_sample_us, held_out_us
        (NaN where nothing can be left out), beyond (the context left out is the shortest or the longest: held out is
        extrapolated), allowed_us (the larger of 0.5 us and a tenth), in_sample_ok, held_out_ok (within what is allowed),
        in_sample_undecided, held_out_undecided (`undecided`).
    """
    import pandas

    arms = [fittable(arm) for arm in arm_frames(comparison)]
    models = tuple(fit_model(arm, terms) for arm in arms)
    batches = sorted(set(comparison.pairs["batch"]))
    answers = (*break_even_model(*models, batches, draws=50), *comparison.measured)
    centres = {a.at: a.value for a in answers if a.value}
    low, high = (f(f(arm["context_tokens"]) for arm in arms) for f in (min, max))
    left_out: dict[int, tuple[CostModel, CostModel] | None] = {}
    lines = []
    for _, pair in comparison.pairs.iterrows():
        context, batch = int(pair["context_tokens"]), int(pair["batch"])
        centre = centres.get(batch)
        if not pair["read"] or pair["evicted"] or not centre or not centre / NEAR <= context <= centre * NEAR:
            continue
        if context not in left_out:
            rest = [arm[arm["context_tokens"] != context] for arm in arms]
            enough = all(len(set(arm["distinct_bytes_read"])) > 2 for arm in rest)
            left_out[context] = tuple(fit_model(arm, terms) for arm in rest) if enough else None
        measured, inside = float(pair["delta_us"]), _difference(models, context, batch)
        outside = _difference(left_out[context], context, batch) if left_out[context] else math.nan
        allowed, ends = max(DIFFERENCE_US, DIFFERENCE_SHARE * abs(measured)), (float(pair["delta_low"]), float(pair["delta_high"]))
        lines.append({
            "context_tokens": context, "batch": batch, "measured_us": measured, "low_us": ends[0], "high_us": ends[1], "in_sample_us": inside,
            "held_out_us": outside, "beyond": context in (low, high), "allowed_us": allowed, "in_sample_ok": abs(inside - measured) <= allowed,
            "held_out_ok": abs(outside - measured) <= allowed, "in_sample_undecided": undecided(inside, *ends, allowed),
            "held_out_undecided": undecided(outside, *ends, allowed),
        })  # fmt: skip
    names = ["context_tokens", "batch", "measured_us", "low_us", "high_us", "in_sample_us", "held_out_us", "beyond", "allowed_us", "in_sample_ok",
             "held_out_ok", "in_sample_undecided", "held_out_undecided"]  # fmt: skip
    return pandas.DataFrame.from_records(lines, columns=names)


def undecided(modelled: float, low: float, high: float, allowed: float) -> bool:
    """Whether a measurement can't judge a modelled value: its interval is wider than the error allowed, and holds the value."""
    return high - low > allowed and low <= modelled <= high


def _difference(models: tuple[CostModel, CostModel], context: int, batch: int) -> float:
    tp, cp = models
    return cp.us(cp.point(context, batch)) - tp.us(tp.point(context, batch))


@dataclass(frozen=True)
class Target:
    """One aim of the model.

    Args:
        name: what is aimed at.
        value: what it came to; NaN without data.
        allowed: the largest value that meets it.
        met: None where it is not judged.
        note: what to know about the value, in words.
        undecided: it is not judged because the measurement can't (`undecided`).
    """

    name: str
    value: float
    allowed: float
    met: bool | None
    note: str = ""
    undecided: bool = False

    @property
    def word(self) -> str:
        """The verdict: met, MISSED, undecided by the measurement, or not judged."""
        return UNDECIDED if self.undecided else {True: "met", False: "MISSED", None: "not judged"}[self.met]

    @property
    def text(self) -> str:
        """The aim as a line."""
        return f"{self.name}: {self.value:.3g} (allowed {self.allowed:.3g}), {self.word}{'; ' + self.note if self.note else ''}"


def targets(comparison: Comparison, terms: Sequence[str] = ALL_TERMS) -> list[Target]:
    """The aims of the cost model for one comparison: each arm, the difference near break-even, break-even itself.

    Break-even is judged where its measured neighbours lie within a factor of two: further apart, the interpolated value
    is no better known than the modelled one. Points and lines that the measurement can't judge (`undecided`) count neither
    as met nor as missed; the note counts all points, with how many of them those are.
    """
    models, found = tuple(fit_model(fittable(arm), terms) for arm in arm_frames(comparison)), []
    for model in models:
        error = float(np.median(np.abs(model.fit.residuals)))
        found.append(Target(f"{model.arm}: median error of a row", error, ARM_ERROR, error <= ARM_ERROR, f"worst {model.fit.worst:.1%}"))
    near = differences(comparison, terms)
    for name, kind, rows in (
        ("in sample", "in_sample", near),
        ("context held out", "held_out", near[~near["beyond"].astype(bool)]),
        ("context held out at an end of the range", "held_out", near[near["beyond"].astype(bool)]),
    ):
        share = ((rows[f"{kind}_us"] - rows["measured_us"]).abs() / rows["allowed_us"]).astype(float)  # a frame without rows has none
        known, open_ = np.isfinite(share), rows[f"{kind}_undecided"].astype(bool)
        decided, left = share[known & ~open_], int((known & open_).sum())
        if known.any():
            worst = float(decided.max()) if len(decided) else math.nan
            judged = None if name.endswith("range") or not len(decided) else worst <= 1.0
            note = f"{int((share <= 1).sum())} of {int(known.sum())} points within" + (f"; {left} of all {UNDECIDED}" if left else "")
            note += ", extrapolated" if name.endswith("range") else ""
            found.append(Target(f"CP - TP near break-even, {name}: worst error over what is allowed", worst, 1.0, judged, note, not len(decided)))
    modelled = {a.at: a for a in break_even_model(*models, sorted(set(comparison.pairs["batch"])), draws=50)}
    for answer in comparison.measured:
        if answer.value and modelled[answer.at].value and answer.answer == "crosses":
            error = abs(modelled[answer.at].value / answer.value - 1)
            sparse = answer.bracket[1] > 2 * answer.bracket[0]
            there = _difference(models, round(answer.value), int(answer.at))
            note = f"modelled CP - TP there {there:+.2f} us"
            note += f"; neighbours {tokens_about(answer.bracket[0])} and {tokens_about(answer.bracket[1])} too far apart" if sparse else ""
            open_ = not sparse and undecided(modelled[answer.at].value, answer.low, answer.high, BREAK_EVEN_ERROR * answer.value)
            note += f"; measured {answer.band}" if open_ else ""
            met = None if sparse or open_ else error <= BREAK_EVEN_ERROR
            found.append(Target(f"break-even at batch {answer.at:.0f}: error against the measured one", error, BREAK_EVEN_ERROR, met, note, open_))
    return found


def markdown(frame, terms: Sequence[str] = ALL_TERMS) -> str:
    """The error table of `error_table` as Markdown, a line an arm, in percent: median and worst, a straight line's in brackets."""
    table = error_table(frame, terms)
    kinds = {"nothing": "in sample", "batch": "batch left out", "context_tokens": "context left out", "mix": "mix left out"}
    lines = [f"| arm | rows | {' | '.join(kinds.values())} |", "| --- " * (2 + len(kinds)) + "|"]
    for values, part in split(table, STATE).items():
        label = dict(zip(STATE, values, strict=True))
        name = "/".join(str(label[k]) for k in ("arm", "form", "exchange", "queries") if label[k])
        name += f" P={label['world']} {label['dtype']}" + (f" q{label['query_len']}" if label["query_len"] > 1 else "") + f" {label['cache_state']}"
        cells = []
        for kind in kinds:
            row = part[part["held_out"] == kind]
            cells.append(_cell(row.iloc[0]) if len(row) else "-")
        lines.append(f"| {name} | {part['rows'].max()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Any) -> str:
    model, line = (
        f"{100 * row[f'{n}_median']:.1f}%, {100 * row[f'{n}_worst']:.0f}%" if np.isfinite(row[f"{n}_median"]) else "-" for n in ("model", "line")
    )
    return f"{model} ({line})"


def tables(loaded: Any, found: Sequence[Comparison]) -> list[str]:
    """How good the model is on a run, as two Markdown tables: errors of every arm, and the aims near break-even.

    Args:
        loaded: of `frames.load_run`.
        found: its comparisons with fits.
    """
    lines = [
        f"Median and worst error of a row of `{loaded.name}`, in brackets those of a straight line:", "", markdown(loaded.frame), "",
        f"CP - TP within {DIFFERENCE_US:g} µs or {DIFFERENCE_SHARE:.0%} near break-even, and break-even within {BREAK_EVEN_ERROR:.0%} of the measured one:", "",
        "| CP, against TP in its form | in sample | its context left out | break-even |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for comparison in found:
        aims, first = targets(comparison), comparison.pairs.iloc[0]
        name = "/".join(str(first[k]) for k in ("arm", "form", "exchange", "queries") if isinstance(first[k], str))
        points = [next((t.note for t in aims if kind in t.name), "-") for kind in (", in sample:", ", context held out:")]
        lines_of = [t for t in aims if t.name.startswith("break-even")]
        close = [t for t in lines_of if t.met is not None or t.undecided]
        met = f"{sum(t.value <= t.allowed for t in close)} of {len(close)} batches within, worst {max(t.value for t in close):.0%}" if close else "none judged"
        open_, sparse = sum(t.undecided for t in close), len(lines_of) - len(close)
        met += (f"; {open_} of all {UNDECIDED}" if open_ else "") + (f"; {sparse} measured too sparsely to judge" if sparse else "")
        lines.append(f"| {name} P={first['world']} {first['dtype']} | {' | '.join(points)} | {met} |")
    return lines


def main(run: str = "") -> list[str]:
    """What `m3cp fit --errors` does: `tables`, then for each comparison its aims, break-even, what moves it, and other
    numbers of ranks, as Markdown.

    Raises:
        ValueError, FileNotFoundError: in words, as the functions called do.
    """
    from m3cp.frames import load_run

    loaded = load_run(run)
    found = grids(comparisons(loaded.frame, ALL_TERMS, draws=100))
    judged = [c for c in found if c.tp and c.cp and min(len(m.fit.residuals) for m in c.models) >= LEAST_ROWS]
    lines = tables(loaded, judged)
    for comparison in found:
        lines += ["", f"### {comparison.name}", ""]
        if comparison.tp is None or comparison.cp is None:
            lines.append("Too few sizes for a fit.")
            continue
        if any(comparison is c for c in judged):
            lines += ["| aim | came to | allowed | verdict | |", "| --- | --- | --- | --- | --- |"]
            lines += [f"| {t.name} | {t.value:.3g} | {t.allowed:.3g} | {t.word} | {t.note} |" for t in targets(comparison)]
            lines.append("")
        for model in comparison.models:
            left = model.structure or "none found"
            out = f"; {model.evicted} rows behind an evicting read left out" if model.evicted else ""
            lines.append(f"- {model.arm}: worst error of a row {model.fit.worst:.1%}, structure left in the residuals: {left}{out}")
        lines += [f"- {answer.text}" for answer in (*comparison.measured, *comparison.model)]
        known = [int(a.at) for a in comparison.model if a.answer == "crosses"] or [int(b) for b in comparison.pairs["batch"]]
        batch, wide = known[len(known) // 2], across_worlds(loaded.frame, comparison)
        lines += [f"- {line}" for line in movers(comparison.tp, comparison.cp, batch, wide, found)]
        lines += ["", *_other_worlds(wide, batch)]
    return lines


def _other_worlds(wide: tuple[CostModel, CostModel], batch: int) -> list[str]:
    """A Markdown table of what is predicted at 4 and 8 ranks, with 95% intervals and what they assume."""
    lines = ["| P, context, batch | TP, predicted us | CP, predicted us | |", "| --- | --- | --- | --- |"]
    for world in (4, 8):
        for context in (8192, 32_768, 131_072):
            found = [model.predict(model.point(context, batch, world=world)) for model in wide]
            us = [f"{p.us:.1f} ({p.low_us:.1f} to {p.high_us:.1f})" for p in found]
            lines.append(f"| {world}, {tokens_about(context)}, {batch} | {us[0]} | {us[1]} | {found[1].assumed or 'measured worlds'} |")
    return lines

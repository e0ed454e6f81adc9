"""CP against TP: pairs with their intervals, the break-even line, measured and modelled, and the verdict in words."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3cp.fit import ALL_TERMS, PEER_US, TWO_TERMS, CostModel, assume, fit_model, fittable, try_fit
from m3cp.frames import groups, missing, overlap_words, require_same, split, timed
from m3cp.shapes import require

# What a CP row and its TP baseline share. Worlds are equal: each rank of TP reads the whole cache.
PAIRED = (
    "context_tokens", "batch", "mix", "shared_prefix_tokens", "rows_padded", "world", "dtype", "query_len", "shape",
    "max_context", "cache", "launch", "node", "code_hash", "source", "boundary",
)  # fmt: skip

VARIANT = ("arm", "form", "exchange", "queries", "threshold_blocks")

PROCESS, SITTING = ("sitting", "process"), ("sitting",)  # columns that name what counts once

BASELINE = {"cp": "tp", "vllm_cp": "vllm_tp", "sglang_cp": "sglang_tp"}

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
    "boundary",
    "max_context",
)

SPARSE_LAYERS = 57  # of MiniMax-M3's 60

ANSWERS = ("crosses", "none in range", "below range", "undecided", "extrapolated")


def median_draws(samples: Sequence[float], count: int, rng: np.random.Generator, noise: float = 0.0) -> np.ndarray:
    """Bootstrap of the median of `samples`, `[count]`, with a relative `noise` on top (one standard deviation)."""
    values = np.asarray(samples, dtype=float)
    drawn = (
        np.median(rng.choice(values, (count, len(values))), axis=1) if len(values) > 1 else np.full(count, values[0])
    )
    return drawn * (1.0 + noise * rng.standard_normal(count)) if noise else drawn


def difference_draws(more: Sequence[float], less: Sequence[float], count: int, rng: np.random.Generator) -> np.ndarray:
    """Bootstrap of the difference of two medians, `[count]`."""
    return median_draws(more, count, rng) - median_draws(less, count, rng)


def verdict(low: float, high: float, same: float = 0.02) -> str:
    """A word for the interval of the ratio TP / CP: FASTER, SLOWER, SAME (within `same` of 1) or UNDECIDED."""
    if low > 1.0:
        return "FASTER" if high > 1.0 + same else "SAME"
    if high < 1.0:
        return "SLOWER" if low < 1.0 - same else "SAME"
    return "SAME" if low > 1.0 - same and high < 1.0 + same else "UNDECIDED"


def pairs(frame, noise: float = 0.0, draws: int = 400, seed: int = 0):
    """Each CP row beside its TP baseline: times, the ratio TP / CP and the difference CP - TP with 95% intervals.

    A CP arm meets the baseline of its own engine, in its own form where that was measured. Where points of a variant were
    measured in several sittings, on machines of one name perhaps, each sitting counts once, else each fresh process, and only
    those that timed both arms. What CP - TP differs by between these, all points of one together and each alone, is in the
    draws of all pairs of the variant, also of those measured once (`between`). Arms that were never timed together: UNDECIDED.

    Args:
        frame: of `table`.
        noise: relative standard deviation to assume on top of the samples' own spread, such as 0.05 for figures
            published without samples.
        draws: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        A frame with the fields of `PAIRED` and `VARIANT`, tp_us, cp_us, their sample ranges, ratio, ratio_low,
        ratio_high, delta_us, delta_low, delta_high, verdict, cache_state ("cold" only where both are), read (whether
        keys are read), evicted (timed behind an evicting read), unsteady, processes, the draws of delta_us, and
        overlap_bf16 (None but for fp8).

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
            others = {k[len(PAIRED) - 1] for k in known if k[: len(PAIRED) - 1] == key[:-1]}
            if others:
                raise ValueError(
                    f"{variant['arm']} at {key[0]} tokens x {key[1]}: its timed region has the boundary {key[-1]!r}, its baseline's {', '.join(map(repr, sorted(others)))}: different boundaries are not compared"
                )
            continue
        tp = (
            forms[variant["form"]]
            if variant["form"] in forms
            else min(forms.values(), key=lambda v: v["median_us"].min())
        )
        context = f"{variant['arm']} against {BASELINE[variant['arm']]} at {key[0]} tokens x {key[1]}"
        same = set(tp["path"]) & set(cp["path"])
        if same:
            raise ValueError(f"{context}: both arms ran path {', '.join(map(repr, sorted(same)))}; nothing is compared")
        tn, cn = ((min(map(min, rows["samples_us"])), max(map(max, rows["samples_us"]))) for rows in (tp, cp))
        cold = set(tp["cache_state"]) == {"cold"} and set(cp["cache_state"]) == {"cold"}
        lines.append(
            {
                **dict(zip(PAIRED, key, strict=True)), **variant, "tp": tp, "cp": cp, "tp_low": tn[0], "tp_high": tn[1], "cp_low": cn[0], "cp_high": cn[1],
                "cache_state": "cold" if cold else "warm", "read": bool((tp["bytes_read"] > 0).all()),
                "evicted": bool((tp["evict_us"].astype(float) > 0).any() or (cp["evict_us"].astype(float) > 0).any()),
                "unsteady": bool(tp["unsteady"].any() or cp["unsteady"].any()),
                "overlap_bf16": next((v for rows in (cp, tp) for v in rows["overlap_bf16"] if not missing(v)), None),
            }
        )  # fmt: skip
    alike = {}
    for line in lines:
        alike.setdefault(tuple(line[n] for n in (*VARIANT, *(n for n in PAIRED if n not in ("context_tokens", "batch", "mix")))), []).append(line)
    for group in alike.values():
        _widen(group, draws, rng, noise)
    columns = [*PAIRED, *VARIANT, "tp_us", "cp_us", "tp_low", "tp_high", "cp_low", "cp_high", "ratio", "ratio_low", "ratio_high",
               "delta_us", "delta_low", "delta_high", "verdict", "cache_state", "read", "evicted", "unsteady", "processes", "draws", "overlap_bf16"]  # fmt: skip
    return pandas.DataFrame.from_records(lines, columns=columns)


def _widen(group: Sequence[dict[str, Any]], draws: int, rng: np.random.Generator, noise: float) -> None:
    """Fill in the figures of pairs of one variant from their rows, "tp" and "cp": medians over the units that timed both arms,
    and draws that hold what units differ by."""
    unit = _unit(group)
    apart = [_by_unit(line["cp"], unit).sub(_by_unit(line["tp"], unit)).dropna() for line in group]
    for line, own in zip(group, apart, strict=True):
        if len(own):
            for arm in ("tp", "cp"):
                line[arm] = line[arm][[key in own.index for key in _keys(line[arm], unit)]]
        line["tp_us"], line["cp_us"] = (float(_by_unit(line[arm], unit).median()) for arm in ("tp", "cp"))
        line["ratio"], line["delta_us"] = line["tp_us"] / line["cp_us"], line["cp_us"] - line["tp_us"]
        line["processes"] = len(set(_keys(line["tp"], PROCESS)) & set(_keys(line["cp"], PROCESS)))
    shared: dict[int, np.ndarray] = {}  # one draw of what all points of a unit share
    for line, own in zip(group, apart, strict=True):
        t, c = (_drawn(line[arm], unit, draws, rng, noise) for arm in ("tp", "cp"))
        line["draws"] = c - t
        common, units, alone, freedom = between([(other["cp_us"], d) for other, d in zip(group, apart, strict=True)], line["cp_us"])
        if units:
            shared.setdefault(units, rng.standard_t(units, draws))
            line["draws"] = line["draws"] + common / math.sqrt(max(1, len(own))) * shared[units]
        if freedom:
            line["draws"] = line["draws"] + alone / math.sqrt(max(1, len(own))) * rng.standard_t(freedom, draws)
        ratio = t / np.maximum(t + line["draws"], 0.01 * t)
        line["ratio_low"], line["ratio_high"] = (float(v) for v in np.percentile(ratio, [2.5, 97.5]))
        line["delta_low"], line["delta_high"] = (float(v) for v in np.percentile(line["draws"], [2.5, 97.5]))
        line["verdict"] = verdict(line["ratio_low"], line["ratio_high"]) if len(own) else "UNDECIDED"  # arms that never met


def _unit(group: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What counts once in a variant: a sitting where at least half of its repeated points were measured in several, else a process."""
    common = [set(_keys(line["tp"], PROCESS)) & set(_keys(line["cp"], PROCESS)) for line in group]
    sittings, repeated = sum(len({sitting for sitting, _ in each}) > 1 for each in common), sum(len(each) > 1 for each in common)
    return SITTING if sittings and 2 * sittings >= repeated else PROCESS


def between(measured: Sequence[tuple[float, Any]], us: float) -> tuple[float, int, float, int]:
    """What CP - TP differs by from one sitting, or process, to another: (standard deviation that all points of it share, its degrees of
    freedom, that of each point alone, its degrees of freedom), microseconds; zeros without repeats.

    Of the repeated points of a variant whose CP calls take between half and twice `us`; of all of them where none does, larger
    ones in proportion: small calls differ by what a process draws anew, large ones by a share of their time.

    Args:
        measured: of each point, CP's microseconds and a Series of CP - TP by the units that timed both.
    """
    import pandas

    repeated = [(cp_us, apart) for cp_us, apart in measured if len(apart) > 1]
    near = [apart for cp_us, apart in repeated if us / 2 <= cp_us <= 2 * us]
    near = near or [apart * min(1.0, us / cp_us) for cp_us, apart in repeated]
    if not near:
        return 0.0, 0, 0.0, 0
    apart = pandas.concat([a.rename(n) - a.mean() for n, a in enumerate(near)], axis=1)  # units by points
    shift, units = apart.mean(axis=1), len(apart) - 1
    freedom = int(apart.count().sum()) - len(near) - units
    alone = math.sqrt(float(apart.sub(shift, axis=0).pow(2).sum().sum()) / freedom) if freedom > 0 else 0.0
    return math.sqrt(float(shift.pow(2).sum()) / units), units, alone, max(0, freedom)


def _keys(rows, unit: Sequence[str]) -> list[Any]:
    """Of each row the unit that it is of: its sitting, or sitting and process."""
    return list(zip(*(rows[name] for name in unit), strict=True)) if len(unit) > 1 else rows[unit[0]].tolist()


def _by_unit(rows, unit: Sequence[str]):
    """Microseconds of each unit, a Series: the median of its rows."""
    return rows.groupby(list(unit) if len(unit) > 1 else unit[0])["median_us"].median()


def _drawn(rows, unit: Sequence[str], draws: int, rng: np.random.Generator, noise: float) -> np.ndarray:
    """Draws of the median over units, of each row by its rounds, `[draws]`."""
    each = np.stack([median_draws(samples, draws, rng, noise) for samples in rows["samples_us"]])
    of: dict[Any, list[int]] = {}
    for position, key in enumerate(_keys(rows, unit)):
        of.setdefault(key, []).append(position)
    return np.median([np.median(each[positions], axis=0) for positions in of.values()], axis=0)


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

    def _show(self, value: float) -> str:
        return tokens_about(value) if self.axis == "context_tokens" else f"{value:.3g}"

    @property
    def band(self) -> str:
        """Its 95% band in words, such as "31.9k to 41.2k"."""
        low = self._show(self.low) if self.low > 0 else "below the range"
        return f"{low} to {self._show(self.high) if math.isfinite(self.high) else 'beyond the range'}"

    @property
    def text(self) -> str:
        """The answer as a sentence."""
        show = self._show
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
        extra = "" if self.sure or self.answer != "crosses" else ", uncertain"
        between = f", between {show(self.bracket[0])} and {show(self.bracket[1])}" if self.bracket else ""
        word = {"undecided": "undecided, about", "extrapolated": "extrapolated to"}.get(self.answer, "about")
        return f"at {other}: {word} {what} {show(self.value)} (95% {self.band}{between}{extra}; {self.source})"


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

    Pairs timed behind an evicting read are no neighbours: they are another experiment (`fit.fittable`). A value of the
    other axis with no other pairs has no answer.

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
    for at, rows in paired[~paired["evicted"].astype(bool)].groupby(other):
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


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


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
    a, z = tp.design(points, **changes), cp.design(points, **changes)
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
    for values, part in split(paired, (*COMPARED, *VARIANT)).items():
        shared = dict(zip((*COMPARED, *VARIANT), values, strict=True))
        same = np.ones(len(rows), bool)
        for name in COMPARED:
            same &= np.array([(None if missing(v) else v) == shared[name] for v in rows[name]])
        variant = same & np.all([[(None if missing(v) else v) == shared[n] for v in rows[n]] for n in VARIANT], axis=0)
        base = same & (rows["arm"] == BASELINE[shared["arm"]]).to_numpy()
        base &= (rows["form"].map(str) == _baseline_form(rows[base], shared["form"])).to_numpy()
        fits = [try_fit(rows[mask], terms) for mask in (base, variant)]
        batches = sorted(set(part["batch"]))
        model = ()
        if all(fits) and fits[0].cache_state == fits[1].cache_state:
            model = tuple(break_even_model(*fits, batches, draws=draws))
        adaptive = None if shared["threshold_blocks"] is None else f"above{shared['threshold_blocks']:.0f}"
        words = [
            shared["arm"],
            shared["form"],
            shared["exchange"],
            shared["queries"],
            adaptive,
            *_set_words(shared, rows),
        ]
        name = "_".join(str(v) for v in words if v is not None)
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


def _baseline_form(base, form: str | None) -> str:
    """Of a baseline's rows, the form that stands for it: the variant's own or, where that was not measured, the fastest at most points."""
    measured = base["form"].map(str)
    if str(form) in set(measured):
        return str(form)
    fastest = base.loc[base.groupby(["context_tokens", "batch"])["median_us"].idxmin()]
    return fastest["form"].map(str).value_counts().idxmax()


def _set_words(shared: dict[str, Any], rows) -> list[str]:
    """What tells a set of rows from its siblings in file names: always the usual fields, others where they vary."""
    words = [
        f"p{shared['world']}",
        shared["dtype"],
        shared["mix"],
        f"q{shared['query_len']}",
        shared["cache"],
        shared["launch"],
    ]
    words += [f"{name.split('_')[0]}{shared[name]}" for name in ("rows_padded", "shared_prefix_tokens") if shared[name]]
    words += shared["boundary"].split()
    for name in ("max_context", "node", "code_hash", "shape", "source"):
        if len(set(rows[name])) > 1:
            words.append(re.sub(r"[^A-Za-z0-9.]+", "-", f"{name.split('_')[0]}-{shared[name]}").strip("-"))
    return words


def headline(found: Sequence[Comparison]) -> Comparison | None:
    """The comparison that a single map shows: the first, uniform, with most pairs; None when there is none."""
    return next((c for c in found if c.pairs["mix"].iloc[0] == "uniform"), found[0] if found else None)


def grids(found: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons with at least two contexts at some batch: those that have a curve and a break-even."""
    return [c for c in found if int(c.pairs.groupby("batch")["context_tokens"].nunique().max()) > 1]


def curve_sets(frame, terms: Sequence[str] = TWO_TERMS) -> list[tuple[str, Any, list[CostModel]]]:
    """Rows that may share a plot of curves, each set with its name and fits; sets with one context are left out."""
    sets = []
    for values, rows in groups(frame, COMPARED).items():
        shared = dict(zip(COMPARED, values, strict=True))
        arms = rows[rows["arm"] != "page_read"]
        if arms.empty or int(arms.groupby("batch")["context_tokens"].nunique().max()) < 2:
            continue
        fits = [try_fit(part, terms) for part in groups(arms, VARIANT).values()]
        sets.append(("_".join(_set_words(shared, timed(frame))), rows, [m for m in fits if m]))
    return sets


def pair_table(found: Sequence[Comparison]):
    """All pairs as one table for reading: what, where, both times, the ratio with its interval, and the verdict."""
    import pandas

    columns = ["arm", "form", "exchange", "queries", "world", "dtype", "query_len", "mix", "context_tokens", "batch", "cache_state",
               "tp_us", "cp_us", "ratio", "ratio_low", "ratio_high", "verdict", "unsteady", "overlap_bf16"]  # fmt: skip
    return (
        pandas.concat([c.pairs[columns] for c in found], ignore_index=True)
        if found
        else pandas.DataFrame(columns=columns)
    )


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
    narrow = overlap_words(pair.to_frame().T) if str(pair["dtype"]).startswith("fp8") else ""
    return (
        f"{where}: {word}. TP takes {pair['tp_us']:.4g} µs and CP {pair['cp_us']:.4g} µs a layer, TP / CP = {pair['ratio']:.2f} "
        f"(95% {pair['ratio_low']:.2f} to {pair['ratio_high']:.2f}); over {layers} sparse layers CP changes a step by {-gain:+.3g} ms."
        + (f" {narrow}." if narrow else "")
    )


def arm_frames(comparison: Comparison) -> tuple[Any, Any]:
    """The rows of a comparison by arm: (baseline, CP), of the cache state that most of them have."""
    rows = comparison.frame
    state = rows[rows["bytes_read"] > 0]["cache_state"].value_counts().idxmax()
    rows = rows[rows["cache_state"] == state]
    base = rows["arm"] == BASELINE[comparison.pairs["arm"].iloc[0]]
    return rows[base], rows[~base]


def across_worlds(frame, comparison: Comparison, terms: Sequence[str] = ALL_TERMS) -> tuple[CostModel, CostModel]:
    """Fits of (TP, CP) for numbers of ranks that were not measured, from all that were.

    TP learns from its rows at every world, P = 1 included; CP from its own, and from `cp_local` in its form, which runs
    at any P without a peer and so tells the exchange from the rest. Bytes at another P are known; what a further peer
    adds to an exchange rests on a stated prior (`PEER_US`) where no row tells, and predictions say "assumed".

    Args:
        frame: that the comparison was made of.
        comparison: one with fits.

    Raises:
        ValueError: a comparison without fits.
    """
    require("comparison", comparison.name, comparison.tp is not None and comparison.cp is not None, "one with fits of both arms")
    rows, models = timed(frame), []
    state = comparison.cp.cache_state
    for model in (comparison.tp, comparison.cp):
        at = model.template
        arms = (at.arm, "cp_local") if at.arm == "cp" else (at.arm,)
        shared = [n for n in (*COMPARED, "form") if n not in ("world", "source", "node", "code_hash", "boundary")]
        mine = np.array([
            p.arm in arms and all(getattr(p, n) == getattr(at, n) for n in shared)
            and (p.arm == "cp_local" or all(getattr(p, n) == getattr(at, n) for n in VARIANT)) for p in rows["point"]
        ])  # fmt: skip
        for name in ("node", "code_hash", "source", "boundary"):
            mine &= (rows[name] == comparison.pairs[name].iloc[0]).to_numpy()
        part = fittable(rows[mine & (rows["cache_state"] == state).to_numpy()])
        vary = [n for n in ("world", "arm", "exchange", "queries", "region") if len(set(map(str, part[n]))) > 1]
        models.append(fit_model(part, terms, vary=vary))
    tp, cp = models
    peers = PEER_US[cp.template.exchange or "collective"]
    return tp, assume(cp, {"peers": peers}) if "peers" in cp.fit.unidentified else cp


def shifted(model: CostModel, term: str, add: float = 0.0, times: float = 1.0) -> CostModel:
    """A model with one term changed: `times` the estimate plus `add`, not below 0; for what-if questions.

    Raises:
        ValueError: a term the model does not have.
    """
    require("term", term, term in model.terms, f"one of {', '.join(model.terms)}")
    values = model.fit.values.copy()
    i = model.terms.index(term)
    values[i] = max(0.0, float(np.nan_to_num(values[i])) * times + add)
    return dataclasses.replace(model, fit=dataclasses.replace(model.fit, values=values))


def movers(
    tp: CostModel, cp: CostModel, batch: int, wide: tuple[CostModel, CostModel] | None = None, found: Sequence[Comparison] = ()
) -> list[str]:
    """What moves break-even over context at one batch, in plain words; best estimates, without bands.

    Args:
        tp, cp: fitted models of one comparison.
        batch: requests.
        wide: of `across_worlds`, for other numbers of ranks; None makes do with `tp` and `cp`.
        found: all comparisons of the run: what they measured of fp8 caches and of more query tokens stands in a model's place.
    """

    def measured(**changes: Any) -> str:
        pairs = [c for c in found if c.cp is not None and c.cp.template == dataclasses.replace(cp.template, context_tokens=c.cp.template.context_tokens,
                 batch=c.cp.template.batch, **changes)]  # fmt: skip
        return "; ".join(a.text for c in pairs for a in c.measured)

    def at(a: CostModel, z: CostModel, **changes: Any) -> str:
        answer = break_even_model(a, z, [batch], draws=20, **changes)[0]
        return f"{tokens_about(answer.value)} tokens" if answer.value else f"'{answer.answer}'"

    now, lines = at(tp, cp), []

    def say(what: str, then: str, note: str = "") -> None:
        move = (
            f"moves break-even at batch {batch} from {now} to {then}"
            if then != now
            else f"leaves break-even at batch {batch} at {now}"
        )
        lines.append(f"{what} {move}{note}")

    say("one microsecond off the exchange", at(tp, shifted(cp, "launch", add=-1.0)))
    say("one microsecond more for the exchange", at(tp, shifted(cp, "launch", add=1.0)))
    faster = [shifted(m, "bytes", times=1 / 1.1) for m in (tp, cp)]
    say("a tenth more bandwidth", at(*faster))
    for what, changes in (("an fp8 cache", {"dtype": "fp8_e4m3fn"}), ("verifying 4 tokens a request", {"query_len": 4})):
        told = measured(**changes) if any(getattr(cp.template, k) != v for k, v in changes.items()) else ""
        lines += [f"{what}: {told}"] if told else []
    heads = cp.template.shape.heads
    world = 2 * cp.template.world
    if heads % world == 0 or world % heads == 0:
        prior = PEER_US[cp.template.exchange or "collective"]
        other = wide or (tp, assume(cp, {"peers": prior}) if "peers" in cp.fit.unidentified else cp)
        say(
            f"P = {world}",
            at(*other, world=world),
            f" (bytes known; {prior.mean:g} ± {prior.deviation:g} us a further peer assumed)",
        )
    return lines

"""Cost models: an arm's microseconds a call as a sum of terms that mean something, fitted to comparable rows.

A model is linear in its parameters (microseconds a launch, microseconds a megabyte, ...), so it is fitted with
relative weights and intervals by `leastsq`, and says which parameters the data can't tell apart. The two-term fit, a
fixed cost plus bytes over bandwidth, is the same machinery with two terms. Neither torch nor triton is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m3cp import traffic
from m3cp.frames import LABEL, groups, measurement_noise, missing, require_same, timed
from m3cp.leastsq import Fit, loss, solve, structure
from m3cp.shapes import Point, require
from m3cp.shard import Shard
from m3cp.terms import TERMS, VLLM_TP_GRID, Kernels, Load, choice

TWO_TERMS = ("launch", "bytes")
ALL_TERMS = tuple(name for name in TERMS if name != "bend")
# Shapes that no row tells directly; those that leave the least are taken.
RAMP_MB = tuple(1.25 * 2.0**i for i in range(6))  # 1.25 to 40 MB: where half of the ramp has been paid
WAVE_PER_UNIT = (2, 3, 4)  # blocks under way in a compute unit
SHAPING = ("steps", "over256", "depth", "ramp", "exchange", "payload", "rows")  # where rows allow few parameters, the best of these comes first


@functools.lru_cache(maxsize=65_536)
def load(point: Point) -> Load:
    """What a Point asks of its busiest rank."""
    shape, count = point.shape, traffic.shards(point)
    if point.mix == "uniform" and not point.shared_prefix_tokens:
        one = traffic.bytes_read(dataclasses.replace(point, batch=1))  # every request has the same busiest rank
        read, lengths = one * point.batch, [point.context_tokens]
    else:
        read, lengths = traffic.distinct_bytes_read(point), traffic.context_lengths(point)
    spans = [(last - first) / count for first, last in (traffic.read_range(point, n) for n in lengths)]
    visible = max(shape.blocks(n) for n in lengths)
    exchanges = point.arm.endswith("cp") and point.world > 1
    return Load(
        blocks=read / shape.key_bytes(point.dtype),
        mb=read / 1e6,
        longest=max(spans),
        held=visible / count,
        visible=visible,
        short=0.0 if len(spans) == 1 else max(spans) * len(spans) - sum(spans),
        rows=(point.batch + point.rows_padded) * point.query_len,
        heads=Shard(0, point.world, shape.heads).local_heads if point.arm.endswith("tp") else shape.heads,
        exchanges=float(exchanges),
        peers=max(0, point.world - 2) if exchanges else 0,
        sent_kib=sum(traffic.bytes_exchanged(point).values()) * max(0, point.world - 1) / 1024,
    )


@functools.lru_cache(maxsize=65_536)
def _moved(template: Point, context_tokens: int, batch: int, changes: tuple[tuple[str, Any], ...]) -> Point:
    """A Point like `template` at another context and batch; its bound grows and its shared prefix shrinks as needed."""
    bound = max(template.max_context, context_tokens)
    shared = min(template.shared_prefix_tokens, context_tokens)
    given = {"max_context": bound, "shared_prefix_tokens": shared, **dict(changes)}
    return dataclasses.replace(template, context_tokens=context_tokens, batch=batch, **given)


def _design(points: Sequence[Point], how: Kernels, terms: tuple[str, ...]) -> np.ndarray:
    amounts = [TERMS[name].amount for name in terms]
    return np.array([[amount(asked, how) for amount in amounts] for asked in map(load, points)])


@functools.lru_cache(maxsize=512)
def _grid(
    template: Point,
    where: tuple[tuple[int, int], ...],
    changes: tuple[tuple[str, Any], ...],
    how: Kernels,
    terms: tuple[str, ...],
) -> np.ndarray:
    points = [_moved(template, context, batch, changes) for context, batch in where]
    found = _design(points, how, terms)
    found.flags.writeable = False
    return found


@dataclass(frozen=True)
class Prediction:
    """Microseconds with a 95% interval.

    Args:
        us, low_us, high_us: the estimate and the interval of a new measurement there.
        extrapolated: what lies outside the fitted range, in words; "" if nothing does.
        assumed: what rests on a stated prior and not on rows, in words; "" if nothing does.
    """

    us: float
    low_us: float
    high_us: float
    extrapolated: str = ""
    assumed: str = ""


@dataclass(frozen=True)
class Prior:
    """A value that is assumed and not measured: mean and standard deviation in the term's unit, and why."""

    mean: float
    deviation: float
    why: str


# What one more peer costs an exchange where no row tells: a store and a poll over the link for peers' memory, a
# protocol step for a collective. Nobody measured these here; the deviations say so.
PEER_US = {
    "symmetric": Prior(0.3, 0.3, "one more store and poll over the link"),
    "collective": Prior(1.0, 1.0, "one more step of a collective's protocol"),
}


@dataclass(frozen=True)
class CostModel:
    """One arm's microseconds a call as a sum of terms, with what it was fitted to.

    Args:
        label: what the rows have in common, {field: value}.
        terms: names of the terms used, of `terms.TERMS`.
        fit: estimates in those terms' units.
        template: a Point of the group, from which others are made.
        cache_state: "cold" or "warm".
        kernels: what shapes the terms' amounts.
        range: {"context_tokens": (low, high), "batch": ..., "mb": ...} of the fitted rows.
        worlds, mixes: present in the fitted rows.
        unread: rows left out because they read no key.
        evicted: rows left out because an evicting read stood between their calls.
        assumed: {term: the prior it rests on}.
        sizes_mb: megabytes read in each fitted row, in the order of the residuals.
    """

    label: dict[str, Any]
    terms: tuple[str, ...]
    fit: Fit
    template: Point
    cache_state: str
    kernels: Kernels
    range: dict[str, tuple[float, float]]
    worlds: tuple[int, ...]
    mixes: tuple[str, ...]
    unread: int = 0
    evicted: int = 0
    sizes_mb: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False, compare=False)
    assumed: dict[str, Prior] = field(default_factory=dict)

    @functools.cached_property
    def structure(self) -> str:
        """What is left in the residuals along the size, in words; "" when nothing stands out."""
        return structure(self.fit, self.sizes_mb)

    @property
    def arm(self) -> str:
        """The arm it describes, such as "cp"."""
        return self.label["arm"]

    def point(self, context_tokens: int, batch: int, **changes: Any) -> Point:
        """A Point of this model's kind at another context and batch."""
        return _moved(self.template, context_tokens, batch, tuple(changes.items()))

    def row(self, point: Point) -> np.ndarray:
        """The design row of a Point: what the estimates multiply, `[terms]`."""
        return _design((point,), self.kernels, self.terms)[0]

    def design(self, where: Sequence[tuple[int, int]], **changes: Any) -> np.ndarray:
        """Design rows of this model's Points at (context, batch) pairs, `[pairs, terms]`; kept for the next time."""
        return _grid(self.template, tuple(where), tuple(changes.items()), self.kernels, self.terms)

    def us(self, point: Point) -> float:
        """Predicted microseconds a call."""
        return float(self.row(point) @ self.fit.usable)

    def predict(self, point: Point) -> Prediction:
        """Predicted microseconds with the interval of a new measurement there."""
        from scipy import stats

        row = self.row(point)
        us = float(row @ self.fit.usable)
        rests = [name for name in self.assumed if row[self.terms.index(name)] != 0]
        assumed = "; ".join(
            f"{name} assumed {self.assumed[name].mean:g} ± {self.assumed[name].deviation:g} {TERMS[name].unit} ({self.assumed[name].why})"
            for name in rests
        )
        t = stats.t.ppf(0.975, self.fit.freedom) if self.fit.freedom > 0 else stats.norm.ppf(0.975)
        half = t * math.sqrt(max(0.0, float(row @ self.fit.covariance @ row)) + (self.fit.spread * us) ** 2)
        return Prediction(us, max(0.0, us - half), us + half, self.outside(point), assumed)

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
            if name == "bend":
                continue
            note = self.fit.unidentified.get(name, "")
            if name in self.assumed:
                lines.append({"term": name, "meaning": TERMS[name].meaning, "value": self.assumed[name].mean, "low": 0.0,
                              "high": self.assumed[name].mean + 2 * self.assumed[name].deviation, "unit": TERMS[name].unit,
                              "note": f"assumed: {self.assumed[name].why}"})  # fmt: skip
                continue
            lines.append(
                {
                    "term": name, "meaning": TERMS[name].meaning, "value": float(self.fit.values[i]), "low": float(self.fit.low[i]),
                    "high": float(self.fit.high[i]), "unit": TERMS[name].unit, "note": f"not identified: {note}" if note else "",
                }
            )  # fmt: skip
        return lines


def assume(model: CostModel, priors: dict[str, Prior]) -> CostModel:
    """A model in which terms that the data did not identify rest on stated priors, with their uncertainty.

    Args:
        model: fitted with the terms in question.
        priors: {term: prior}; `{"peers": PEER_US["symmetric"]}` is what another number of ranks needs.

    Raises:
        ValueError: a term the model does not have, or one that the data do identify.
    """
    values, covariance, drawn = model.fit.values.copy(), model.fit.covariance.copy(), dict(model.fit.deviations)
    unidentified = dict(model.fit.unidentified)
    for name, prior in priors.items():
        if name not in model.terms or name not in unidentified:
            known = ", ".join(unidentified) or "none"
            raise ValueError(f"priors={name!r}: only terms that the data do not identify can be assumed ({known})")
        i = model.terms.index(name)
        values[i], covariance[i, i], drawn[name] = prior.mean, prior.deviation**2, prior.deviation
        del unidentified[name]
    fit = dataclasses.replace(
        model.fit, values=values, covariance=covariance, unidentified=unidentified, deviations=drawn
    )
    return dataclasses.replace(model, fit=fit, assumed={**model.assumed, **priors})


def fit_model(frame, terms: Sequence[str] = TWO_TERMS, vary: Sequence[str] = ()) -> CostModel:
    """Fit a cost model to the rows of one group.

    Args:
        frame: rows of one label (`groups`); those that are not `fittable` are left out.
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
    every, rows = rows, fittable(rows)
    unread = int((every["bytes_read"] == 0).sum())
    evicted = len(every) - len(rows) - unread
    if len(rows) < 2:
        raise ValueError(
            f"fit_model: {len(rows)} rows that read keys ({unread} more read none, {evicted} were timed behind an evicting read): at least 2 are needed"
        )

    points, times = list(rows["point"]), rows["median_us"].to_numpy(dtype=float)
    label = {name: None if missing(rows[name].iloc[0]) else rows[name].iloc[0] for name in LABEL if name not in vary}
    label["source"] = rows["source"].iloc[0]
    label["arm"] = "cp" if "arm" in vary else rows["arm"].iloc[0]
    state = rows["cache_state"].iloc[0]
    units = int(rows["units"].iloc[0])
    kind = choice(label["arm"], label["form"], units)
    llc_mb = _llc_mb(rows) if state == "warm" else 0.0
    grid = VLLM_TP_GRID * int(rows["query_len"].iloc[0]) if units and label["arm"] == "vllm_tp" else 0
    how = Kernels(kind, 0 if kind == "unknown" else units, RAMP_MB[0], llc_mb, units, grid)
    order = [name for name in ALL_TERMS if name in terms and TERMS[name].applies(label["arm"], how)]
    columns = dict(zip(order, _design(points, how, tuple(order)).T, strict=True))
    read = np.array([load(p).mb for p in points])
    most = max(2, (len(points) + 1) // 2)  # a parameter for every two rows, so that residuals say something
    orders = [order]
    if most < len(order):
        first = [name for name in order if name in ("launch", "bytes", "beyond")]
        orders += [[*first, name, *(n for n in order if n not in (*first, name))] for name in SHAPING if name in order]
    waves = WAVE_PER_UNIT if "wave" in order else (1,)
    ramps = RAMP_MB if "ramp" in order else RAMP_MB[:1]

    def shaped(name: str, **shape: Any) -> np.ndarray:
        return _design(points, how._replace(**shape), (name,))[:, 0] if name in order else np.empty(0)

    by_wave = [(how.wave_blocks * w, shaped("wave", wave_blocks=how.wave_blocks * w)) for w in waves]
    by_ramp = [(mb, shaped("ramp", ramp_mb=mb)) for mb in ramps]
    tried = []
    for (wave_blocks, wave), (ramp_mb, ramp) in itertools.product(by_wave, by_ramp):
        columns.update((n, c) for n, c in (("wave", wave), ("ramp", ramp)) if n in order)
        for names in orders:
            fitted = {name: columns[name] for name in names}
            left = float(f"{loss(fitted, times, most):.9g}")  # orders that span the same leave the same: the earlier one is taken
            tried.append((left, len(tried), how._replace(wave_blocks=wave_blocks, ramp_mb=ramp_mb), fitted))
    _, _, how, fitted = min(tried)
    if "ramp" in fitted:  # the sizes tried are a factor of two apart: refine
        from scipy import optimize

        def left_at(log_mb: float) -> float:
            return loss({**fitted, "ramp": read / (read + math.exp(log_mb))}, times, most)

        span = [math.log(v) for v in (max(RAMP_MB[0], how.ramp_mb / 2), min(RAMP_MB[-1], how.ramp_mb * 2))]
        found = optimize.minimize_scalar(left_at, bounds=span, method="bounded", options={"xatol": 0.02})
        if found.fun < min(tried)[0]:
            how = how._replace(ramp_mb=float(f"{math.exp(found.x):.4g}"))
            fitted = {**fitted, "ramp": read / (read + how.ramp_mb)}

    def bent(values: dict[str, float]) -> dict[str, np.ndarray]:
        return {"bend": read / (read + how.ramp_mb) ** 2} if values.get("ramp") else {}

    found = solve(fitted, times, noise=measurement_noise(rows), most=most, tangents=bent)
    template = next((p for p in points if p.arm == label["arm"]), points[0])
    return CostModel(
        label, found.names, found, template, state, how,
        {
            "context_tokens": (float(rows["context_tokens"].min()), float(rows["context_tokens"].max())),
            "batch": (float(rows["batch"].min()), float(rows["batch"].max())),
            "mb": (float(read.min()), float(read.max())),
        },
        tuple(sorted({int(w) for w in rows["world"]})), tuple(sorted(set(rows["mix"]))), unread, evicted, read,
    )  # fmt: skip


def fittable(rows):
    """The rows that slopes may come from: they read keys, back to back.

    Behind an evicting read, ranks start apart by what that read's end differs, and an arm that exchanges waits for the
    later one (8.5 us where 6.9 were expected, on two H200): such rows are another experiment.
    """
    return rows[(rows["bytes_read"] > 0) & ~(rows["evict_us"].astype(float) > 0)]


def _llc_mb(rows) -> float:
    """Megabytes of last-level cache, as warm rows' footprints tell; 1e12 (all fits) where they don't."""
    sizes = [
        d * max(c, 1) / over / 1e6
        for d, c, over in zip(rows["distinct_bytes_read"], rows["caches"], rows["footprint_over_llc"], strict=True)
        if not missing(over) and over
    ]
    return float(np.median(sizes)) if sizes else 1e12


def two_term_fits(frame) -> list[CostModel]:
    """The two-term fit of every group that has enough rows at different sizes; floors and failed rows left out."""
    models = []
    for values, rows in groups(frame).items():
        read = fittable(rows)
        if values[0] != "page_read" and len(set(read["distinct_bytes_read"])) >= 2:
            models.append(fit_model(rows))
    return models


def try_fit(rows, terms: Sequence[str]) -> CostModel | None:
    """A fit of one arm's rows where they allow one: the state of most of them, at two sizes or more."""
    read = fittable(rows)
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

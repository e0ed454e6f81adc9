"""Linear least squares with honest intervals: scaled columns, relative weights, identifiability, bounds, bootstrap.

Costs can't be negative and are often at zero, columns can be confounded, and a handful of points is all there is:
this module says so instead of printing an interval that means nothing. scipy is imported where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from m3cp.shapes import require


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
        deviations: {name: standard deviation} of values that are assumed and not fitted.
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
    deviations: dict[str, float] = field(default_factory=dict)

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
        values = self.usable + noise @ self.drawn.T
        for name, deviation in self.deviations.items():
            i = self.names.index(name)
            values[:, i] = np.abs(self.values[i] + deviation * rng.standard_normal(count))
        return values


def solve(
    columns: Mapping[str, np.ndarray],
    observed: Sequence[float],
    relative: bool = True,
    nonnegative: bool = True,
    noise: float = 0.0,
    most: int | None = None,
    chosen: int = 0,
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
        most: parameters to fit at most; later columns are reported as not identified. None: as many as observations.
        chosen: parameters chosen outside of this fit, such as a shape; they cost degrees of freedom.

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
    kept, unidentified = _identified(scaled * weight[:, None], names, min(len(y), most or len(y)))
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
    freedom = max(0, len(y) - int(active.sum()) - chosen)
    spread = max(math.sqrt(float(weighted @ weighted) / freedom) if freedom > 0 else 0.0, noise)

    # Intervals come from the fit without bounds: it covers a true value of 0, and one-sided after clipping.
    free = np.linalg.lstsq(a, b, rcond=None)[0]
    inverse = np.linalg.pinv(a.T @ a)
    left = max(0, len(y) - len(kept) - chosen)
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


def _identified(design: np.ndarray, names: Sequence[str], most: int) -> tuple[list[int], dict[str, str]]:
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
        if len(kept) >= most:
            why[name] = "too few rows for another parameter"
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

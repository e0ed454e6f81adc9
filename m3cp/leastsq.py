"""Linear least squares with honest intervals: scaled columns, relative weights, identifiability, bounds, bootstrap.

Costs can't be negative and are often at zero, columns can be confounded, and a handful of points is all there is:
this module says so instead of printing an interval that means nothing. scipy is imported where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    tangents: Callable[[Mapping[str, float]], Mapping[str, np.ndarray]] | None = None,
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
        tangents: for shapes that were chosen outside of this fit: given the estimates, how the prediction moves with
            each shape, by name. They become parameters of value 0 with a covariance, behind the others: a shape costs a
            degree of freedom, and intervals and draws allow for its having been chosen.

    Raises:
        ValueError: no observation, lengths that differ, values that are not finite, or nothing identified.
    """
    from scipy import stats

    names, y, scaled, scale, kept, unidentified, best, weight = _fitted(columns, observed, relative, nonnegative, most)
    a, b = scaled[:, kept] * weight[:, None], y * weight
    bent = tangents({names[i]: v / scale[i] for i, v in zip(kept, best, strict=True)}) if tangents else {}
    wide = np.column_stack([a, *(column * weight for column in bent.values())])
    own = np.arange(wide.shape[1]) < len(kept)

    weighted = b - a @ best
    active = np.concatenate([best != 0 if nonnegative and best.any() else np.ones(len(kept), bool), np.ones(len(bent), bool)])
    freedom = max(0, len(y) - int(active.sum()))
    spread = max(math.sqrt(float(weighted @ weighted) / freedom) if freedom > 0 else 0.0, noise)

    # Intervals come from the fit without bounds: it covers a true value of 0, and one-sided after clipping.
    free = np.linalg.lstsq(a, b, rcond=None)[0]
    left = max(0, len(y) - wide.shape[1])
    miss = b - a @ free
    sigma = max(math.sqrt(float(miss @ miss) / left) if left > 0 else 0.0, noise)
    t = stats.t.ppf(0.975, left) if left > 0 else stats.norm.ppf(0.975)
    half = t * sigma * np.sqrt(np.diag(np.linalg.pinv(wide.T @ wide)))
    low, high = free - half[own], free + half[own]
    if nonnegative:
        low, high = np.clip(low, 0, None), np.clip(np.maximum(high, best), 0, None)

    solver = np.zeros((wide.shape[1], len(y)))
    solver[active] = np.linalg.pinv(wide[:, active])
    leverage = np.einsum("ij,ji->i", wide[:, active], solver[active])

    places = [*kept, *range(len(names), len(names) + len(bent))]
    sizes = np.concatenate([scale[kept], np.ones(len(bent))])
    every = (*names, *bent)

    def whole(part: np.ndarray, extra: np.ndarray) -> np.ndarray:
        full = np.full(len(every), math.nan)
        full[places] = np.concatenate([part, extra]) / sizes
        return full

    drawn = np.zeros((len(every), len(y)))
    drawn[places] = solver / sizes[:, None]
    fitted = scaled[:, kept] @ best
    residuals = (y - fitted) / (np.where(fitted > 0, fitted, y) if relative else 1.0)
    none, reach = np.zeros(len(bent)), half[~own]
    total = float(np.sum((y - y.mean()) ** 2))
    r2 = 1.0 - float(np.sum((y - fitted) ** 2)) / total if total > 0 else 1.0
    return Fit(
        every, whole(best, none), whole(low, -reach), whole(high, reach), drawn @ drawn.T * spread**2, unidentified, relative, spread,
        freedom, residuals, r2, float(np.abs(residuals).max()), drawn, leverage,
    )  # fmt: skip


def loss(columns: Mapping[str, np.ndarray], observed: Sequence[float], most: int | None = None) -> float:
    """Sum of squared relative residuals of `solve` with the same arguments: what a choice of shapes is made by."""
    _, y, scaled, _, kept, _, best, _ = _fitted(columns, observed, True, True, most)
    fitted = scaled[:, kept] @ best
    return float(np.sum(((y - fitted) / np.where(fitted > 0, fitted, y)) ** 2))


def _fitted(columns: Mapping[str, np.ndarray], observed: Sequence[float], relative: bool, nonnegative: bool, most: int | None):
    """(names, observations, scaled design, its scale, columns kept, why the others are not, scaled estimates, weights)."""
    from scipy import optimize

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
    for again in range(2 if relative else 1):
        a, b = scaled[:, kept] * weight[:, None], y * weight
        best = optimize.nnls(a, b)[0] if nonnegative else np.linalg.lstsq(a, b, rcond=None)[0]
        if relative and not again:
            guess = scaled[:, kept] @ best
            weight = 1.0 / np.where(guess > 0, guess, y)
    best = np.where(best < 1e-12 * max(1e-300, np.abs(best).max()), 0.0, best) if nonnegative else best
    return names, y, scaled, scale, kept, unidentified, best, weight


def _identified(design: np.ndarray, names: Sequence[str], most: int) -> tuple[list[int], dict[str, str]]:
    """Positions of columns that are no combination of earlier ones, and why the others are left out."""
    kept: list[int] = []
    why: dict[str, str] = {}
    basis = np.empty((len(design), 0))  # orthonormal, of the columns kept
    for i, name in enumerate(names):
        column = design[:, i]
        size = float(np.linalg.norm(column))
        if size == 0.0:
            why[name] = "zero in every row"
            continue
        rest = column - basis @ (basis.T @ column)
        rest = rest - basis @ (basis.T @ rest)  # twice is enough
        left = float(np.linalg.norm(rest))
        if left < 1e-6 * size:
            near = max(kept, key=lambda k: abs(float(design[:, k] @ column)) / float(np.linalg.norm(design[:, k])))
            how = f"varies only together with {names[near]}" if len(kept) > 1 else f"never varies apart from {names[near]}"
            why[name] = how
            continue
        if len(kept) >= most:
            why[name] = "too few rows for another parameter"
            continue
        kept.append(i)
        basis = np.column_stack([basis, rest / left])
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

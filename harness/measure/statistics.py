"""The few statistics that verdicts rest on: bounds for a ratio over prompts and for a mean of rounds, and an ulp.

Everything here is small enough to be checked against closed forms, published tables and simulation (tests/measure).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    _Floats = npt.NDArray[np.float64]

__all__ = [
    "POWER",
    "Bounds",
    "mean_and_error",
    "mean_bounds",
    "minimum_detectable_effect",
    "paired_bounds",
    "ratio_bounds",
    "studentised",
    "t_cdf",
    "t_quantile",
    "ulp",
]

POWER = 0.8
"""Probability with which a minimum detectable effect would be found."""

_PRECISION = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}
"""Bits of significand (the hidden one included) and exponent of the smallest normal number, IEEE 754 and bfloat16."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """An estimate with a lower and an upper bound, each of which errs with probability `alpha` (so both: 1 - 2 alpha).

    `detectable` is the smallest distance from a threshold that `n` such samples would decide with probability `POWER`;
    `method` names the interval, `seed` the random numbers it used.
    """

    estimate: float
    lower: float
    upper: float
    alpha: float
    n: int
    detectable: float
    method: str
    seed: int | None = None


def t_cdf(t: float, dof: int) -> float:
    """Return P(T <= t) for Student's t with an integer number of degrees of freedom, by the exact finite sum.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4. Raises UsageError if `dof` < 1.
    """
    if dof < 1:
        raise UsageError(f"Student's t needs at least one degree of freedom, not {dof}")
    theta = math.atan(t / math.sqrt(dof))
    sine, cosine_squared = math.sin(theta), math.cos(theta) ** 2
    odd = dof % 2
    term = math.cos(theta) if odd else 1.0
    total = term if dof > 1 else 0.0
    for j in range(3 if odd else 2, dof - 1, 2):
        term *= cosine_squared * (j - 1) / j
        total += term
    inside = (theta + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + 0.5 * inside


@functools.cache
def t_quantile(p: float, dof: int) -> float:
    """Return the t with P(T <= t) = p, 0 < p < 1, by bisection of `t_cdf` to the last bit."""
    if not 0.0 < p < 1.0:
        raise UsageError(f"a quantile needs a probability between 0 and 1, not {p}")
    if p < 0.5:
        return -t_quantile(1.0 - p, dof)
    low, high = 0.0, 1.0
    while t_cdf(high, dof) < p:
        high *= 2.0
    while (middle := (low + high) / 2) not in {low, high}:
        low, high = (middle, high) if t_cdf(middle, dof) < p else (low, middle)
    return high


def minimum_detectable_effect(standard_error: float, dof: int, alpha: float, power: float = POWER) -> float:
    """Return how far the truth must lie from a threshold for a one-sided test at `alpha` to say so with `power`."""
    return (t_quantile(1.0 - alpha, dof) + t_quantile(power, dof)) * standard_error


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `values` (two at least) and its standard error."""
    n = len(values)
    if n < 2:
        raise UsageError(f"an interval needs at least two values, not {n}")
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(n)


def mean_bounds(values: Sequence[float], alpha: float) -> Bounds:
    """Return Student's t bounds for the mean of independent, roughly normal `values` (two at least)."""
    n = len(values)
    mean, standard_error = mean_and_error(values)
    half = t_quantile(1.0 - alpha, n - 1) * standard_error
    detectable = minimum_detectable_effect(standard_error, n - 1, alpha)
    return Bounds(mean, mean - half, mean + half, alpha, n, detectable, "Student's t")


def ratio_bounds(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, alpha: float, seed: int, resamples: int = 10_000
) -> Bounds:
    """Return bounds for sum(numerators) / sum(denominators), both of shape [n], by a bootstrap over the n clusters.

    Studentised (bootstrap-t): clusters are drawn with replacement, and each resample's ratio is divided by its own
    linearised standard error, so that the skew of the ratio and the small n are both corrected. Where more than a tenth
    of alpha of the resamples have no spread (nearly all clusters alike), that quotient says nothing, and Student's t on
    the linearised ratio is used instead; `method` says which. Clusters that are all alike give bounds of no width.

    Raises UsageError if there are fewer than two clusters or a denominator is not positive.
    """
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.asarray(denominators, dtype=np.float64)
    n = top.size
    if n < 2 or bottom.shape != top.shape or top.ndim != 1 or not (bottom > 0).all():
        raise UsageError("a ratio over clusters needs two clusters at least, each with a positive denominator")
    weights = _resampled(n, resamples, seed)
    ratio, error, resampled = studentised(top[None], bottom[None], weights)
    estimate, standard_error = float(ratio[0]), float(error[0])
    detectable = minimum_detectable_effect(standard_error, n - 1, alpha)

    quotients = resampled[0][np.isfinite(resampled[0])]
    if resamples - quotients.size > resamples * alpha / 10:
        half = t_quantile(1.0 - alpha, n - 1) * standard_error
        method = "Student's t on the linearised ratio, clustered by prompt"
        return Bounds(estimate, estimate - half, estimate + half, alpha, n, detectable, method)
    low, high = np.quantile(quotients, [alpha, 1.0 - alpha])
    # The quantiles trade places: a resample that came out high says that the sample itself may have.
    lower, upper = estimate - float(high) * standard_error, estimate - float(low) * standard_error
    method = f"studentised bootstrap over prompts, {resamples} resamples"
    return Bounds(estimate, lower, upper, alpha, n, detectable, method, seed)


@functools.lru_cache(maxsize=2)
def _resampled(n: int, resamples: int, seed: int) -> _Floats:
    """Return how often each resample draws each of n clusters, [resamples, n]."""
    # As floats: numpy multiplies matrices of mixed types without BLAS.
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), size=resamples).astype(np.float64)


def paired_bounds(
    new: tuple[npt.ArrayLike, npt.ArrayLike],
    old: tuple[npt.ArrayLike, npt.ArrayLike],
    *,
    factor: float,
    alpha: float,
    seed: int,
    resamples: int = 10_000,
) -> Bounds:
    """Return bounds for new / old, two ratios of sums over the same n clusters, made to be compared with `factor`.

    Each side is (numerators [n], denominators [n]); a cluster is drawn with both. What is bounded is new - factor *
    old, by a studentised bootstrap, and it is then expressed in units of old. So a bound lies above `factor` exactly
    where the difference is bounded above 0, and counts of 0 on the new side need no logarithm. A difference of two like
    sides is nearly symmetric, so one quantile of the sizes of the resampled quotients serves both bounds, which errs
    less than one for each, as `ratio_bounds` takes (docs/judging.md). Student's t is the fallback, as there.

    Raises UsageError if there are fewer than two clusters, a denominator is negative, or one side's
    denominators or the old side's numerators sum to 0.
    """
    sides = np.array([*new, *old], dtype=np.float64)
    new_top, new_bottom, old_top, old_bottom = sides
    n = sides.shape[1]
    if n < 2 or (sides[1::2] < 0).any() or not (sides[1:].sum(axis=1) > 0).all():
        raise UsageError("two ratios over clusters need two clusters at least, and something to compare with")
    weights = _resampled(n, resamples, seed)

    def difference(weights: _Floats) -> tuple[_Floats, _Floats]:
        """Return new - factor * old and its linearised standard error, for each row of weights."""
        with np.errstate(divide="ignore", invalid="ignore"):
            new_total, old_total = weights @ new_bottom, weights @ old_bottom
            new_ratio, old_ratio = (weights @ new_top) / new_total, (weights @ old_top) / old_total
            residuals = (new_top - new_ratio[:, None] * new_bottom) / new_total[:, None]
            residuals -= factor * (old_top - old_ratio[:, None] * old_bottom) / old_total[:, None]
            variance = np.einsum("ri,ri->r", weights, residuals**2) * n / (n - 1)
        return new_ratio - factor * old_ratio, np.sqrt(variance)

    (estimate,), (error,) = (each.tolist() for each in difference(np.ones((1, n))))
    differences, errors = difference(weights)
    unit = float(old_top.sum() / old_bottom.sum())
    # No spread at all is left as rounding; a resample that draws nothing to divide by is NaN.
    spread = errors > 1e-9 * unit
    quotients = (differences[spread] - estimate) / errors[spread]
    if resamples - quotients.size > resamples * alpha / 10:
        quantile = t_quantile(1.0 - alpha, n - 1)
        method, drawn = "Student's t on the linearised difference, paired by prompt", None
    else:
        quantile = float(np.quantile(np.abs(quotients), 1.0 - 2.0 * alpha))
        method, drawn = f"symmetric studentised bootstrap over prompts, paired, {resamples} resamples", seed
    ratio, half = factor + estimate / unit, quantile * error / unit
    detectable = minimum_detectable_effect(error, n - 1, alpha) / unit
    return Bounds(ratio, ratio - half, ratio + half, alpha, n, detectable, method, drawn)


def studentised(top: _Floats, bottom: _Floats, weights: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    """Return each sample's ratio of sums [samples], its standard error [samples] and its studentised resamples.

    `top` and `bottom` are [samples, n], `weights` [resamples, n] says how often each resample draws each cluster. The
    last result is [samples, resamples], NaN where a resample has no spread. Many samples at once serve simulations.
    """
    ratio, error = _ratio_and_error(top, bottom, np.ones((1, top.shape[1])))
    ratios, errors = _ratio_and_error(top, bottom, weights)
    # Rounding in _ratio_and_error leaves about 1e-8 of the ratio where there is no spread at all.
    spread = errors > 1e-6 * np.abs(ratio)
    quotients = np.full(ratios.shape, np.nan)
    np.divide(ratios - ratio, errors, out=quotients, where=spread)
    return ratio[:, 0], error[:, 0], quotients


def _ratio_and_error(top: _Floats, bottom: _Floats, weights: _Floats) -> tuple[_Floats, _Floats]:
    """Return the ratio of sums and its linearised standard error, both [samples, resamples]."""
    n = top.shape[1]
    total = bottom @ weights.T
    ratio = (top @ weights.T) / total
    squares, cross, bottoms = (top * top) @ weights.T, (top * bottom) @ weights.T, (bottom * bottom) @ weights.T
    residuals = squares - 2 * ratio * cross + ratio**2 * bottoms
    # The expansion cancels where all residuals are zero: clip what rounding left below zero.
    return ratio, np.sqrt(np.maximum(residuals, 0.0) * n / (n - 1)) / total


def ulp(value: float, dtype: str) -> float:
    """Return the distance between neighbouring numbers of `dtype` (float32, bfloat16, float16) at the size of `value`.

    At a power of two it is the upper, larger distance. Raises UsageError for another dtype or a value not finite.
    """
    if dtype not in _PRECISION:
        raise UsageError(f"unknown dtype {dtype!r}", remedy=f"one of {', '.join(_PRECISION)}")
    if not math.isfinite(value):
        raise UsageError(f"{value} has no ulp")
    bits, smallest = _PRECISION[dtype]
    exponent = math.frexp(abs(value))[1] - 1 if value else smallest
    return math.ldexp(1.0, max(exponent, smallest) - bits + 1)

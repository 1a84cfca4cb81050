"""Sample until decided: a group-sequential test of a mean against a threshold, whose looks share one error rate.

Looking at a 5 % test again after each sample is wrong far more often than 5 %. Here the looks are planned, and each may
spend a part of alpha: Lan and DeMets, Biometrika 70 (1983), with their function of O'Brien-Fleming type, which spends
little at first, when there are few samples. The boundaries are those of a normal mean; at each look their tail
probability is taken of Student's t, the significance-level approach of Jennison and Turnbull, Group Sequential Methods
(2000), section 3.8.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import UsageError
from harness.measure.statistics import POWER, mean_and_error, minimum_detectable_effect, t_quantile
from harness.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ALPHA", "BLOCK", "EFFECT", "MAX_PAIRS", "TOLERANCE", "Decision", "Plan", "decide", "plan"]

ALPHA = 0.05
"""Probability of a wrong verdict, of each of the two."""

TOLERANCE = 0.075
"""Loss of throughput that an upgrade may cost: what a run can tell from none at all ten times in ten (judging.md)."""

EFFECT = 0.15
"""Loss of throughput that a run is planned to find."""

MAX_PAIRS = 24
"""Pairs of rounds after which a run that has decided nothing is INCONCLUSIVE."""

BLOCK = 4
"""Looks come after multiples of so many pairs: A B B A B A A B, in which a drift of the machine cancels."""

_NORMAL = NormalDist()
_REACH = 8.0
"""Standard deviations below which the density of a normal path is left out: 1e-15."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """When to look, and how sure one must be at each look.

    Samples are logarithms of ratios new / old. PASS says that their mean is above log(1 - `tolerance`), FAIL that it is
    below. `looks` are numbers of samples, ascending. `pass_levels` and `fail_levels` are the one-sided error of the
    test at each look: over all looks together a wrong PASS has the probability `alpha`, a wrong FAIL `alpha / loads`,
    for one red load among `loads` fails the whole, and all must pass. `spread` is the largest standard deviation of a
    sample with which a loss of `effect` is called FAIL with `power` at the last look.
    """

    tolerance: float
    alpha: float
    power: float
    effect: float
    loads: int
    looks: tuple[int, ...]
    pass_levels: tuple[float, ...]
    fail_levels: tuple[float, ...]

    @property
    def threshold(self) -> float:
        """The mean log ratio that both verdicts are about."""
        return math.log1p(-self.tolerance)

    @property
    def spread(self) -> float:
        """See the class; in units of the log ratio."""
        n = self.looks[-1]
        unit = minimum_detectable_effect(1.0 / math.sqrt(n), n - 1, self.fail_levels[-1], self.power)
        return (self.threshold - math.log1p(-self.effect)) / unit

    def as_measurements(self) -> dict[str, Any]:
        """Return the plan as plain data for the run record."""
        return dataclasses.asdict(self) | {"spread": self.spread}


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the samples say at the last look that was reached, or at the one that decided.

    `verdict` is None while there are looks left. `n` is the number of samples looked at, 0 before the first look.
    `lower` and `upper` bound the mean with the levels of that look, so both hold at every look at once. `detectable`
    is how far from the threshold the truth must lie for so many such samples to say so at that look.
    """

    verdict: Verdict | None
    n: int
    mean: float
    lower: float
    upper: float
    detectable: float


def plan(
    *,
    tolerance: float = TOLERANCE,
    alpha: float = ALPHA,
    power: float = POWER,
    effect: float = EFFECT,
    max_pairs: int = MAX_PAIRS,
    looks: int = MAX_PAIRS // BLOCK,
    loads: int = 1,
) -> Plan:
    """Return the plan with `looks` looks, evenly spaced over `max_pairs`; one look is a test of a fixed size.

    Raises UsageError for what no data could decide.
    """
    for name, value, most in (("tolerance", tolerance, 1.0), ("alpha", alpha, 0.5), ("power", power, 1.0)):
        if not 0.0 < value < most:
            raise UsageError(f"{name} is {value}", remedy=f"give a number between 0 and {most:g}")
    if not tolerance < effect < 1.0:
        raise UsageError(
            f"an effect of {effect} with a tolerance of {tolerance}",
            remedy="the loss to be found lies between the tolerance and 1",
        )
    if max_pairs < BLOCK or max_pairs % BLOCK:
        raise UsageError(f"at most {max_pairs} pairs of rounds", remedy=f"give a multiple of {BLOCK}: A B B A B A A B")
    if not 1 <= looks <= max_pairs // BLOCK:
        raise UsageError(
            f"{looks} looks at {max_pairs} pairs of rounds",
            remedy=f"give at least one, and at most one per {BLOCK} pairs",
        )
    if loads < 1:
        raise UsageError(f"{loads} loads", remedy="give one at least")
    at = tuple(BLOCK * math.ceil(max_pairs * look / looks / BLOCK) for look in range(1, looks + 1))
    fractions = tuple(n / max_pairs for n in at)
    return Plan(
        tolerance, alpha, power, effect, loads, at, _levels(alpha, fractions), _levels(alpha / loads, fractions)
    )


def decide(plan: Plan, samples: Sequence[float]) -> Decision:
    """Say what `samples`, in the order they were taken, decide at the looks of `plan`.

    The first look that decides stands, whatever came after it, and samples after the last look reached are not looked
    at. Raises UsageError if there are more samples than planned.
    """
    if len(samples) > plan.looks[-1]:
        raise UsageError(f"{len(samples)} samples, where {plan.looks[-1]} were planned")
    decision = Decision(None, 0, math.nan, -math.inf, math.inf, math.inf)
    for n, pass_level, fail_level in zip(plan.looks, plan.pass_levels, plan.fail_levels, strict=True):
        if n > len(samples):
            break
        mean, error = mean_and_error(samples[:n])
        lower = mean - t_quantile(1.0 - pass_level, n - 1) * error
        upper = mean + t_quantile(1.0 - fail_level, n - 1) * error
        verdict = None
        if lower >= plan.threshold:
            verdict = Verdict.PASS
        elif upper < plan.threshold:
            verdict = Verdict.FAIL
        elif n == plan.looks[-1]:
            verdict = Verdict.INCONCLUSIVE
        detectable = minimum_detectable_effect(error, n - 1, fail_level, plan.power)
        decision = Decision(verdict, n, mean, lower, upper, detectable)
        if verdict is not None:
            break
    return decision


@functools.cache
def _levels(alpha: float, fractions: tuple[float, ...]) -> tuple[float, ...]:
    """Return the one-sided error of each look, at these fractions of all samples, that together spend `alpha`.

    Under the null hypothesis the sums are a Brownian motion seen at `fractions`. The density of the paths that no
    earlier look has stopped is carried from look to look by Gauss-Legendre quadrature (Armitage, McPherson and Rowe,
    Journal of the Royal Statistical Society A 132 (1969)).
    """
    nodes, node_weights = np.polynomial.legendre.leggauss(256)
    quantile = _NORMAL.inv_cdf(1.0 - alpha / 2)
    levels: list[float] = []
    spent, before = 0.0, 0.0
    # Before the first look all paths are at 0.
    places, masses = np.zeros(1), np.ones(1)
    for fraction in fractions:
        spend = 2.0 * _NORMAL.cdf(-quantile / math.sqrt(fraction)) - spent
        spent += spend
        step = math.sqrt(fraction - before)
        before = fraction
        low, high = 0.0, _REACH
        while high - low > 1e-10:
            middle = (low + high) / 2
            distances = (middle * math.sqrt(fraction) - places) / (step * math.sqrt(2.0))
            stopped = float(masses @ [math.erfc(each) / 2 for each in distances])
            low, high = (middle, high) if stopped > spend else (low, middle)
        levels.append(_NORMAL.cdf(-high))
        bottom, top = -_REACH * math.sqrt(fraction), high * math.sqrt(fraction)
        following = bottom + (top - bottom) * (nodes + 1.0) / 2.0
        density = np.exp(-(((following[:, None] - places) / step) ** 2) / 2.0) / (step * math.sqrt(2.0 * math.pi))
        places, masses = following, (density @ masses) * node_weights * (top - bottom) / 2.0
    return tuple(levels)

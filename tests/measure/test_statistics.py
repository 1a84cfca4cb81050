"""The statistics against closed forms, printed tables and simulation: stated error rates must be the real ones."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from harness.errors import UsageError
from harness.measure.acceptance import MIN_PROMPTS
from harness.measure.statistics import (
    mean_bounds,
    minimum_detectable_effect,
    paired_bounds,
    ratio_bounds,
    studentised,
    t_cdf,
    t_quantile,
    ulp,
)

ALPHA = 0.05
SIMULATIONS = 2_000

# Three standard errors of a rate of 5 % over 2,000 simulations: what chance alone may add.
SLACK = 3 * math.sqrt(ALPHA * (1 - ALPHA) / SIMULATIONS)


@pytest.mark.parametrize("t", [-3.0, -0.5, 0.0, 0.7, 2.0, 12.0])
def test_t_cdf_equals_its_closed_forms(t):
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    x = 1 + t * t / 3
    assert t_cdf(t, 3) == pytest.approx(0.5 + (t / (math.sqrt(3) * x) + math.atan(t / math.sqrt(3))) / math.pi)
    assert t_cdf(t, 4) == pytest.approx(0.5 + 3 / 8 * t / math.sqrt(1 + t * t / 4) * (1 - t * t / (1 + t * t / 4) / 12))
    assert t_cdf(t, 1_000_000) == pytest.approx(0.5 * math.erfc(-t / math.sqrt(2)), abs=1e-6)


# Abramowitz and Stegun, table 26.10, printed to three decimals.
@pytest.mark.parametrize(
    ("dof", "p90", "p95", "p975", "p995"),
    [
        (1, 3.078, 6.314, 12.706, 63.657),
        (2, 1.886, 2.920, 4.303, 9.925),
        (5, 1.476, 2.015, 2.571, 4.032),
        (11, 1.363, 1.796, 2.201, 3.106),
        (30, 1.310, 1.697, 2.042, 2.750),
        (120, 1.289, 1.658, 1.980, 2.617),
    ],
)
def test_t_quantiles_equal_the_printed_table(dof, p90, p95, p975, p995):
    for p, printed in ((0.90, p90), (0.95, p95), (0.975, p975), (0.995, p995)):
        assert t_quantile(p, dof) == pytest.approx(printed, abs=6e-4)
        assert t_quantile(1 - p, dof) == pytest.approx(-t_quantile(p, dof))
        assert t_cdf(t_quantile(p, dof), dof) == pytest.approx(p, abs=1e-12)


def test_mean_bounds_equal_a_worked_example():
    bounds = mean_bounds([1.0, 2.0, 3.0, 4.0], ALPHA)
    error = math.sqrt(5 / 3) / 2
    assert bounds.estimate == 2.5
    assert (bounds.lower, bounds.upper) == pytest.approx((2.5 - 2.3534 * error, 2.5 + 2.3534 * error), abs=1e-3)
    assert bounds.detectable == pytest.approx((2.3534 + 0.9785) * error, abs=1e-3)


def test_the_minimum_detectable_effect_is_detected_with_its_power():
    rng = np.random.default_rng(7)
    n, error = 12, 1 / math.sqrt(12)
    effect = minimum_detectable_effect(error, n - 1, ALPHA)
    found = np.mean([mean_bounds(list(row), ALPHA).lower > 0 for row in rng.normal(effect, 1.0, (SIMULATIONS, n))])
    assert 0.77 < found < 0.86


@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)])
@pytest.mark.parametrize("value", [1.0, 1.5, -20.0, 15.9, 16.0, 0.001, 31.75, 0.0])
def test_an_ulp_is_the_distance_to_the_next_number(dtype, value):
    stored = np.array(value, dtype=dtype)
    bits = stored.view(np.uint32 if dtype.itemsize == 4 else np.uint16)
    following = (bits + bits.dtype.type(1)).view(dtype)
    assert ulp(float(stored), dtype.name) == abs(float(following) - float(stored))


@pytest.mark.parametrize("arguments", [(1.0, "float8_e4m3fn"), (math.inf, "bfloat16"), (math.nan, "float32")])
def test_an_ulp_of_nothing_is_refused(arguments):
    with pytest.raises(UsageError):
        ulp(*arguments)


@pytest.mark.parametrize("arguments", [([1], [1]), ([1, 1], [1, 0]), ([1, 1], [1, 1, 1])])
def test_a_ratio_over_nothing_is_refused(arguments):
    with pytest.raises(UsageError, match="two clusters"):
        ratio_bounds(*arguments, alpha=ALPHA, seed=1)


def test_one_round_gives_no_interval():
    with pytest.raises(UsageError, match="two values"):
        mean_bounds([1.0], ALPHA)


def test_clusters_that_are_all_alike_give_no_width():
    bounds = ratio_bounds([30] * 16, [13] * 16, alpha=ALPHA, seed=1)
    assert (bounds.lower, bounds.upper) == pytest.approx((bounds.estimate, bounds.estimate), abs=1e-6)


def test_nearly_alike_clusters_fall_back_to_student():
    bounds = ratio_bounds([40] * 15 + [38], [10] * 16, alpha=ALPHA, seed=1)
    assert bounds.method.startswith("Student's t")
    assert bounds.lower == pytest.approx(3.9875 - t_quantile(0.95, 15) * 0.0125)


def test_the_bootstrap_agrees_with_the_normal_theory_where_both_hold():
    rng = np.random.default_rng(11)
    values = rng.normal(10.0, 1.0, 400)
    bounds = ratio_bounds(values, np.ones(400), alpha=ALPHA, seed=1)
    theory = mean_bounds(list(values), ALPHA)
    assert (bounds.lower, bounds.upper) == pytest.approx((theory.lower, theory.upper), abs=0.01)


def test_paired_bounds_agree_with_the_normal_theory_where_both_hold():
    rng = np.random.default_rng(11)
    old = rng.normal(10.0, 1.0, 400)
    new = old * 0.9 + rng.normal(0.0, 0.5, 400)
    bounds = paired_bounds((new, np.ones(400)), (old, np.ones(400)), factor=0.9, alpha=ALPHA, seed=1)
    theory = mean_bounds(list(new - 0.9 * old), ALPHA)
    assert bounds.estimate == pytest.approx(new.mean() / old.mean())
    in_units_of_old = [0.9 + each / old.mean() for each in (theory.lower, theory.upper)]
    assert (bounds.lower, bounds.upper) == pytest.approx(in_units_of_old, abs=5e-4)


def test_paired_bounds_of_a_side_that_lost_everything_need_no_logarithm():
    bounds = paired_bounds(([0] * 12, [10] * 12), (range(1, 13), [10] * 12), factor=0.95, alpha=ALPHA, seed=1)
    assert bounds.estimate == pytest.approx(0.0, abs=1e-12)
    assert bounds.upper < 0.95


def test_paired_bounds_of_equal_sides_have_no_width_at_equality():
    side = (range(1, 13), [10] * 12)
    bounds = paired_bounds(side, side, factor=1.0, alpha=ALPHA, seed=1)
    assert (bounds.lower, bounds.estimate, bounds.upper) == pytest.approx((1.0, 1.0, 1.0))
    assert bounds.method.startswith("Student's t")


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (([1], [1]), ([1], [1])),
        (([1, 1], [0, 0]), ([1, 1], [1, 1])),
        (([1, 1], [1, 1]), ([0, 0], [1, 1])),
        (([1, 1], [2, -1]), ([1, 1], [1, 1])),
    ],
)
def test_paired_bounds_of_nothing_are_refused(new, old):
    with pytest.raises(UsageError, match="something to compare with"):
        paired_bounds(new, old, factor=1.0, alpha=ALPHA, seed=1)


def simulate(n: int, mean: float, concentration: float, rng: np.random.Generator, shape: int):
    """Return accepted tokens and steps, [shape, n]: 64 tokens a prompt at K = 4, one acceptance rate per prompt."""
    rates = rng.beta(mean * concentration, (1 - mean) * concentration, size=(shape, n))
    position, steps, accepted = np.ones((shape, n)), np.zeros((shape, n)), np.zeros((shape, n))
    while (going := position < 64).any():
        right = np.cumprod(rng.random((shape, n, 4)) < rates[..., None], axis=2).sum(axis=2)
        steps += going
        accepted += going * right
        position += right + 1
    return accepted, steps


@pytest.mark.parametrize(
    ("n", "mean", "concentration", "worst"),
    [
        # Acceptance rates vary between prompts with a standard deviation of 0.19: a general mix.
        (16, 0.6, 6.0, ALPHA),
        (32, 0.6, 6.0, ALPHA),
        # Prompts of one kind: standard deviation 0.08.
        (MIN_PROMPTS, 0.5, 40.0, ALPHA),
        (16, 0.5, 40.0, ALPHA),
        # Most prompts near an end of the scale, and a long tail: the hardest cases, stated in docs/judging.md.
        (MIN_PROMPTS, 0.85, 8.0, 0.08),
        (32, 0.3, 3.0, ALPHA),
    ],
)
def test_an_accept_length_equal_to_its_threshold_is_rarely_called_different(n, mean, concentration, worst):
    """2,000 comparisons of a drafter with its own true accept length: neither side may err more often than stated."""
    rng = np.random.default_rng(20_250_401)
    accepted, steps = simulate(400, mean, concentration, rng, 200)
    truth = accepted.sum() / steps.sum()
    accepted, steps = simulate(n, mean, concentration, rng, SIMULATIONS)
    weights = rng.multinomial(n, np.full(n, 1 / n), size=1_000).astype(float)
    ratio, error, quotients = studentised(accepted, steps, weights)
    low, high = np.nanquantile(quotients, [ALPHA, 1 - ALPHA], axis=1)
    passed, failed = np.sum(ratio - high * error >= truth), np.sum(ratio - low * error < truth)
    assert passed / SIMULATIONS <= worst + SLACK
    assert failed / SIMULATIONS <= worst + SLACK
    # A method that never decides would pass the above: together the bounds must err about as often as they may.
    assert (passed + failed) / SIMULATIONS > ALPHA


@pytest.mark.parametrize("noise", ["normal", "spikes"])
def test_an_engine_compared_with_itself_is_rarely_called_faster_or_slower(noise):
    """2,000 A/A comparisons of 8 pairs in the order A B B A, on a machine that drifts by 1 % per round."""
    rng = np.random.default_rng(5)
    speed = rng.normal(0.0, 0.02, (SIMULATIONS, 16))
    if noise == "spikes":
        speed -= rng.exponential(0.2, speed.shape) * (rng.random(speed.shape) < 0.05)
    speed += 0.01 * np.arange(16)
    first, second = speed[:, 0::2], speed[:, 1::2]
    sign = np.where(np.arange(8) % 2 == 0, 1.0, -1.0)
    ratios = (first - second) * sign
    bounds = [mean_bounds(list(row), ALPHA) for row in ratios]
    assert np.mean([each.lower > 0 for each in bounds]) <= ALPHA + SLACK
    assert np.mean([each.upper < 0 for each in bounds]) <= ALPHA + SLACK

"""Order, steps and their names; that noise is not called a step is shown by simulation."""

import numpy as np
import pytest

from harness.history import trend
from harness.history.store import Measured

NOISES = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(3, size=n),
    "rare outliers": lambda rng, n: rng.normal(size=n) * np.where(rng.random(n) < 0.05, 8, 1),
    # Greedy outputs are mostly the same, and now and then not; a cache is warm or cold.
    "two values": lambda rng, n: rng.random(n) < 0.2,
    "two modes": lambda rng, n: (rng.random(n) < 0.3) + 0.02 * rng.normal(size=n),
}


def point(value, version="0.30.0", hour=0, **more):
    known = {
        "run": f"r{hour:02d}", "case": "c", "started": f"2026-11-30T{hour:02d}:00:00Z", "draftgate": "0.1.0",
        "machine": "{}", "pair": "p", "engine": "vllm", "version": version, "runner": "v1", "device": "cpu", "k": 4,
        "target": "t", "drafter": "d", "prompts": "q", "suite": "acceptance", "verdict": "PASS", "red": "",
        "metric": "accept_length", "value": value, "lower": None, "upper": None,
    }  # fmt: skip
    return Measured(**(known | more))


def only(points):
    (series,) = trend.series(points)
    return series


@pytest.mark.parametrize("place", range(2, 11))
def test_what_is_exact_but_for_a_step_shows_it_wherever_it_is(place):
    assert trend.breaks([3.1] * place + [3.0] * (12 - place)) == (place,)


@pytest.mark.parametrize("runs", [8, 30, 60])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_step(noise, runs):
    rng = np.random.default_rng(20261130)
    alarms = sum(bool(trend.breaks(100 + NOISES[noise](rng, runs))) for _ in range(1000))
    assert alarms < 50


def test_a_step_of_three_sigma_is_found_where_it_is():
    rng = np.random.default_rng(20261130)
    found = 0
    for _ in range(1000):
        place = int(rng.integers(5, 26))
        values = 100 + rng.normal(size=30)
        values[place:] -= 3
        found += [abs(at - place) <= 1 for at in trend.breaks(values)] == [True]
    assert found >= 900


def test_one_run_that_stands_out_is_no_step():
    assert trend.breaks([5, 5, 5, 1, 5, 5, 5, 5, 5, 5, 5, 5]) == ()
    assert trend.breaks([5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 1]) == ()


def test_two_runs_that_agree_are():
    assert trend.breaks([5, 5, 5, 5, 5, 5, 1, 1]) == (6,)
    assert trend.breaks([5, 5, 5, 5, 5, 5, 1, 1, 1, 1, 5, 5, 5, 5, 5, 5]) == (6, 10)


def test_what_never_changes_has_no_step():
    assert trend.breaks([0.0] * 8) == ()
    assert trend.breaks([5.0] * 8) == ()


def test_a_step_is_named_by_the_first_version_after_it():
    points = [point(3.1 + hour / 1000, "0.30.0", hour) for hour in range(4)]
    points += [point(2.4 + hour / 1000, "0.31.0", 10 + hour) for hour in range(4)]
    (step,) = only(points).steps()
    assert (step.version, step.run, step.started, step.within) == ("0.31.0", "r10", "2026-11-30T10:00:00Z", False)
    assert (step.before, step.after) == (pytest.approx(3.1, abs=0.01), pytest.approx(2.4, abs=0.01))
    assert step.changed == ()


def test_versions_order_as_versions_and_an_old_one_measured_again_stands_with_its_fellows():
    points = [point(3.1, "0.9.0", hour) for hour in range(3)] + [point(2.4, "0.10.0", hour) for hour in range(3, 7)]
    series = only([*points, point(3.1, "0.9.0", 20), point(2.4, "main", 0)])
    assert [each.version for each in series.points] == ["0.9.0"] * 4 + ["0.10.0"] * 4 + ["main"]
    (step,) = series.steps()
    assert step.version == "0.10.0"


def test_a_step_within_a_version_says_what_else_changed():
    points = [point(3.1, hour=hour) for hour in range(4)]
    points += [point(2.4, hour=hour, drafter="other", machine='{"cpu": 1}') for hour in range(4, 8)]
    (step,) = only(points).steps()
    assert step.within
    assert step.changed == ("machine", "drafter")


def test_a_place_one_run_off_is_put_where_the_version_begins():
    """The last run of 0.30.0 lies nearer to the new level, by noise that the others show too."""
    values = [10.0, 11.0, 9.0, 10.5, 9.5, 7.4, 5.0, 6.0, 4.0, 5.5, 4.5, 5.0]
    versions = ["0.30.0"] * 6 + ["0.31.0"] * 6
    assert trend.breaks(values) == (5,)
    (step,) = only([point(*each, hour) for hour, each in enumerate(zip(values, versions, strict=True))]).steps()
    assert (step.version, step.run) == ("0.31.0", "r06")


def test_but_not_against_what_the_run_shows():
    """The last run of 0.30.0 is already at the new level: the version that follows did not bring it."""
    values = [10.0, 10.1, 9.9, 10.0, 10.1, 5.0, 5.1, 4.9, 5.0, 5.1]
    versions = ["0.30.0"] * 6 + ["0.31.0"] * 4
    (step,) = only([point(*each, hour) for hour, each in enumerate(zip(values, versions, strict=True))]).steps()
    assert (step.version, step.run, step.within) == ("0.30.0", "r05", True)


def test_several_steps():
    values = [5.0] * 4 + [3.0] * 4 + [4.0] * 4
    steps = only([point(value, hour=hour) for hour, value in enumerate(values)]).steps()
    assert [(step.before, step.after, step.run) for step in steps] == [(5, 3, "r04"), (3, 4, "r08")]


def test_few_runs_are_not_judged():
    values = [5.0] * 4 + [1.0] * (trend.MIN_RUNS - 5)
    assert only([point(value, hour=hour) for hour, value in enumerate(values)]).steps() == ()


def test_pairs_runners_devices_and_figures_are_apart():
    points = [point(1), point(1, pair="q"), point(1, runner="v2"), point(1, device="cuda"), point(1, metric="x")]
    assert len(trend.series(points)) == 5

"""The figures say what the record says."""

import itertools
import math

import pytest

from harness.measure.acceptance import SEED
from harness.measure.statistics import ratio_bounds
from harness.report import plots
from harness.report.plots import Trend, TrendPoint
from tests.report.records import acceptance, case, evidence, servers, throughput, weights

PAIR = case()["pair"]


def height(chart, share):
    return chart.plot_bottom - share * (chart.plot_bottom - chart.plot_top)


def test_acceptance_has_the_shares_intervals_and_the_oracle():
    measured = acceptance((0.9, 0.5, 0.1, 0.0), oracle=(1.0, 0.5, 0.5, 0.0))
    chart = plots.acceptance(measured, PAIR)
    assert [row[-1] for row in chart.table.rows] == ["100.0 %", "50.0 %", "50.0 %", "0.0 %"]
    assert chart.dots[3].y == height(chart, 0.0)
    assert chart.dots[1].level == pytest.approx(height(chart, 0.5))
    prompts = measured["prompts"]
    bounds = ratio_bounds(
        [each["per_position"][0] for each in prompts], [each["drafts"] for each in prompts], alpha=0.05, seed=SEED
    )
    assert chart.dots[0].low == pytest.approx(height(chart, bounds.lower))
    assert chart.dots[0].high == pytest.approx(height(chart, bounds.upper))
    assert f"{bounds.lower:.1%}".replace("%", " %") in chart.table.rows[0][3]


def test_acceptance_of_few_prompts_says_what_its_interval_is_worth():
    assert "Fewer than 12 prompts" in plots.acceptance(acceptance(prompts=8), PAIR).note
    assert plots.acceptance(acceptance(prompts=16), PAIR).note == ""
    one = plots.acceptance(acceptance(prompts=1), PAIR)
    assert one.dots[0].low is None
    assert one.table.rows[0][3] == "none"


def test_no_figure_where_nothing_was_measured():
    assert plots.acceptance({}, PAIR) is None
    assert plots.acceptance(acceptance(steps=0), PAIR) is None
    assert plots.throughput({}, PAIR) is None
    assert plots.startup({}) is None
    assert list(plots.coverage({"loads": []}, {})) == []
    assert plots.trend(Trend("x", "", (TrendPoint("monday", "1", math.nan),))) is None


def test_throughput_has_speed_ups_and_thresholds():
    chart = plots.throughput(throughput({1: 2.0, 16: 0.8}), PAIR)
    assert [row[:2] for row in chart.table.rows] == [("1", "2x"), ("16", "0.8x")]
    assert [row[3] for row in chart.table.rows] == ["1.5x", "none"]
    first, second = chart.dots
    assert first.y < chart.base < second.y
    assert first.level is not None
    assert second.level is None
    assert first.high <= first.y <= first.low


def test_warm_ups_are_no_part_of_a_speed_up():
    measured = throughput({1: 2.0})
    for each in measured["rounds"]:
        if each["pair"] is None and each["speculative"]:
            each["seconds"] *= 100
    assert plots.throughput(measured, PAIR).table.rows[0][1] == "2x"


def test_startup_has_a_bar_per_server_and_a_segment_per_phase():
    bars = plots.startup(servers())
    assert len(bars.bars) == 2
    spec, plain = bars.bars
    assert [len(bar.segments) for bar in bars.bars] == [4, 4]
    assert spec.segments[0].width == pytest.approx(plain.segments[0].width * 15 / 9)
    assert [one.kind for one in spec.segments] == [one.kind for one in plain.segments]
    assert bars.table.rows[-1] == ("", "in all", "60.0 s", "36.0 s")


def test_coverage_tells_landed_from_dropped_from_exempt():
    dropped = ("fc.weight",)
    keys, tensors = plots.coverage(evidence(dropped), weights(dropped))
    states = {tensor.title.split()[0]: tensor.state for tensor in keys.tensors}
    assert states["fc.weight"] == "unused"
    assert states["t2d"] == "exempt"
    assert states["norm.weight"] == "landed"
    assert {tensor.title.split()[0]: tensor.state for tensor in tensors.tensors}["model.fc.weight"] == "unused"
    assert "fc.weight" in keys.description
    assert ("fc.weight", "[256, 256] BF16", "did not land", "dropped") in keys.table.rows


def test_coverage_of_a_record_without_the_judgement_accuses_nobody():
    keys, _ = plots.coverage(evidence(), {})
    assert {tensor.state for tensor in keys.tensors} == {"landed", "unjudged"}


def test_of_very_many_tensors_those_that_did_not_land_are_shown():
    names = tuple(f"layers.{index:05}.weight" for index in range(3_000))
    keys, _ = plots.coverage(evidence((names[-1],), names), weights((names[-1],)))
    assert len(keys.tensors) == plots.MOST_TENSORS
    assert sum(tensor.state == "unused" for tensor in keys.tensors) == 1
    assert keys.note == "2600 more are in record.json: 2600 landed."
    assert {state: count for state, _, count in keys.counts} == {"landed": 2_999, "unused": 1}


def test_what_the_map_leaves_out_is_called_what_it_is():
    names = tuple(f"experts.{index:03}.weight" for index in range(768))
    for drawn in plots.coverage(evidence(names, names), weights(names)):
        assert {tensor.state for tensor in drawn.tensors} == {"unused"}
        assert drawn.note == "368 more are in record.json: 368 did not land."


def test_a_tensor_that_is_made_of_very_many_names_a_few():
    made = evidence()
    made["loads"][0]["parameters"][0]["keys"] = [f"experts.{index}" for index in range(768)]
    _, tensors = plots.coverage(made, weights())
    assert tensors.tensors[0].title.endswith("experts.2, experts.3 and 764 more)")


def test_of_very_many_servers_the_first_are_shown():
    (one,) = list(servers()["servers"].values())[:1]
    bars = plots.startup({"servers": {f"server-{index}": one for index in range(200)}})
    assert len(bars.bars) == plots.MOST_SERVERS
    assert bars.note == "188 more servers are in record.json."


@pytest.mark.parametrize("positions", [4, 16, 40])
def test_labels_do_not_lie_over_each_other(positions):
    chart = plots.acceptance(acceptance((0.5,) * positions), PAIR)
    places = [dot.x for dot in chart.dots if dot.label]
    assert len(chart.dots) == positions
    assert all(after - before >= 16 for before, after in itertools.pairwise(places))
    assert len(places) == positions or positions == 40


def test_of_very_many_runs_the_last_are_drawn():
    points = tuple(TrendPoint(str(index), "1", float(index)) for index in range(1_000))
    chart = plots.trend(Trend("x", "", points))
    assert len(chart.dots) == len(chart.table.rows) == 400
    assert chart.table.rows[-1][0] == "999"
    assert chart.note == "600 runs before these are in the history."


def test_a_trend_marks_where_the_version_changes():
    points = tuple(
        TrendPoint(f"2026-11-{day:02}", "0.28.0" if day < 11 else "0.32.0", 3.0 if day < 11 else 2.0, 1.9, 3.1)
        for day in range(1, 21)
    )
    chart = plots.trend(Trend("accept length", "tokens per step", points, threshold=2.5))
    assert [mark.label for mark in chart.versions] == ["0.28.0", "0.32.0"]
    assert chart.versions[1].at == chart.dots[10].x
    assert chart.dots[9].y < chart.base < chart.dots[10].y
    assert len(chart.table.rows) == 20


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_said_and_not_drawn(value):
    points = (TrendPoint("monday", "1", 2.0, value, 3.0), TrendPoint("tuesday", "2", value), TrendPoint("w", "2", 2.5))
    chart = plots.trend(Trend("x", "", points))
    assert len(chart.dots) == 2
    assert chart.dots[0].low is None
    assert chart.table.rows[1][2] in ("not a number", "infinite", "minus infinite")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.9), (2.0, 2.0), (0.0, 0.0), (1e-9, 2e-9), (-3.0, 5.0), (0, 96.1)])
def test_ticks_are_few_and_enclose(low, high):
    ticks = plots._nice(low, high)
    assert 3 <= len(ticks) <= 7
    assert ticks[0] <= low <= high <= ticks[-1]

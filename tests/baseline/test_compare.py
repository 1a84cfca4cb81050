"""Held against its baseline: worse is FAIL, equal is PASS, too noisy is INCONCLUSIVE, unlike or missing is INVALID."""

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import harness.baseline
from harness.baseline import compare, text
from harness.baseline.measured import baseline_of
from harness.baseline.model import Acceptance, Throughput
from harness.verdict import Finding, Judgement, Verdict
from tests.baseline import records

RATES = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75] * 3
COUNTS = records.accept_counts(RATES)
SPEEDS = {1: [0.40, 0.41, 0.42, 0.41], 8: [0.10, 0.11, 0.12, 0.10]}


def length(counts):
    return 1 + sum(sum(row[1:]) for row in counts.values()) / sum(row[0] for row in counts.values())


def scaled(counts, share):
    """Return counts with an accept length `share` times as large: the same tokens in more steps."""
    return {
        name: [round((row[0] + sum(row[1:])) / (share * (1 + sum(row[1:]) / row[0]))), *row[1:]]
        for name, row in counts.items()
    }


def judged(then, now):
    return compare.judge_acceptance(Acceptance.of(then, exact=False), now, differs=("torch 1 -> 2",), source="b.toml")


def test_equal_passes():
    finding = judged(COUNTS, COUNTS)
    assert (finding.code, finding.verdict) == ("BAS011", Verdict.PASS)
    assert finding.interval == pytest.approx((length(COUNTS), length(COUNTS)), rel=0.01)


def test_a_fifth_worse_fails_and_what_differs_is_named():
    rng = np.random.default_rng(1)
    worse = records.accept_counts([rate * rng.uniform(0.78, 0.86) for rate in RATES], seed=2, steps=40)
    assert 0.75 < length(worse) / length(COUNTS) < 0.85
    finding = judged(COUNTS, worse)
    assert finding.verdict is Verdict.FAIL
    assert "torch 1 -> 2" in finding.cause
    assert finding.remedy
    assert "b.toml" in finding.source


def test_noise_is_inconclusive_and_says_what_would_do():
    noisy = records.accept_counts(np.roll(RATES, 3), seed=5)
    finding = judged(COUNTS, noisy)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "18 prompts that vary like these decide" in finding.cause


def test_too_few_prompts_are_inconclusive():
    few = {name: COUNTS[name] for name in list(COUNTS)[:11]}
    finding = judged(few, scaled(few, 0.5))
    assert (finding.code, finding.verdict) == ("BAS011", Verdict.INCONCLUSIVE)


def test_better_passes():
    assert judged(scaled(COUNTS, 0.8), COUNTS).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "now", [{**COUNTS, "p99": COUNTS["p00"]}, {name: row[:-1] for name, row in COUNTS.items()}, {}]
)
def test_counts_of_another_shape_are_invalid(now):
    finding = judged(COUNTS, now)
    assert (finding.code, finding.verdict) == ("BAS002", Verdict.INVALID)


def test_a_canary_is_held_by_equality():
    then = Acceptance.of(COUNTS, exact=True)
    assert compare.judge_acceptance(then, COUNTS).verdict is Verdict.PASS
    one_off = {**COUNTS, "p03": [COUNTS["p03"][0] + 1, *COUNTS["p03"][1:]]}
    finding = compare.judge_acceptance(then, one_off, source="b.toml")
    assert (finding.code, finding.verdict) == ("BAS010", Verdict.FAIL)
    assert "'p03'" in finding.summary
    assert str(COUNTS["p03"]) in finding.expected


def speeds(log_ratios, tokens=64):
    return Throughput.of(log_ratios, prompts=4, tokens=tokens, interleaved=True)


def throughput(then, now):
    return {(each.code, each.verdict) for each in compare.judge_throughput(then and speeds(then), speeds(now))}


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (SPEEDS, Verdict.PASS),
        ({**SPEEDS, 8: [value + 0.2 for value in SPEEDS[8]]}, Verdict.PASS),
        ({**SPEEDS, 8: [value - math.log(1.25) for value in SPEEDS[8]]}, Verdict.FAIL),
        ({**SPEEDS, 8: [-0.2, 0.3, -0.1, 0.2]}, Verdict.INCONCLUSIVE),
    ],
)
def test_speed_up(now, verdict):
    found = throughput(SPEEDS, now)
    assert ("BAS020", verdict) in found
    assert found <= {("BAS020", verdict), ("BAS020", Verdict.PASS)}


@pytest.mark.parametrize(
    ("then", "now"),
    [(None, SPEEDS), (SPEEDS, {1: SPEEDS[1]}), ({1: SPEEDS[1]}, SPEEDS), ({1: SPEEDS[1]}, {8: SPEEDS[8]})],
)
def test_a_load_that_only_one_side_has_is_invalid(then, now):
    assert ("BAS021", Verdict.INVALID) in throughput(then, now)


def test_one_red_load_of_several_needs_stronger_evidence_than_a_single_one():
    then = [0.40, 0.41, 0.42, 0.41]
    now = [value - 0.175 + noise for value, noise in zip(then, (0.05, -0.05, 0.03, -0.04), strict=True)]
    assert throughput({1: then}, {1: now}) == {("BAS020", Verdict.FAIL)}
    loads = range(1, 9)
    found = throughput(dict.fromkeys(loads, then), {load: now if load == 1 else then for load in loads})
    assert ("BAS020", Verdict.INCONCLUSIVE) in found
    assert ("BAS020", Verdict.FAIL) not in found


def test_rounds_of_another_size_are_invalid():
    (finding,) = compare.judge_throughput(speeds(SPEEDS), speeds(SPEEDS, tokens=32))
    assert (finding.code, finding.verdict) == ("BAS002", Verdict.INVALID)
    assert "throughput.tokens 64 -> 32" in finding.summary


def test_the_bounds_of_the_speed_up_err_as_stated():
    rng = np.random.default_rng(8)
    limit, runs = math.log1p(-compare.SPEED_TOLERANCE), 2000
    wrong_pass = wrong_fail = 0
    for _ in range(runs):
        bounds = compare.speed_change(rng.normal(0.5, 0.05, 6), rng.normal(0.5 + limit, 0.02, 4), alpha=0.05)
        verdict = compare._verdict(bounds.lower, bounds.upper, compare.SPEED_TOLERANCE)
        wrong_pass += verdict is Verdict.PASS
        wrong_fail += verdict is Verdict.FAIL
    for wrong in (wrong_pass, wrong_fail):
        assert 0.02 < wrong / runs < 0.05 + 0.015


def test_welch_agrees_with_a_worked_example():
    # Two samples of four with variances 1 and 4: error sqrt(1/4 + 4/4), Welch's degrees of freedom 4.41, so 4.
    then = [value + 10 for value in (-1.0, 1.0, -math.sqrt(0.5), math.sqrt(0.5))]
    now = [20 + 2 * (value - 10) for value in then]
    assert np.var(then, ddof=1) == pytest.approx(1.0)
    bounds = compare.speed_change(then, now, alpha=0.05)
    assert math.log(bounds.estimate) == pytest.approx(10.0)
    # t(0.95; 4) = 2.1318 from published tables.
    assert math.log(bounds.upper / bounds.estimate) == pytest.approx(2.1318 * math.sqrt(1.25), abs=1e-3)


# A whole case against a folder of baselines.


@pytest.fixture
def folder(tmp_path):
    made = records.record(records.case(COUNTS, SPEEDS))
    baseline = baseline_of(made, made["cases"][0], "run-1")
    text.path_of(tmp_path, baseline.case).write_text(text.render(baseline))
    return tmp_path


def held(folder, suite, counts=COUNTS, log_ratios=SPEEDS, findings=(), change=lambda made: None):
    made = records.record(records.case(counts, log_ratios))
    change(made)
    case = made["cases"][0]
    measured = {"acceptance": records.acceptance(counts), "throughput": records.throughput(log_ratios or {})}
    findings = findings or (Finding("ACC030", Verdict.PASS, "as ever"),)
    judgement = compare.hold(
        Judgement(suite, findings, measured.get(suite, {})), folder, {**case, "machine": made["machine"]}
    )
    return {each.code: each for each in judgement.findings[len(findings) :]}


def test_an_equal_run_passes_in_both_suites(folder):
    assert {code: each.verdict for code, each in held(folder, "acceptance").items()} == {"BAS011": Verdict.PASS}
    assert {code: each.verdict for code, each in held(folder, "throughput").items()} == {"BAS020": Verdict.PASS}


def test_a_worse_run_fails_and_names_the_new_engine(folder):
    def upgrade(made):
        made["cases"][0]["engine"] |= {"version": "0.33.0", "packages": {**records.PACKAGES, "torch": "2.14.0"}}

    finding = held(folder, "acceptance", scaled(COUNTS, 0.8), change=upgrade)["BAS011"]
    assert finding.verdict is Verdict.FAIL
    assert "version 0.32.0 -> 0.33.0" in finding.cause
    assert "torch 2.13.0 -> 2.14.0" in finding.cause


def test_figures_that_are_no_evidence_are_not_compared(folder):
    assert held(folder, "acceptance", findings=(Finding("ACC004", Verdict.INVALID, "no step"),)) == {}


def test_other_suites_are_left_alone(folder):
    assert held(folder, "weights") == {}


def test_a_case_without_a_baseline_is_invalid(folder):
    def rename(made):
        made["cases"][0]["pair"]["name"] = "another"

    finding = held(folder, "acceptance", change=rename)["BAS001"]
    assert finding.verdict is Verdict.INVALID
    assert "bless" in finding.remedy
    assert "another on vllm" in finding.summary


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("cases", 0, "pair", "k"), 3, "k 4 -> 3"),
        (("cases", 0, "pair", "dtype"), "float32", "dtype bfloat16 -> float32"),
        (("cases", 0, "prompts", "digest"), "sha256:dd", "prompts sha256:cc -> sha256:dd"),
        (("cases", 0, "target", "digest"), "sha256:dd", "target sha256:aa -> sha256:dd"),
        (("cases", 0, "drafter", "digest"), "sha256:dd", "drafter sha256:bb -> sha256:dd"),
        (("cases", 0, "pair", "workload", "max_tokens"), 32, "max_tokens 64 -> 32"),
        (("machine", "cpu_flags"), ["avx2"], "avx2 avx512f -> cpu: Processor 9000, 8 cores, avx2"),
        (("machine", "cores"), 4, "8 cores, avx2 avx512f -> cpu: Processor 9000, 4 cores"),
    ],
)
@pytest.mark.parametrize("suite", ["acceptance", "throughput"])
def test_a_baseline_of_something_else_is_invalid_and_both_values_are_named(folder, suite, place, value, words):
    def change(made):
        *parents, key = place
        holder = made
        for name in parents:
            holder = holder[name]
        holder[key] = value

    finding = held(folder, suite, change=change)["BAS002"]
    assert finding.verdict is Verdict.INVALID
    assert words in finding.summary


def test_a_device_that_is_unknown_compares_with_nothing(folder):
    def on_a_gpu(made):
        made["cases"][0]["device"] = "cuda"

    finding = held(folder, "acceptance", change=on_a_gpu)["BAS002"]
    assert finding.verdict is Verdict.INVALID
    assert "no nvidia-smi" in finding.summary


def test_a_speed_up_that_is_no_longer_measured_is_invalid(folder):
    found = held(folder, "acceptance", log_ratios=None)
    assert found["BAS021"].verdict is Verdict.INVALID
    assert found["BAS011"].verdict is Verdict.PASS


def test_a_file_that_was_renamed_is_seen_through(folder):
    (path,) = folder.glob("*.toml")
    path.rename(folder / path.name.replace("pair--", "another--"))

    def rename(made):
        made["cases"][0]["pair"]["name"] = "another"

    finding = held(folder, "acceptance", change=rename)["BAS002"]
    assert finding.verdict is Verdict.INVALID
    assert "pair pair -> another" in finding.summary


def gone(folder):
    shutil.rmtree(folder)


def edited(folder):
    (path,) = folder.glob("*.toml")
    path.write_text(path.read_text().replace("n = 18", "n = 19"))


def not_text(folder):
    (path,) = folder.glob("*.toml")
    path.write_bytes(b"\xff")


def another_that_is_none(folder):
    (path,) = folder.glob("*.toml")
    path.rename(folder / "other.toml")
    (folder / "broken.toml").write_text("schema = 1")


@pytest.mark.parametrize("fault", [gone, edited, not_text, another_that_is_none])
@pytest.mark.parametrize("suite", ["acceptance", "throughput"])
def test_a_baseline_that_changes_while_a_run_goes_on_costs_no_measurement(folder, suite, fault):
    fault(folder)
    made = records.record(records.case(COUNTS, SPEEDS))
    case = {**made["cases"][0], "machine": made["machine"]}
    measured = {"acceptance": records.acceptance(COUNTS), "throughput": records.throughput(SPEEDS)}[suite]
    before = Judgement(suite, (Finding("ACC030", Verdict.FAIL, "as ever"),), measured)
    judgement = compare.hold(before, folder, case)
    assert judgement.measurements == measured
    first, finding = judgement.findings
    assert first == before.findings[0]
    assert (finding.code, finding.verdict) == ("BAS003", Verdict.INVALID)
    assert finding.remedy


def test_figures_that_are_incomplete_cost_no_measurement(folder):
    def lose(made):
        del made["machine"]["memory_bytes"]

    assert "memory_bytes" in held(folder, "acceptance", change=lose)["BAS003"].summary


def test_every_code_is_documented_and_produced_here():
    code = re.compile(r"\bBAS\d{3}\b")
    package = Path(harness.baseline.__file__).parent
    emitted = {found for file in package.glob("*.py") for found in code.findall(file.read_text())}
    table = (package.parent.parent / "docs" / "baselines.md").read_text()
    assert emitted == set(code.findall(table)) == set(code.findall(Path(__file__).read_text()))

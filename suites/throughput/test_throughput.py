"""Speculation pays: output tokens per second with speculation over without, on the same prompts, interleaved."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.gate.case import Case
from harness.measure import throughput

pytestmark = pytest.mark.suite("throughput")


def test_throughput(case: Case, judge: Judge) -> None:
    """The ratio's interval must clear the pair's threshold at every concurrency it names."""
    thresholds = case.pair.expect.throughput_ratio
    work = case.pair.workload
    run = throughput.measure(
        case.endpoint(speculative=True),
        case.endpoint(speculative=False),
        case.throughput_prompts,
        work.throughput_tokens,
        concurrency_ladder=sorted(thresholds),
        rounds=work.rounds,
        interleaved=case.pair.side_by_side,
        keep=lambda run: case.keep("rounds.json", run.as_measurements()),
    )
    judge(throughput.judge(run, thresholds))

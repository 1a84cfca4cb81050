"""The engine's own acceptance figures mean what is written of them, so that dashboards can rest on them."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.errors import EvidenceError
from harness.gate.case import Case
from harness.metrics.judge import contract
from harness.metrics.judge import judge as judge_metrics
from harness.metrics.measure import measure

pytestmark = pytest.mark.suite("metrics")


def test_metrics(case: Case, judge: Judge) -> None:
    """Each figure on the pages, in the answers and in the log, against a canary whose every verify step is known."""
    oracle, version = case.checkpoints.oracle, case.identity.version
    held_to = contract(case.adapter.name, version)
    if oracle is None or held_to is None:
        raise EvidenceError(f"{case.id}: there is {'no oracle' if oracle is None else 'nothing written'} to hold it to")
    run = measure(
        case.endpoint(speculative=True),
        case.spoken(),
        case.prompts,
        oracle,
        case.pair.k,
        case.pair.workload.max_tokens,
    )
    judge(judge_metrics(run, held_to, version))

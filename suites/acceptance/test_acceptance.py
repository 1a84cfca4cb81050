"""Drafts are accepted as often as they should be: exactly, for a canary; above the pair's threshold otherwise."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.gate.case import Case
from harness.measure import acceptance

pytestmark = pytest.mark.suite("acceptance")


def test_acceptance(case: Case, judge: Judge) -> None:
    """Raw counts by counter difference, prompt by prompt."""
    tokens, k = case.pair.workload.max_tokens, case.pair.k
    run = acceptance.measure(
        case.endpoint(speculative=True),
        case.prompts,
        tokens,
        k,
        keep=lambda run: case.keep("prompts.json", run.as_measurements()),
    )
    oracle = case.oracle_counts()
    if oracle is not None:
        judge(acceptance.judge_exact(run, oracle))
    else:
        judge(acceptance.judge_threshold(run, case.accept_length()))

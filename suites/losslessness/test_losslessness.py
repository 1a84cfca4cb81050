"""Greedy outputs with and without speculation are the same tokens, for one request and for several at once."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.gate.case import Case
from harness.measure import losslessness, outputs

pytestmark = pytest.mark.suite("losslessness")


def test_losslessness(case: Case, judge: Judge) -> None:
    """Equal in float32 and for canaries, which must also equal the oracle; else apart at near-ties only."""
    run = outputs.measure(
        case.endpoint(speculative=True),
        case.endpoint(speculative=False),
        case.prompts,
        case.pair.workload.max_tokens,
        side_by_side=case.pair.side_by_side,
    )
    judge(losslessness.judge(run, case.pair.dtype, oracle=case.oracle_outputs()))

"""Every tensor of target and drafter landed, and nothing that the engine built was left as constructed."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.errors import ServerError
from harness.gate import weights
from harness.gate.case import Case

pytestmark = pytest.mark.suite("weights")


def test_weights(case: Case, judge: Judge) -> None:
    """Both directions at 100 %; exceptions come from a reviewed data file only."""
    exceptions = weights.load_exceptions(case.adapter.name, case.identity.version)
    try:
        evidence = case.evidence()
    except ServerError:
        # A load that raises takes the server with it; what the probe saw of it names the key.
        failed = weights.judge_failed_start(case.loads_of_failed_start())
        if failed is None:
            raise
        judge(failed)
    else:
        judge(weights.judge(evidence, exceptions, case.checkpoints.alike, case.checkpoints.tied))

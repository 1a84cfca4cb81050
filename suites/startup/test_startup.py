"""Ready within the budget, in the runner asked for, from the engine it claims to be, with a clean log to the end."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.gate.case import Case
from harness.gate.startup import judge_log, judge_server
from harness.verdict import Judgement

pytestmark = pytest.mark.suite("startup")


def test_startup(case: Case, judge: Judge) -> None:
    """Both servers, with and without speculation."""
    findings = list(case.provenance)
    timelines = {}
    # Where they take turns, the speculative one comes last: it is what the next suites ask.
    for speculative in (True, False) if case.pair.side_by_side else (False, True):
        started = case.started(speculative=speculative)
        timelines[started.label] = case.launch_facts(speculative=speculative)
        findings += judge_server(
            started, budget_s=case.pair.expect.startup_s, runner=case.runner, bad_signs=case.adapter.bad_signs
        )
    judge(Judgement("startup", tuple(findings), {"servers": timelines}))


@pytest.mark.last
def test_log_to_the_end(case: Case, judge: Judge) -> None:
    """Every server of the case, when all suites have asked: an engine also says things while it serves."""
    findings = [judge_log(f"{name}, to the end", log, case.adapter.bad_signs) for name, log in case.logs().items()]
    judge(Judgement("startup", tuple(findings)))

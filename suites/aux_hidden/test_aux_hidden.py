"""The drafter is fed what it was trained on: n_aux x target hidden, through its projection, from the right layers."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.gate import aux_hidden
from harness.gate.case import Case

pytestmark = pytest.mark.suite("aux_hidden")


def test_aux_hidden(case: Case, judge: Judge) -> None:
    """The served width, the projection on every pass that needs it, and the captured layers by value."""
    judge(aux_hidden.judge(case.evidence(), case.expected_aux()))

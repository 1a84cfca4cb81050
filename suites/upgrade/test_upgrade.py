"""The new release does what the old one did, as well and as fast."""

from __future__ import annotations

import pytest

from fixtures.plugin import Judge
from harness.gate.change import Change, judge_exact
from harness.measure.change import acceptance_change, throughput_change
from harness.upgrade.compare import compare

pytestmark = pytest.mark.suite("upgrade")


def test_upgrade_record(change: Change, judge: Judge) -> None:
    """Everything that was recorded of both: coverage, config, layers, outputs, names, verdicts."""
    judge(compare(change.old_record, change.new_record))


def test_upgrade_acceptance(change: Change, judge: Judge) -> None:
    """Accept length and each draft position, on the same prompts in turn; of a canary, equality."""
    old, new = change.acceptance()
    oracle = change.new.oracle_counts()
    judge(acceptance_change(old, new) if oracle is None else judge_exact(old, new, oracle))


@pytest.mark.timed
def test_upgrade_throughput(change: Change, judge: Judge) -> None:
    """Output tokens per second with speculation, in alternating rounds until decided."""
    judge(throughput_change(change.throughput()))

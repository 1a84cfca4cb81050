"""A start-up that is late, in another runner or with a bad sign in its log is red."""

import pytest

from harness.engines.base import BadSign
from harness.engines.vllm import VllmAdapter
from harness.gate.startup import Started, judge_log, judge_server
from harness.verdict import Verdict

SIGNS = (BadSign("kaput", "it is broken", "mend it"), BadSign("hm", "odd", "look", fatal=False))


def codes(started, **changes):
    asked = {"budget_s": 60.0, "runner": "v1", "bad_signs": SIGNS} | changes
    return {finding.code: finding.verdict for finding in judge_server(started, **asked)}


def started(seconds=10.0, runner="v1", log="fine\nhm\n"):
    return Started("x-spec", seconds, runner, log, "proof")


def test_healthy():
    assert set(codes(started()).values()) == {Verdict.PASS}


def test_late():
    assert codes(started(61.0))["STA001"] is Verdict.FAIL


def test_another_runner():
    assert codes(started(runner="v2"))["STA002"] is Verdict.FAIL


def test_bad_sign():
    assert codes(started(log="it went kaput here"))["STA003"] is Verdict.FAIL


def test_empty_log():
    assert codes(started(log=""))["STA003"] is Verdict.INVALID


@pytest.mark.parametrize(
    "line",
    [
        "ERROR 11-29 Failed to load plugin draftgate_probe",
        "WARNING Some weights of the model checkpoint at x were not used",
        "The following weights were not initialized from checkpoint: {'fc.weight'}",
        "Speculative decoding is not supported with this backend",
    ],
)
def test_signs_of_vllm(line):
    assert codes(started(log=line), bad_signs=VllmAdapter().bad_signs)["STA003"] is Verdict.FAIL


@pytest.mark.parametrize(
    ("log", "verdict"), [("fine\n", Verdict.PASS), ("fine\nit went kaput\n", Verdict.FAIL), ("", Verdict.INVALID)]
)
def test_what_a_server_says_while_it_serves(log, verdict):
    finding = judge_log("x-spec, to the end", log, SIGNS)
    assert (finding.code, finding.verdict) == ("STA003", verdict)
    assert "x-spec, to the end" in finding.summary

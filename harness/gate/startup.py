"""Judging a start-up: in time, in the runner asked for, from the engine it claims to be; and what servers log."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from harness.engines.base import BadSign
from harness.verdict import Finding, Verdict

__all__ = ["Started", "judge_log", "judge_server"]

_LINE = 200


@dataclasses.dataclass(frozen=True)
class Started:
    """One server that came up: how long it took, the runner in force, its whole log and the proof of readiness."""

    label: str
    seconds: float
    runner: str
    log: str
    proof: str


def judge_server(started: Started, *, budget_s: float, runner: str, bad_signs: Sequence[BadSign]) -> list[Finding]:
    """Judge one server.

    Codes: STA001 ready within the budget, STA002 runner in force, STA003 bad signs in the log.
    """
    late = started.seconds > budget_s
    findings = [
        Finding(
            "STA001",
            Verdict.FAIL if late else Verdict.PASS,
            f"{started.label} was ready after {started.seconds:.1f} s" + (f", budget {budget_s:.0f} s" if late else ""),
            expected=f"a drafted and verified generation within {budget_s:.0f} s",
            actual=f"{started.seconds:.1f} s",
            n=1,
            source=started.proof,
            cause="the machine is slower than the pair's author assumed, or the engine does more at start-up"
            if late
            else "",
            remedy="compare the timeline with an earlier run; raise expect.startup_s if the new time is right"
            if late
            else "",
        ),
        Finding(
            "STA002",
            Verdict.PASS if started.runner == runner else Verdict.FAIL,
            f"{started.label} runs model runner {started.runner}",
            expected=runner,
            actual=started.runner,
            n=1,
            source="server log",
            cause="" if started.runner == runner else "the engine fell back to another runner",
            remedy=""
            if started.runner == runner
            else "the log says why; a judgement of the wrong runner is worth nothing",
        ),
    ]
    return [*findings, judge_log(started.label, started.log, bad_signs)]


def judge_log(label: str, log: str, bad_signs: Sequence[BadSign]) -> Finding:
    """Judge what a server has written so far.

    Code: STA003 bad signs in the log; INVALID if there is nothing in it.
    """
    lines = log.splitlines()
    hits = [(sign, line) for sign in bad_signs for line in lines if re.search(sign.pattern, line)]
    fatal = [(sign, line) for sign, line in hits if sign.fatal]
    if not lines:
        return Finding(
            "STA003",
            Verdict.INVALID,
            f"{label} has an empty log",
            source="server log",
            cause="the log was not captured",
            remedy="report this: every server has a log",
        )
    if fatal:
        sign, line = fatal[0]
        return Finding(
            "STA003",
            Verdict.FAIL,
            f"{label}: {sign.meaning}",
            expected="none of the known bad signs",
            actual=line[:_LINE],
            n=len(lines),
            source="server log",
            cause=sign.meaning,
            remedy=sign.remedy,
        )
    noted = "; ".join(sorted({sign.meaning for sign, _ in hits}))
    return Finding(
        "STA003",
        Verdict.PASS,
        f"{label}: the log is clean",
        n=len(lines),
        source="server log",
        expected="none of the known bad signs",
        actual=noted or f"{len(bad_signs)} signs looked for",
    )

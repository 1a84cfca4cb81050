"""The diagnosis: every cause with its verdict, the first of them, and the next cheapest test."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from harness.diagnose import causes
from harness.diagnose.acceptance import State
from harness.diagnose.judge import JUDGES
from harness.diagnose.verdicts import Case, Opinion, Status

__all__ = ["SCHEMA", "Diagnosis", "NextTest", "diagnose"]

SCHEMA = 1
"""Of `Diagnosis.as_json`. Raised when a key changes its meaning or goes; new keys may come without."""

_RANK = {status: rank for rank, status in enumerate(Status)}
_COSTS = ("nothing to run", "seconds, no engine", "one start of the server", "hours of GPUs")


@dataclasses.dataclass(frozen=True)
class NextTest:
    """The cheapest test that is still open, and which causes it tells apart."""

    what: str
    command: str
    cost: str
    separates: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A cause with what was found about it."""

    code: str
    title: str
    why: str
    rule: str
    status: Status
    grounds: tuple[str, ...]
    remedy: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Verdicts, the first first: by status, then in the order to look. `next_test` is None where none is left."""

    verdicts: tuple[Verdict, ...]
    next_test: NextTest | None
    readings: tuple[str, ...]
    contradictions: tuple[str, ...]
    state: State
    healthy: bool

    @property
    def first(self) -> Verdict | None:
        """The cause that is named; None where nothing is confirmed or likely."""
        top = self.verdicts[0]
        return top if top.status in (Status.CONFIRMED, Status.LIKELY) and not self.contradictions else None

    @property
    def exit_status(self) -> int:
        """0: nothing is wrong by these figures. 1: a cause is named. 3: not decided."""
        if self.healthy and not self.contradictions and all(v.status is not Status.CONFIRMED for v in self.verdicts):
            return 0
        return 1 if self.first is not None else 3

    def as_json(self) -> dict[str, Any]:
        """Return the document of `--json`, which docs/diagnose.md describes."""
        return {
            "schema": SCHEMA,
            "first": self.first.code if self.first else None,
            "healthy": self.exit_status == 0,
            "acceptance": self.state,
            "readings": self.readings,
            "contradictions": self.contradictions,
            "causes": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "next_test": dataclasses.asdict(self.next_test) if self.next_test else None,
        }


def diagnose(case: Case, contradictions: tuple[str, ...] = (), *, log: str = "") -> Diagnosis:
    """Walk the causes in order. `log` is the path to name in commands."""
    known, tests = causes.load()
    words = _words(case, log)
    verdicts = [_verdict(cause, JUDGES[cause.code](case), words) for cause in known]
    order = {cause.code: number for number, cause in enumerate(known)}
    verdicts.sort(key=lambda verdict: (_RANK[verdict.status], order[verdict.code]))
    contradictions = (
        *contradictions,
        *(case.acceptance.problems if case.acceptance.state is State.CONTRADICTORY else ()),
    )
    return Diagnosis(
        tuple(verdicts),
        _next(case, verdicts, known, tests, words),
        case.acceptance.notes,
        contradictions,
        case.acceptance.state,
        _healthy(case),
    )


def _healthy(case: Case) -> bool:
    return case.acceptance.state is State.EXPECTED and not case.acceptance.slow


def _verdict(cause: causes.Cause, opinion: Opinion, words: Mapping[str, str]) -> Verdict:
    rule = {Status.EXCLUDED: cause.excluded, Status.CONFIRMED: cause.confirmed}.get(opinion.status, "")
    remedy = opinion.remedy or cause.remedy.format_map(words)
    return Verdict(cause.code, cause.title, cause.why, rule, opinion.status, opinion.grounds, remedy)


def _words(case: Case, log: str) -> Mapping[str, str]:
    static = case.static
    drafter = shlex.quote(str(static.drafter.folder)) if static else "DRAFTER"
    target = shlex.quote(str(static.target.folder)) if static and static.target else "TARGET"
    engine = case.engine or "ENGINE"
    release = case.release or f"{engine}==VERSION"
    return {
        "drafter": drafter, "target": target, "engine": engine, "release": release,
        "log": shlex.quote(log) if log else "SERVER.log", "k": str(case.acceptance.k or "K"),
    }  # fmt: skip


def _next(
    case: Case,
    verdicts: list[Verdict],
    known: tuple[causes.Cause, ...],
    tests: Mapping[str, causes.Test],
    words: Mapping[str, str],
) -> NextTest | None:
    """Return the cheapest open test of the causes that stand first; none after a confirmed one: repair goes first."""
    if verdicts[0].status is Status.CONFIRMED or _healthy(case):
        return None
    done = _done(case)
    named = {cause.code: cause.tests for cause in known}
    remaining = [verdict.code for verdict in verdicts if verdict.status is not Status.EXCLUDED]
    separates = {
        name: tuple(code for code in remaining if name in named[code])
        for name in tests
        if name not in done
    }  # fmt: skip
    # A likely cause is settled first. Of tests as cheap, the one that speaks of the most causes.
    first = [verdict.code for verdict in verdicts if verdict.status is Status.LIKELY] or remaining
    open_tests = [tests[name] for name, codes in separates.items() if set(codes) & set(first)]
    if not open_tests:
        return None
    best = min(open_tests, key=lambda test: (test.cost, -len(separates[test.name])))
    return NextTest(best.what, best.command.format_map(words), _COSTS[best.cost], separates[best.name])


def _done(case: Case) -> set[str]:
    """Return the tests whose outcome is among the facts, and those that cannot tell more here."""
    facts, static = case.symptoms, case.static
    codes = {finding.code for finding in facts.findings}
    answered = {
        "figures": case.acceptance.length is not None or case.acceptance.state is State.OFF,
        "release": facts.version is not None,
        "launch": facts.algorithm is not None,
        "speeds": facts.tokens_per_second is not None and facts.plain_tokens_per_second is not None,
        "training": facts.training_accuracy is not None,
        "states": facts.trained_on is not None,
        "environment": facts.simulated is not None,
        "checkpoint": static is not None,
        "contract": static is not None and static.exact,
        "target": static is not None and static.target is not None,
        "probe": bool({"WGT003", "AUX002"} & codes),
        "acceptance": bool({"ACC020", "ACC030", "ACC031"} & codes),
        "load": "THR010" in codes,
        "retrain": False,
    }
    return {name for name, is_done in answered.items() if is_done}

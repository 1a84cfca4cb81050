"""What judges are made of: rules that give an opinion or pass, of which the first that has one decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from harness.diagnose.acceptance import State
from harness.diagnose.static import Release, Static
from harness.diagnose.symptoms import RecordFinding
from harness.diagnose.verdicts import Case, Opinion, confirmed, excluded, remains

__all__ = [
    "Judge",
    "Rule",
    "accepted_as_trained",
    "by_record",
    "first",
    "idle",
    "known_drafter",
    "listed",
    "no_drafter",
    "not_checked",
    "seen",
]

Rule = Callable[[Case], Opinion | None]
Judge = Callable[[Case], Opinion]


def first(*rules: Rule, otherwise: Judge) -> Judge:
    """Return a judge: the first rule that has an opinion decides, `otherwise` if none has."""

    def judge(case: Case) -> Opinion:
        return next((opinion for rule in rules if (opinion := rule(case)) is not None), None) or otherwise(case)

    return judge


def listed(releases: Iterable[Release]) -> str:
    """Return the names of releases."""
    return ", ".join(release.name for release in releases)


def seen(findings: Iterable[RecordFinding]) -> tuple[str, ...]:
    """Return findings of a record as grounds."""
    return tuple(
        f"{f.code} {f.verdict}: {f.summary}{f' ({f.actual})' if f.actual else ''} [{f.source}]" for f in findings
    )


def by_record(*codes: str, of: str = "") -> Rule:
    """Return a rule that judges by what the probe saw in the running engine: red confirms, green excludes.

    It goes before what is said without running the engine. `of`: only findings whose summary has this word.
    """

    def rule(case: Case) -> Opinion | None:
        found = [f for f in case.symptoms.findings if f.code in codes and of in f.summary]
        if red := [f for f in found if f.verdict == "FAIL"]:
            return confirmed(*seen(red), remedy=red[0].remedy)
        if found and all(f.verdict == "PASS" for f in found):
            return excluded(*seen(found))
        return None

    return rule


def accepted_as_trained(case: Case) -> Opinion | None:
    """Exclude what would cost acceptance where none is missing."""
    if case.acceptance.state is State.EXPECTED:
        return excluded(f"accept length {case.acceptance.length:.2f} is what was to be expected")
    return None


def idle(case: Case) -> Opinion | None:
    """Leave open what only a server that speculates shows."""
    if case.acceptance.state is State.OFF:
        return remains("not to be told while the server does not speculate")
    return None


def no_drafter(case: Case) -> Opinion | None:
    """Leave open what stands in the drafter's files where none was given."""
    return remains("no --drafter was given, so its tensors and config were not looked at") if not case.static else None


def known_drafter(case: Case) -> Static:
    """Return the drafter, after `no_drafter` has passed."""
    assert case.static is not None  # noqa: S101 -- no_drafter goes first
    return case.static


def not_checked(case: Case) -> Opinion | None:
    """Leave open what a contract would say where none speaks of this drafter on this release."""
    static = known_drafter(case)
    if not static.is_eagle3:
        return remains(f"the drafter is {static.about.method}, and contracts speak of EAGLE-3 drafters only")
    if static.releases:
        return None
    for release in reversed(static.silent):  # the newest speaks for all
        if release.silence is not None:
            return remains(f"{release.silence.summary} [{release.name}]")
    known = case.release or case.engine
    return remains(f"there is no contract of {known}, nor of releases on both sides: what it does is not known")

"""What each suite concluded under two versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.errors import EvidenceError
from harness.report.table import SUITES, UPGRADE
from harness.upgrade.model import Change, Compared, Context, Kind, lost
from harness.upgrade.recorded import Side, at, need
from harness.verdict import Finding, Verdict, worst

__all__ = ["judge", "read"]


@dataclasses.dataclass(frozen=True)
class Suite:
    """What one suite concluded: its verdict, and its findings that are not PASS, the worst first."""

    verdict: Verdict
    red: tuple[Mapping[str, Any], ...]

    @property
    def reason(self) -> str:
        """Return the worst finding in a line."""
        return f"{self.red[0]['code']}: {self.red[0]['summary']}" if self.red else ""

    @property
    def failed(self) -> frozenset[str]:
        """Return the codes that failed."""
        return frozenset(finding["code"] for finding in self.red if finding["verdict"] == Verdict.FAIL)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What each suite concluded, and the suites that the pair does not ask."""

    suites: Mapping[str, Suite]
    not_asked: frozenset[str]


def read(side: Side) -> Facts:
    """Return what each suite concluded. Raises EvidenceError for a verdict that its findings do not bear out."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for item in need(side.case, "judgements", list):
        suite = need(item, "suite", str)
        findings = need(item, "findings", list)
        verdict = Verdict(at(item, "verdict"))
        said = worst([Verdict(at(finding, "verdict")) for finding in findings])
        if said is not verdict:
            raise EvidenceError(f"findings that bear out the verdict of {suite} (it is {verdict}, they say {said})")
        found.setdefault(suite, []).extend(findings)
    suites = {}
    for suite, findings in found.items():
        verdict = worst([Verdict(finding["verdict"]) for finding in findings])
        red = [finding for finding in findings if finding["verdict"] != Verdict.PASS]
        suites[suite] = Suite(verdict, tuple(sorted(red, key=lambda finding: finding["verdict"] != verdict)))
    return Facts(suites, frozenset(at(side.case, "not_asked")))


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge each suite's step from the old version to the new one.

    What was PASS takes the new verdict: FAIL is a regression, while INCONCLUSIVE and INVALID have shown nothing, which
    is no pass either. What failed before and still does, by the same codes, is named and is no regression; a code that
    did not fail before is one. Where the old side decided nothing, a failure of the new side cannot be laid at the
    upgrade's door, and nothing is decided here either.

    Codes: UPG070, one per suite; UPG002 a suite that one side did not judge.
    """
    findings: list[Finding] = []
    changes: list[Change] = []
    names = [*SUITES, *sorted((old.suites.keys() | new.suites.keys()) - set(SUITES))]
    for suite in (name for name in names if name != UPGRADE):
        if suite in old.not_asked and suite in new.not_asked:
            continue
        missing = [side for side, facts in (("old", old), ("new", new)) if suite not in facts.suites]
        findings += [lost(side, f"a judgement of the suite {suite}") for side in missing]
        if not missing:
            done = _step(suite, old.suites[suite], new.suites[suite], context)
            findings += done.findings
            changes += done.changes
    return Compared(tuple(findings), tuple(changes))


def _step(suite: str, was: Suite, now: Suite, context: Context) -> Compared:
    source = f"findings of the suite {suite}"
    if was.verdict is now.verdict is Verdict.PASS:
        return Compared((Finding("UPG070", Verdict.PASS, f"{suite} passes as before", source=source),))
    before, after = (f"{each.verdict} {each.reason}".strip() for each in (was, now))
    step = f"{suite} was {was.verdict} in {context.old_version} and is {now.verdict} in {context.new_version}"
    if now.verdict is Verdict.PASS:
        finding = Finding("UPG070", Verdict.PASS, step, expected=before, actual=after, source=source)
        return Compared((finding,), (Change("verdicts", Kind.BETTER, suite, before, after),))
    fresh = [finding for finding in now.red if finding["code"] not in was.failed]
    if was.verdict is now.verdict is Verdict.FAIL and not any(each["verdict"] == Verdict.FAIL for each in fresh):
        text = f"{suite} was red before and still is: {now.reason}"
        finding = Finding("UPG070", Verdict.PASS, text, expected=before, actual=after, source=source)
        return Compared((finding,), (Change("verdicts", Kind.STILL_RED, suite, before, after),))
    verdict = now.verdict if now.verdict is not Verdict.FAIL or was.verdict in _DECIDED else was.verdict
    told = next((each for each in fresh if each["verdict"] == now.verdict), now.red[0])
    finding = Finding(
        "UPG070",
        verdict,
        f"{step}: {told['code']}: {told['summary']}",
        expected=told.get("expected") or before,
        actual=told.get("actual", ""),
        source=source,
        cause=context.cause(told.get("cause", "")),
        remedy=told.get("remedy", ""),
        known_issue=told.get("known_issue", ""),
    )
    return Compared((finding,), (Change("verdicts", Kind.WORSE, suite, before, after),))


_DECIDED = (Verdict.PASS, Verdict.FAIL)
"""The verdicts that rest on complete evidence."""

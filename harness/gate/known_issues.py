"""Defects of released engines that are known: a reviewed data file, matched against findings."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from harness.errors import UsageError
from harness.verdict import Finding, Judgement, Verdict

__all__ = ["FILE", "KnownIssue", "annotate", "load"]

FILE = Path(__file__).with_name("known_issues.toml")


@dataclasses.dataclass(frozen=True)
class KnownIssue:
    """A defect: which engine, versions and runner have it, which finding it shows as, and how to reproduce it.

    `actual` is a regular expression for the whole of what the finding saw ("" for anything): a finding that saw more
    than the defect explains is not this defect.
    """

    code: str
    title: str
    engine: str
    versions: SpecifierSet
    runners: tuple[str, ...]
    findings: tuple[str, ...]
    actual: str
    source: str
    reference: str
    reproduce: str
    remedy: str

    def covers(self, engine: str, version: str, runner: str, finding: Finding) -> bool:
        """Say whether `finding`, seen under these conditions, is this defect."""
        try:
            in_range = self.versions.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False
        return (
            engine == self.engine
            and in_range
            and (not self.runners or runner in self.runners)
            and finding.code in self.findings
            and (not self.actual or re.fullmatch(self.actual, finding.actual) is not None)
        )


@functools.cache
def load(path: Path = FILE) -> dict[str, KnownIssue]:
    """Return the issues of a data file by code.

    Raises:
        UsageError: an entry lacks a key, has one too many, or names an impossible version range.

    """
    issues = {}
    names = {field.name for field in dataclasses.fields(KnownIssue)} - {"code"}
    for code, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if set(entry) != names:
            wrong = sorted(set(entry) ^ names)
            raise UsageError(f"{path}: [{code}] lacks or does not know: {', '.join(wrong)}")
        try:
            versions = SpecifierSet(entry.pop("versions"))
        except InvalidSpecifier as error:
            raise UsageError(f"{path}: [{code}] versions: {error}") from error
        runners, findings = tuple(entry.pop("runners")), tuple(entry.pop("findings"))
        issues[code] = KnownIssue(code=code, versions=versions, runners=runners, findings=findings, **entry)
    return issues


def annotate(
    judgement: Judgement, *, engine: str, version: str, runner: str, accepted: Iterable[str] = (), path: Path = FILE
) -> Judgement:
    """Name the known issue behind each red finding; one whose code the pair's owner accepts no longer fails the suite.

    An accepted finding stays in the record with its evidence and the code it was accepted under.
    """
    accepted = set(accepted)
    findings = []
    for finding in judgement.findings:
        new = finding
        if finding.verdict is not Verdict.PASS:
            for issue in load(path).values():
                if issue.covers(engine, version, runner, finding):
                    label = f"{issue.code}: {issue.title}"
                    new = dataclasses.replace(finding, known_issue=label, remedy=issue.remedy or finding.remedy)
                    if issue.code in accepted and finding.verdict is Verdict.FAIL:
                        new = dataclasses.replace(
                            new, verdict=Verdict.PASS, known_issue=f"{label} (accepted by the pair)"
                        )
                    break
        findings.append(new)
    return dataclasses.replace(judgement, findings=tuple(findings))

"""What a suite concluded, and why.

Evidence comes in as raw counts with provenance; what goes out is one of four words and the findings behind it.
Missing evidence is `INVALID`, never a pass and never a skip.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

__all__ = ["Finding", "Judgement", "Verdict", "some", "worst"]


class Verdict(enum.StrEnum):
    """The four outcomes. Their order is the order in which they win when several are combined."""

    PASS = "PASS"  # noqa: S105 -- a verdict, not a secret
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    FAIL = "FAIL"


_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict that wins; an empty list is `INVALID`, for nothing was looked at."""
    return max(verdicts, key=_RANK.__getitem__) if verdicts else Verdict.INVALID


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what was seen.

    `n` is how many samples the statement rests on; `interval` is the two-sided interval of `actual` where it is an
    estimate; `source` says where the evidence came from (a counter's name, a file, an engine call).
    """

    code: str
    verdict: Verdict
    summary: str
    expected: str = ""
    actual: str = ""
    n: int | None = None
    interval: tuple[float, float] | None = None
    source: str = ""
    cause: str = ""
    remedy: str = ""
    known_issue: str = ""

    def as_text(self) -> str:
        """Return the finding as the block a person reads when a suite is red."""
        lines = [f"{self.verdict} [{self.code}] {self.summary}"]
        for label, value in (
            ("expected", self.expected),
            ("actual", self.actual),
            ("samples", "" if self.n is None else str(self.n)),
            ("interval", "" if self.interval is None else f"{self.interval[0]:.4g} to {self.interval[1]:.4g}"),
            ("evidence", self.source),
            ("likely cause", self.cause),
            ("remedy", self.remedy),
            ("known issue", self.known_issue),
        ):
            if value:
                lines.append(f"    {label + ':':<13} {value}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict of one suite on one case, with every finding and the raw measurements it rests on."""

    suite: str
    findings: tuple[Finding, ...]
    measurements: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst of the findings' verdicts; no findings at all is `INVALID`."""
        return worst([finding.verdict for finding in self.findings])

    def as_text(self) -> str:
        """Return all findings, red ones first."""
        ordered = sorted(self.findings, key=lambda finding: -_RANK[finding.verdict])
        return "\n".join(finding.as_text() for finding in ordered)


def some(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and how many more there are: what a finding has room for."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

"""What comparing two versions yields: findings, and every difference seen, worse or not."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from harness.verdict import Finding, Verdict, some

__all__ = ["Change", "Compared", "Context", "Kind", "lost", "shown"]

_NAMED = 12
"""How many names a finding spells out; the judgement's measurements have all of them."""


class Kind(enum.StrEnum):
    """What a difference means."""

    WORSE = "worse"
    BETTER = "better"
    DIFFERENT = "different"
    STILL_RED = "was red before"


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that is not the same under the two versions; "" on the side that has nothing."""

    topic: str
    kind: Kind
    what: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Compared:
    """What one topic came to."""

    findings: tuple[Finding, ...]
    changes: tuple[Change, ...] = ()


@dataclasses.dataclass(frozen=True)
class Context:
    """What is known of both sides. `suspects` says which packages changed, the likeliest first; "" for none."""

    engine: str
    old_version: str
    new_version: str
    canary: bool
    dtype: str
    suspects: str

    def cause(self, text: str) -> str:
        """Return a likely cause with what else changed."""
        return "; ".join(part for part in (text, self.suspects and f"changed with it: {self.suspects}") if part)


def lost(side: str, what: str) -> Finding:
    """Return the finding of a piece of evidence that one side ("old" or "new") does not have.

    Code: UPG002.
    """
    return Finding(
        "UPG002",
        Verdict.INVALID,
        f"the {side} version's record lacks {what}",
        expected="the same evidence of both versions",
        actual=f"{side}: missing",
        source=f"record of the {side} version",
        cause="the run was cut short, a suite did not get that far, or the record is of an older draftgate",
        remedy=f"run the {side} version again with this draftgate, all suites; read that suite's own finding first",
    )


def shown(names: Sequence[str]) -> str:
    """Return names as a finding spells them out."""
    return some(names, _NAMED) or "none"

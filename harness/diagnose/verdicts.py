"""What the judges say: a status per cause, and the grounds it rests on."""

from __future__ import annotations

import dataclasses
import enum

from harness.diagnose.acceptance import Acceptance
from harness.diagnose.static import Static
from harness.diagnose.symptoms import RecordFinding, Symptoms

__all__ = ["Case", "Opinion", "Status", "confirmed", "excluded", "likely", "remains"]


class Status(enum.StrEnum):
    """How a cause stands, in the order in which they are told."""

    CONFIRMED = "confirmed"
    """The defect is there, and alone explains what is seen."""
    LIKELY = "likely"
    """It is there, or everything points to it; that it is enough is not shown."""
    REMAINS = "remains"
    """Nothing speaks against it, and nothing for it."""
    EXCLUDED = "excluded"
    """It is not there, or cannot show like this."""


@dataclasses.dataclass(frozen=True)
class Opinion:
    """A status and its grounds, each with its source. `remedy` where it is more exact than the cause's own."""

    status: Status
    grounds: tuple[str, ...]
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that a judge may look at. `static` is None without a drafter."""

    symptoms: Symptoms
    acceptance: Acceptance
    static: Static | None

    @property
    def engine(self) -> str:
        """`sglang`, `vllm`, or nothing."""
        return self.symptoms.engine.value if self.symptoms.engine else ""

    @property
    def release(self) -> str:
        """`sglang==0.5.9`, or nothing unless both are known."""
        version = self.symptoms.version
        return f"{self.engine}=={version.value}" if self.engine and version else ""

    def red(self, *codes: str) -> tuple[RecordFinding, ...]:
        """Return the record's findings of these codes that failed."""
        return tuple(f for f in self.symptoms.findings if f.code in codes and f.verdict == "FAIL")

    def green(self, code: str) -> tuple[RecordFinding, ...]:
        """Return the record's findings of this code, if there are any and all passed."""
        found = tuple(f for f in self.symptoms.findings if f.code == code)
        return found if found and all(f.verdict == "PASS" for f in found) else ()


def confirmed(*grounds: str, remedy: str = "") -> Opinion:
    """Return that opinion."""
    return Opinion(Status.CONFIRMED, grounds, remedy)


def likely(*grounds: str, remedy: str = "") -> Opinion:
    """Return that opinion."""
    return Opinion(Status.LIKELY, grounds, remedy)


def remains(*grounds: str, remedy: str = "") -> Opinion:
    """Return that opinion."""
    return Opinion(Status.REMAINS, tuple(filter(None, grounds)), remedy)


def excluded(*grounds: str) -> Opinion:
    """Return that opinion."""
    return Opinion(Status.EXCLUDED, grounds)

"""What is to be said about a checkpoint: a stable code, how bad it is, where it stands, and what to do."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Finding", "Severity"]


class Severity(enum.StrEnum):
    """How bad a finding is. Only errors make a command fail."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was seen. `where` names a file, a tensor or a config key; `remedy` may be empty for a note."""

    code: str
    severity: Severity
    where: str
    summary: str
    remedy: str = ""

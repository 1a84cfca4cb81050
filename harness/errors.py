"""What can go wrong in the harness itself, as one exception tree.

::

    HarnessError                 everything this project raises on purpose
    ├── UsageError               the person's input is wrong: a flag, a file, a key (exit status 2)
    │   ├── PairError            a pair definition
    │   └── CheckpointError      a checkpoint that cannot be read
    ├── EnvironmentFault         the engine's environment cannot be made or is not what it claims to be
    ├── ServerError              the life of a server process (see harness.servers)
    └── EvidenceError            evidence is missing or contradicts itself

Subclasses that belong to one package are declared beside the code that raises them.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CheckpointError",
    "EnvironmentFault",
    "EvidenceError",
    "HarnessError",
    "PairError",
    "ServerError",
    "UsageError",
    "described",
]


class HarnessError(Exception):
    """Root of the tree. `message` says what is wrong and where; `remedy` what to do about it.

    `log_path` is the log of the server at fault, where there is one.
    """

    log_path: Path | None = None

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


def described(error: BaseException) -> str:
    """Return an error with its notes: where a server was, what its log said last, what it left behind."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class UsageError(HarnessError):
    """The person's input is wrong. Names the file, key or flag."""


class PairError(UsageError):
    """A pair definition cannot be used. Names the file and the key."""


class CheckpointError(UsageError):
    """A checkpoint cannot be read. Names the file and, where there is one, the offset."""


class EnvironmentFault(HarnessError):  # noqa: N818 -- EnvironmentError is a builtin, another thing
    """The engine's environment cannot be made, or is not what it claims to be."""


class ServerError(HarnessError):
    """A server did not start, did not stay up, or did not go away."""


class EvidenceError(HarnessError):
    """Evidence is missing, damaged or contradicts itself. Never to be read as a pass."""

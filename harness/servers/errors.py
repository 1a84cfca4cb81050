"""What can go wrong with a server process, with the scene that a person needs to see.

::

    ServerError
    └── ServerFault          carries the scene: command, log, its tail, the timeline
        ├── ServerDied       it exited, or was killed, while it was needed
        ├── ServerHung       neither log growth nor CPU progress
        ├── ServerNotReady   it lives, but no generation came through in time
        ├── PortTaken        someone else has the port
        └── ServerLeftovers  something outlived the tear-down
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from harness.errors import ServerError

__all__ = ["PortTaken", "Scene", "ServerDied", "ServerFault", "ServerHung", "ServerLeftovers", "ServerNotReady"]

_PRINTED_LINES = 60


@dataclasses.dataclass(frozen=True)
class Scene:
    """Where and how a server ran: `log_tail` holds its last lines, `timeline` (seconds since launch, what began)."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    log_tail: tuple[str, ...] = ()
    timeline: tuple[tuple[float, str], ...] = ()

    def as_text(self) -> str:
        """Return the scene as the block below an error message."""
        printed = self.log_tail[-_PRINTED_LINES:]
        lines = [f"  command: {shlex.join(self.argv)}", f"  log: {self.log_path}"]
        if self.timeline:
            lines.append("  timeline: " + "; ".join(f"{seconds:.1f} s {label}" for seconds, label in self.timeline))
        lines.append(f"  last {len(printed)} lines of the log:" if printed else "  the log is empty")
        lines += [f"  | {line}" for line in printed]
        return "\n".join(lines)


class ServerFault(ServerError):  # noqa: N818 -- named like those it is the root of
    """A server error with its scene; `cause` is the likely cause, `details` long evidence such as stacks."""

    def __init__(self, message: str, scene: Scene, *, cause: str = "", remedy: str = "", details: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.scene = scene
        self.log_path: Path = scene.log_path
        self.cause = cause
        self.details = details

    @property
    def argv(self) -> tuple[str, ...]:
        """The command as it was run."""
        return self.scene.argv

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines of the log when the error was raised."""
        return self.scene.log_tail

    def __str__(self) -> str:
        """Return everything a person needs, the verdict first."""
        lines = [f"server {self.scene.name!r}: {self.message}"]
        if self.cause:
            lines.append(f"  likely cause: {self.cause}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        lines.append(self.scene.as_text())
        if self.details:
            lines.append(self.details)
        return "\n".join(lines)


class ServerDied(ServerFault):
    """The server exited while it was needed. `returncode` is negative for a signal, None if nobody saw it end."""

    def __init__(
        self, message: str, scene: Scene, *, returncode: int | None, cause: str = "", remedy: str = ""
    ) -> None:
        super().__init__(message, scene, cause=cause, remedy=remedy)
        self.returncode = returncode


class ServerHung(ServerFault):
    """No log growth and no CPU progress of the whole tree; `details` holds the stacks of its Python processes."""


class ServerNotReady(ServerFault):
    """No proof of a generation within `ready_timeout_s`; `details` holds the stacks of its Python processes."""


class PortTaken(ServerFault):
    """The server's port belongs to someone else."""


class ServerLeftovers(ServerFault):
    """Processes, a listening port or files outlived the tear-down; the message names each."""

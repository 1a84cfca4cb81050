"""What is to be started, and how it is to be judged while it starts: one frozen, hashable fact."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re

from harness.errors import UsageError

__all__ = ["Phase", "ServerSpec"]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A step of a server's start-up: a log line that matches `pattern` (`re.search`) says that `label` has begun."""

    pattern: str
    label: str

    def __post_init__(self) -> None:
        """Compile the pattern once, so that a bad one is refused where it is written.

        Raises:
            UsageError: `pattern` is not a regular expression.

        """
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UsageError(
                f"Phase.pattern {self.pattern!r} (label {self.label!r}) is not a regular expression: {error}",
                remedy="escape it with re.escape, or correct it",
            ) from error


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """How to start one server, and how long to believe in it.

    `argv` items may contain `{port}`, which the chosen port replaces. `env` is added to a copy of the parent's
    environment; a value of None removes the variable. `port` 0 lets the harness choose. A server that shows neither
    log growth nor CPU progress for `hang_after_s` seconds while something is expected of it is hung. `stop_grace_s` is
    the time between SIGTERM and SIGKILL. All times are seconds.
    """

    name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str | None], ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    ready_timeout_s: float = 600.0
    hang_after_s: float = 120.0
    stop_grace_s: float = 20.0
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be launched.

        Raises:
            UsageError: a field that no launch could honour.

        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", self.name):
            raise UsageError(
                f"ServerSpec.name is {self.name!r}; it names files",
                remedy="use letters, digits, '.', '_', '+' and '-', beginning with a letter or digit",
            )
        if not self.argv:
            raise UsageError("ServerSpec.argv is empty", remedy="give the command that starts the server")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"ServerSpec.port is {self.port}", remedy="use 0 (choose one) to 65535")
        for field in ("ready_timeout_s", "hang_after_s", "stop_grace_s"):
            if not getattr(self, field) > 0:
                raise UsageError(f"ServerSpec.{field} is {getattr(self, field)}", remedy="use a positive number")

    @property
    def key(self) -> str:
        """Return 16 hexadecimal digits that are equal for equal specs, in every process and on every machine."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def command(self, port: int) -> tuple[str, ...]:
        """Return `argv` with `{port}` replaced; other braces (JSON arguments) are left alone."""
        return tuple(item.replace("{port}", str(port)) for item in self.argv)

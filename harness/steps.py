"""Other programs run as steps of a longer piece of work, their output kept for whoever has to read why one failed."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import HarnessError

__all__ = ["StepError", "run_step"]

# They would lead a program out of the environment that it is run in, or keep it from compiling what it imports.
_NOT_INHERITED = (
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "UV_PYTHON", "UV_SYSTEM_PYTHON"),
)
_TAIL_LINES = 20


class StepError(HarnessError):
    """A step ended with an exit status other than 0. `tail` holds its last lines, `log` all of them."""

    def __init__(self, command: Sequence[str], status: int, tail: str, log: Path, *, remedy: str = "") -> None:
        super().__init__(
            f"exit status {status} of: {shlex.join(command)}\n  last lines (all are in {log}):\n{tail}", remedy=remedy
        )
        self.command = tuple(command)
        self.status = status
        self.tail = tail
        self.log = log


def run_step(command: Sequence[str], *, log: Path, held: int, env: Mapping[str, str] | None = None) -> None:
    """Run `command`, append what it prints to `log`, and have it hold the lock `held` for as long as it runs.

    `env` comes on top of this process's environment, less what belongs to this process's own Python.

    Raises StepError if it ends with another exit status than 0 or cannot be started.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    with log.open("ab") as output:
        start = output.tell()
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=inherited | {"PYTHONNOUSERSITE": "1"} | dict(env or {}),
                pass_fds=(held,),
                check=False,
            ).returncode
        except OSError as error:
            raise StepError(command, 127, f"    {error}", log) from error
    if status:
        lines = log.read_bytes()[start:].decode("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        raise StepError(command, status, "\n".join(f"    {line}" for line in lines) or "    no output", log)

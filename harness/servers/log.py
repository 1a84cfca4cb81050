"""Follow a server's log: its lines, its phases, the signs of a known trouble, its tail."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from pathlib import Path

from harness.servers import signs
from harness.servers.spec import Phase

__all__ = ["LogFollower"]

_CHUNK = 1 << 20
_TAIL_LINES = 200
_LONGEST_LINE = 1 << 16
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LogFollower:
    """Reads what was added to `path` at each `poll`. Holds the tail and the signs of trouble, whatever the size.

    `sign` is the last that was seen: engines warn of packages they can do without long before what ends them. `signs`
    are all.
    """

    def __init__(self, path: Path, phases: Iterable[Phase]) -> None:
        self.path = path
        self.size = 0
        self.phase = ""
        self.sign: signs.Sign | None = None
        self.signs: set[signs.Sign] = set()
        self._phases = [(re.compile(phase.pattern), phase.label) for phase in phases]
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._partial = b""

    def poll(self) -> list[str]:
        """Take in what was written since; return the labels of the phases that began, in order."""
        begun: list[str] = []
        with self.path.open("rb") as file:
            file.seek(self.size)
            while chunk := file.read(_CHUNK):
                self.size += len(chunk)
                # A progress bar redraws its line with carriage returns; each redraw counts as a line.
                *lines, self._partial = re.split(rb"[\r\n]+", self._partial + chunk)
                if len(self._partial) > _LONGEST_LINE:
                    lines.append(self._partial)
                    self._partial = b""
                for raw in lines:
                    self._take(raw, begun)
        return begun

    def tail(self) -> tuple[str, ...]:
        """Return the last lines, a last one without its newline included."""
        last = _printable(self._partial)
        return (*self._tail, last) if last else tuple(self._tail)

    def _take(self, raw: bytes, begun: list[str]) -> None:
        line = _printable(raw)
        if not line:
            return
        self._tail.append(line)
        if (sign := signs.read(line)) is not None:
            self.signs.add(sign)
            if sign is not signs.ENDED_ITSELF or self.sign is None:  # what came before it says more
                self.sign = sign
        for pattern, label in self._phases:
            if label != self.phase and pattern.search(line):
                self.phase = label
                begun.append(label)
                break


def _printable(raw: bytes) -> str:
    """Return `raw` as text that cannot disturb a terminal or a report: no escapes, no controls, never an error."""
    text = _ESCAPES.sub("", raw.decode("utf-8", errors="backslashreplace"))
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text).rstrip()

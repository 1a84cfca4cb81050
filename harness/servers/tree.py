"""Which processes belong to a server, and how to end them all. Standard library only: the guardian runs it.

A process belongs to a server if any of these holds, so that a daemon which escapes one is caught by another: it
descends from the guardian (a child subreaper, to which every orphan below it falls), it is in the server's session or
process group, the server's marker is in the environment it was started with, or it was seen to belong before.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable

__all__ = ["MARKER", "Member", "Root", "end", "find", "known", "read"]

MARKER = "DRAFTGATE_SERVER_ID"
# How long the kernel may take over processes that were sent SIGKILL: freeing a large heap takes seconds.
KILL_WAIT_S = 15.0
_POLL_S = 0.05
_TICK = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Root:
    """What a server is known by: `leader` is its pid, session and group, `guardian` its parent's pid."""

    marker: str
    leader: int
    guardian: int


@dataclasses.dataclass(frozen=True)
class Member:
    """A live process. `start` (clock ticks since boot) tells it from a later one with the same pid."""

    pid: int
    start: int
    ppid: int
    pgid: int
    sid: int
    state: str
    name: str
    cpu_s: float

    def __str__(self) -> str:
        """Return what a person looks for in a process list."""
        return f"pid {self.pid} ({self.name})"


def read(pid: int) -> Member | None:
    """Return the process `pid` as /proc/PID/stat (proc(5)) shows it now, or None if there is none."""
    content = _content(pid, "stat")
    if not content:
        return None
    head, _, rest = content.decode(errors="replace").rpartition(")")
    field = rest.split()
    return Member(
        pid=pid,
        name=head.partition("(")[2],
        state=field[0],
        ppid=int(field[1]),
        pgid=int(field[2]),
        sid=int(field[3]),
        cpu_s=(int(field[11]) + int(field[12])) / _TICK,
        start=int(field[19]),
    )


def find(root: Root, seen: set[tuple[int, int]]) -> list[Member]:
    """Return the server's live processes, zombies excluded, and add them to `seen` ((pid, start) pairs)."""
    everyone = {pid: member for pid in _pids() if (member := read(pid)) is not None}
    own = {os.getpid(), root.guardian}
    below = _descendants(root.guardian, everyone)
    found = [
        member
        for member in everyone.values()
        if member.pid not in own
        and member.state not in "ZX"
        and (
            member.pid in below
            or root.leader in (member.sid, member.pgid)
            or (member.pid, member.start) in seen
            or _is_marked(member.pid, root.marker)
        )
    ]
    seen.update((member.pid, member.start) for member in found)
    return found


def known(seen: set[tuple[int, int]]) -> list[Member]:
    """Return those of `seen` that live: the cost of a few files, where `find` reads every process of the machine."""
    members = [member for pid, start in seen if (member := read(pid)) is not None and member.start == start]
    return [member for member in members if member.state not in "ZX"]


def end(
    root: Root, seen: set[tuple[int, int]], grace_s: float, reap: Callable[[], None]
) -> tuple[list[Member], list[Member]]:
    """SIGTERM to every process of the server, SIGKILL to those left after `grace_s`.

    `reap` collects dead children, if the caller is the parent of any. Returns (forced, left): those that outlasted
    the grace, and those that live although they were sent SIGKILL.
    """
    members = find(root, seen)
    if any(member.pgid == root.leader for member in members):
        _signal(os.killpg, root.leader, signal.SIGTERM)
    for member in members:
        if member.pgid != root.leader:
            _kill(member, signal.SIGTERM)
    forced = _until_gone(root, seen, grace_s, reap, each=None)
    left = _until_gone(root, seen, KILL_WAIT_S, reap, each=signal.SIGKILL) if forced else []
    return forced, left


def _until_gone(
    root: Root, seen: set[tuple[int, int]], limit_s: float, reap: Callable[[], None], each: signal.Signals | None
) -> list[Member]:
    """Wait until no process of the server lives, signalling those found every time; return those left at the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        reap()
        members = find(root, seen)
        if not members or time.monotonic() > deadline:
            return members
        if each is not None:
            for member in members:
                _kill(member, each)
        time.sleep(_POLL_S)


def _kill(member: Member, number: signal.Signals) -> None:
    """Signal one process, unless its pid has meanwhile gone to another."""
    now = read(member.pid)
    if now is not None and now.start == member.start:
        _signal(os.kill, member.pid, number)


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):
        # Gone in between, or not ours to end (a set-uid child): the survivors are counted and reported afterwards.
        return


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 -- Path per process is slow


def _descendants(top: int, everyone: dict[int, Member]) -> set[int]:
    children: dict[int, list[int]] = {}
    for member in everyone.values():
        children.setdefault(member.ppid, []).append(member.pid)
    found: set[int] = set()
    queue = list(children.get(top, []))
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, [])
    return found


def _is_marked(pid: int, marker: str) -> bool:
    return f"{MARKER}={marker}".encode() in _content(pid, "environ").split(b"\0")


def _content(pid: int, file: str) -> bytes:
    """Return a file of /proc/PID; empty if the process is gone, or another user's, which a server's cannot be."""
    try:
        with open(f"/proc/{pid}/{file}", "rb", buffering=0) as stream:  # noqa: PTH123 -- Path doubles a scan's time
            return stream.read()
    except OSError:
        return b""

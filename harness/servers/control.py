"""The harness's end of the line to a guardian: launch, hear of the exit, order the tear-down."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from harness.servers import guardian, shm, tree

__all__ = ["Guardian", "LaunchRefusedError", "StopReport"]

_ROOT = Path(__file__).resolve().parents[2]
# Isolated (-I), so that neither the working directory nor PYTHONPATH can put another `harness` in front of this one.
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from harness.servers.guardian import main; main()"
_ANSWER_S = 60.0


class LaunchRefusedError(Exception):
    """The command could not be run; the text says why. Turned into `ServerDied` by `harness.servers.server`."""


@dataclasses.dataclass(frozen=True)
class StopReport:
    """What a tear-down saw.

    `returncode` is the server's exit code, negative for a signal, None if nobody saw it end. `forced` names the
    processes that outlasted the grace and were sent SIGKILL, `left` those that live nevertheless, `removed` the
    shared memory that the server had left and that was removed, `undeletable` what could not be removed.
    """

    returncode: int | None
    forced: tuple[str, ...]
    left: tuple[str, ...]
    removed: tuple[str, ...]
    undeletable: tuple[str, ...]


class Guardian:
    """A guardian process and the server below it. Safe to use from several threads."""

    def __init__(
        self, argv: tuple[str, ...], env: dict[str, str], *, marker: str, log_path: Path, tmp: Path, grace_s: float
    ) -> None:
        """Start the guardian and through it the server, as `argv` with exactly `env`, writing to `log_path`.

        Raises:
            LaunchRefusedError: the command cannot be run.

        """
        self._grace_s = grace_s
        self._tmp = tmp
        self._lock = threading.Lock()
        self._rest = b""
        self._seen: set[tuple[int, int]] = set()
        self._memory = shm.SharedMemory()
        self._news: dict[str, Any] = {}
        self._closed = False
        self._control, theirs = socket.socketpair()
        try:
            with theirs, log_path.open("ab", buffering=0) as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _BOOT, str(_ROOT), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,  # if the guardian itself breaks, its traceback must be found
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            order = {
                "argv": argv,
                "env": env,
                "marker": marker,
                "log": str(log_path.resolve()),
                "tmp": str(tmp),
                "grace_s": grace_s,
            }
            self._send(order)
            self.pid = self._launched_pid()
        except BaseException:
            # Closing the line makes the guardian tear down whatever it has started.
            self.close()
            raise
        self._root = tree.Root(marker, self.pid, self._process.pid)

    @property
    def lost(self) -> bool:
        """Whether the guardian itself is gone before it was told to go."""
        return self._closed and "stopped" not in self._news

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the server's exit code once it has ended, else None after `timeout_s` without news of it."""
        self._hear(timeout_s, until=("exited",))
        code: int | None = self._news.get("exited")
        return code

    def members(self) -> list[tree.Member]:
        """Return all live processes of the server."""
        with self._lock:
            return tree.find(self._root, self._seen)

    def known_members(self) -> list[tree.Member]:
        """Return the live ones of those that `members` has returned before. Cheap enough for a benchmark."""
        with self._lock:
            return tree.known(self._seen)

    def stop(self) -> StopReport:
        """Tear the server down. If the guardian is gone, by the same rules from here."""
        self._send({"stop": True})
        self._hear(self._grace_s + tree.KILL_WAIT_S + _ANSWER_S, until=("stopped",))
        if "stopped" in self._news:
            told = self._news["stopped"]
            lists = {what: tuple(told[what]) for what in ("forced", "left", "removed", "undeletable")}
            return StopReport(told["returncode"], **lists)
        self._process.kill()  # not to have two at it, should it only be stopped
        self._memory.look(self._root, self._seen, last=True)
        forced, left = tree.end(self._root, self._seen, self._grace_s, reap=lambda: None)
        removed, _, undeletable = guardian.tidy(self._memory, self._tmp)
        return StopReport(
            returncode=self._news.get("exited"),
            forced=tuple(map(str, forced)),
            left=tuple(map(str, left)),
            removed=tuple(removed),
            undeletable=tuple(undeletable),
        )

    def close(self) -> None:
        """Hang up and collect the guardian, which ends by itself once it has torn down what is left."""
        self._control.close()
        self._closed = True
        process = getattr(self, "_process", None)
        if process is not None:
            try:
                process.wait(self._grace_s + tree.KILL_WAIT_S + _ANSWER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _launched_pid(self) -> int:
        self._hear(_ANSWER_S, until=("pid", "refused"))
        if "pid" not in self._news:
            raise LaunchRefusedError(self._news.get("refused", "its guardian process did not answer; see the log"))
        return int(self._news["pid"])

    def _send(self, message: dict[str, Any]) -> None:
        # A guardian that is gone cannot be told; `_hear` finds that out.
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _hear(self, timeout_s: float, until: tuple[str, ...]) -> None:
        """Take in the guardian's messages until one of `until` is known, it hangs up, or `timeout_s` has passed."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._closed and not any(key in self._news for key in until):
                left = max(0.0, deadline - time.monotonic())
                if not select.select([self._control], [], [], left)[0]:
                    return
                try:
                    data = self._control.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    self._closed = True
                    return
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._news.update(json.loads(line))

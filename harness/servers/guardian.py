"""The parent of one server: it outlives the harness by as long as it takes to end the server and tidy up.

Run as a process of its own session, one a server, by `harness.servers.control`. Standard library only. It is the
server's parent and a *child subreaper* (prctl(2)): whatever the server starts, daemonised or not, stays its
descendant. It talks JSON lines over a socket to the harness; when the harness is gone, even by SIGKILL, the socket
closes and the guardian tears the server down by the same rules as after a clean `stop`.

From the harness: the launch order, then `{"stop": true}`. To the harness: `{"pid": N}` or `{"refused": "why"}`, then
`{"exited": code}` when the server ends (negative: signal), and `{"stopped": {...}}` as its last word.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.servers import shm, tree

__all__ = ["main", "tidy"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_TICK_S = 0.2


def main() -> None:
    """Serve one launch order that arrives on the socket whose descriptor is the last argument."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    control.set_inheritable(False)
    # Ended only through the socket: a terminal's Ctrl-C or a stray SIGTERM must not orphan the server. A handler that
    # does nothing rather than SIG_IGN, which the server would inherit and then be deaf to SIGTERM.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    harness = os.getppid()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _tell(control, {"refused": f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}"})
        return
    lines = control.makefile("rb")
    order = json.loads(lines.readline() or "null")
    if order is not None:  # else the harness went away before it gave one
        _serve(control, order, harness, wake_read)


def _serve(control: socket.socket, order: dict[str, Any], harness: int, wake: int) -> None:
    log_path = Path(order["log"])
    memory = shm.SharedMemory()
    tmp = Path(order["tmp"])
    try:
        tmp.mkdir(mode=0o700, parents=True)
        server = _launch(order, log_path)
    except OSError as error:
        shutil.rmtree(tmp, ignore_errors=True)
        _tell(control, {"refused": str(error)})
        return
    root = tree.Root(order["marker"], server.pid, os.getpid())
    seen: set[tuple[int, int]] = set()
    _tell(control, {"pid": server.pid})
    told = False
    while True:
        ready = select.select([control.fileno(), wake], [], [], _TICK_S)[0]
        if wake in ready:
            os.read(wake, 4096)
        memory.look(root, seen)
        _reap(server.pid)
        if not told and (code := _exit_code(server.pid)) is not None:
            told = True
            _tell(control, {"exited": code})
        if control.fileno() in ready:
            clean = bool(_receive(control))
            break
        if os.getppid() != harness:  # a forked child of the harness may hold the socket open after its death
            clean = False
            break
    if not clean:
        _note(log_path, "the harness is gone; ending the server")
    memory.look(root, seen, last=True)
    forced, left = tree.end(root, seen, order["grace_s"], reap=lambda: _reap(server.pid))
    code = _exit_code(server.pid)
    if code is not None:
        server.wait()
    removed, unknown, undeletable = tidy(memory, tmp)
    if unknown:
        _note(log_path, f"new in shared memory, of an owner nobody saw, left alone: {', '.join(unknown)}")
    _tell(
        control,
        {
            "stopped": {
                "returncode": code,
                "forced": [str(member) for member in forced],
                "left": [str(member) for member in left],
                "removed": removed,
                "undeletable": undeletable,
            }
        },
    )


def tidy(memory: shm.SharedMemory, tmp: Path) -> tuple[list[str], list[str], list[str]]:
    """Remove the server's shared memory and its TMPDIR; return paths removed, of unknown owner, and undeletable."""
    removed, unknown = memory.remove()
    shutil.rmtree(tmp, ignore_errors=True)
    return removed, unknown, [str(tmp)] if tmp.exists() else []


def _launch(order: dict[str, Any], log_path: Path) -> subprocess.Popen[bytes]:
    """Start the server in a session of its own, writing straight to its log.

    Raises:
        OSError: the command cannot be run.

    """
    with log_path.open("ab", buffering=0) as log:
        return subprocess.Popen(
            order["argv"],
            env=order["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Should this process be killed, the server must not stay behind with no one to end it. What the server
            # itself started is then ended by the harness; if that was killed too, by no one.
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 -- one thread
        )


def _exit_code(pid: int) -> int | None:
    """Return the server's exit code (negative: signal), or None while it runs.

    The zombie is kept (WNOWAIT): as long as it exists no other process can be given its pid, nor a session or group
    of that number, so that signalling the group cannot hit a stranger.
    """
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _reap(server: int) -> None:
    """Collect the orphans that fell to this subreaper and have ended; never the server itself."""
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:  # needs CONFIG_PROC_CHILDREN; without it the zombies go when the guardian does
        return
    for pid in map(int, children):
        if pid != server:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _receive(control: socket.socket) -> bytes:
    try:
        return control.recv(4096)
    except OSError:  # reset: the harness died with words of ours unread
        return b""


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    # A harness that is gone is not told anything; the caller finds out when it next reads.
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(message).encode() + b"\n")


def _note(log_path: Path, text: str) -> None:
    with log_path.open("a") as log:
        log.write(f"[draftgate guardian] {text}\n")


if __name__ == "__main__":
    main()

"""A port for a server that nobody else is handed in the meantime."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["Lease", "becomes_free", "by", "is_free", "lease", "listener_pids"]

_POLL_S = 0.05


class Lease:
    """A port kept for one server until `close`.

    Two things keep it. A socket stays bound to it without listening: with SO_REUSEADDR on both sides (uvicorn, vLLM
    0.32 `entrypoints/launchers/launcher.py`, asyncio and http.server all set it) the server can still bind and listen,
    while the kernel gives the port to no one who asks for *any* port, be it by bind(0) or as the near end of a
    connection. And an abstract Unix socket named after the port keeps other leases off it, in every process of
    the same network namespace; the kernel drops it with its owner.
    """

    def __init__(self, port: int, *keepers: socket.socket) -> None:
        self.port = port
        self._keepers = keepers

    def close(self) -> None:
        """Let the port go."""
        for keeper in self._keepers:
            keeper.close()


def lease(host: str, port: int = 0) -> Lease:
    """Keep `port` on `host`, or one that the kernel chooses if it is 0.

    Raises:
        OSError: the port is taken, or `host` is not an address of this machine.

    """
    if port:
        if not is_free(host, port):
            raise OSError(f"{host}:{port} is taken{by(port)}")
        if (kept := _keep(host, port)) is None:
            raise OSError(f"{host}:{port} is kept by another server of a draftgate run")
        return kept
    while True:
        if (kept := _keep(host, 0)) is not None:
            return kept
        # The kernel offered a port that the lease of a fixed port holds: ask for another.


def _keep(host: str, port: int) -> Lease | None:
    """Return a lease, or None if another lease has the port's name."""
    keeper = _bound(host, port)
    number: int = keeper.getsockname()[1]
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0draftgate-port-{number}")
    except OSError:
        name.close()
        keeper.close()
        return None
    return Lease(number, keeper, name)


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on `port` now."""
    try:
        with _bound(host, port) as sock:
            sock.listen()
    except OSError:
        return False
    return True


def becomes_free(host: str, port: int, within_s: float) -> bool:
    """Return whether a server could listen on `port` now or soon.

    A process whose first thread is gone counts as ended, while the kernel may still be ending its other threads, which
    hold its sockets: on a busy machine that takes a moment.
    """
    deadline = time.monotonic() + within_s
    while not is_free(host, port):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def listener_pids(port: int, pids: Iterable[int]) -> tuple[list[int], bool]:
    """Return which of `pids` listen on TCP `port`, and whether anyone does (proc(5): /proc/net/tcp, state 0A)."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for row in rows:
            field = row.split()
            if field[3] == "0A" and int(field[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{field[9]}]")
    return [pid for pid in pids if inodes & _links(pid)] if inodes else [], bool(inodes)


def by(port: int) -> str:
    """Return " by pid N (name)" if the listener on `port` can be seen, else nothing."""
    pids, _ = listener_pids(port, psutil.pids())
    names = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(f"pid {pid} ({psutil.Process(pid).name()})")
    return f" by {' and '.join(names)}" if names else ""


def _links(pid: int) -> set[str]:
    links: set[str] = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.add(str(link.readlink()))
            except OSError:  # closed while we looked
                continue
    except OSError:  # ended while we looked
        pass
    return links


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock

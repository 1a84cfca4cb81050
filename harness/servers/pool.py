"""One server per spec for a whole session, and all of them ended at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.servers.server import Server, StopReport, start

if TYPE_CHECKING:
    from harness.servers.progress import Progress
    from harness.servers.spec import ServerSpec

__all__ = ["ServerPool"]


class ServerPool:
    """Starts each spec at most once. Calls from several threads take turns; what they got they use together."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._lock = threading.RLock()
        self._servers: dict[str, Server] = {}
        self._failed: dict[str, Exception] = {}
        self._told: list[Exception] = []

    def get(self, spec: ServerSpec, folder: Path, is_ready: Callable[[str], object | None]) -> Server:
        """Return the running server of `spec`, started into `folder` if there is none.

        A failed start is not tried again, and a server that died is not replaced: the same error is raised again, so
        that no verdict depends on how often somebody asked. Only `release` clears it.

        Raises:
            HarnessError: as `harness.servers.server.start`, or from `Server.check`.

        """
        with self._lock:
            self.fail_again(spec)
            if (server := self._servers.get(spec.key)) is None:
                try:
                    server = start(spec, folder, is_ready, progress=self._progress)
                except Exception as error:
                    self._failed[spec.key] = error
                    raise
                self._servers[spec.key] = server
                return server
            try:
                server.check()
            except Exception as error:
                self._told.append(error)
                raise
            return server

    def holds(self, spec: ServerSpec) -> bool:
        """Return whether a server of `spec` was started, or failed to, and was not released."""
        with self._lock:
            return spec.key in self._servers or spec.key in self._failed

    def fail_again(self, spec: ServerSpec) -> None:
        """Raise the error of the last start of `spec`, if that failed and was not released: nothing is started."""
        with self._lock:
            if (failure := self._failed.get(spec.key)) is not None:
                raise failure.with_traceback(None)

    def release(self, spec: ServerSpec) -> StopReport | None:
        """Stop the server of `spec` if it runs, and forget it and its failures.

        Raises:
            ServerLeftovers: something outlived it.

        """
        with self._lock:
            self._failed.pop(spec.key, None)
            server = self._servers.pop(spec.key, None)
            return server.stop() if server is not None else None

    def close(self) -> None:
        """Stop all servers, the newest first.

        Raises:
            ExceptionGroup: what went wrong, all of it; a server found dead that nobody has been told of included.

        """
        errors: list[Exception] = []
        with self._lock:
            while self._servers:
                _, server = self._servers.popitem()
                for step in (server.check, server.stop):
                    try:
                        step()
                    except Exception as error:  # noqa: BLE001 -- collected, so that the others are stopped too
                        if error not in self._told:
                            errors.append(error)
            self._failed.clear()
        if errors:
            raise ExceptionGroup("servers that did not end well", errors)

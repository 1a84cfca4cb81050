"""Wait for the proof that a server is ready, with an eye on everything that could keep it from coming."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.servers import diagnosis
from harness.servers.errors import PortTaken, ServerFault

if TYPE_CHECKING:
    from harness.servers.server import Server

__all__ = ["EXIT_NEWS_S", "Probe", "wait"]

# A server's exit and the error that its client sees race each other; the exit is the better explanation.
EXIT_NEWS_S = 1.0
_POLL_S = 0.1
_PROBE_EVERY_S = 0.25


def wait(server: Server, probe: Probe, show: Callable[[str], None]) -> object:
    """Return the proof once `server` is ready, calling `show` with its phase meanwhile.

    Raises:
        ServerFault: it died, hung, ran out of time, or another process answers on its port.
        BaseException: what `is_ready` raised, if none of these explains it.

    """
    stall = server.new_stall()
    deadline = stall.since + server.spec.ready_timeout_s
    look_at = stall.since + stall.interval_s
    while True:
        server.guardian.poll(_POLL_S)
        server.check()
        show(server.phase)
        if probe.error is not None:
            if (fault := _better_explanation(server)) is not None:
                raise fault from probe.error
            raise probe.error
        if probe.proof is not None:
            if (fault := diagnosis.answered_by_another(server)) is not None:
                raise fault
            return probe.proof
        if time.monotonic() >= deadline:
            raise diagnosis.not_ready(server)
        if time.monotonic() >= look_at:
            look_at += stall.interval_s
            server.cpu_seconds()  # makes the processes known that were started since
            if server.stalled(stall):
                raise diagnosis.hung(server)


def _better_explanation(server: Server) -> ServerFault | None:
    """Return why `is_ready` failed, if it is that the server has ended or that another one answered."""
    if (code := server.guardian.poll(EXIT_NEWS_S)) is not None:
        return diagnosis.died(server, code)
    fault = diagnosis.answered_by_another(server)
    return fault if isinstance(fault, PortTaken) else None


class Probe:
    """Calls `is_ready` in a thread, so that a call that blocks cannot keep an exit, a hang or Ctrl-C from notice."""

    def __init__(self, is_ready: Callable[[str], object | None], base_url: str) -> None:
        self.proof: object | None = None
        self.error: BaseException | None = None
        self._cancelled = threading.Event()
        self._is_ready = is_ready
        self._base_url = base_url
        threading.Thread(target=self._run, name=f"probe {base_url}", daemon=True).start()

    def cancel(self) -> None:
        """Let the call in progress, if any, be the last."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            while self.proof is None and not self._cancelled.wait(_PROBE_EVERY_S):
                self.proof = self._is_ready(self._base_url)
        except BaseException as error:  # noqa: BLE001 -- carried to the thread that waits
            self.error = error

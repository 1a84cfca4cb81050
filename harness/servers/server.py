"""Start one server, know that it lives, and end it without a trace."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from harness.errors import HarnessError
from harness.servers import diagnosis, ports, readiness, tree, watch, workspace
from harness.servers.control import Guardian, LaunchRefusedError, StopReport
from harness.servers.errors import (
    PortTaken,
    Scene,
    ServerDied,
    ServerFault,
    ServerLeftovers,
)
from harness.servers.log import LogFollower

if TYPE_CHECKING:
    from harness.servers.progress import Progress
    from harness.servers.spec import ServerSpec

__all__ = ["Server", "StopReport", "start"]

_PORT_WAIT_S = 10.0


class Server:
    """A running server. Made by `start`; a context manager that stops it. Safe to use from several threads.

    `proof` is what `is_ready` returned, `timeline` what began when (seconds since launch).
    `guardian`, `log` and `oom_before` are for the modules beside this one.
    """

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        """Launch `spec`; its log goes to `folder`.

        Raises:
            PortTaken: `spec.port` is not free.
            ServerDied: the command cannot be run.

        """
        self.spec = spec
        self.proof: object | None = None
        self.started_in_s = 0.0
        self.timeline: list[tuple[float, str]] = [(0.0, "launched")]
        self._lock = threading.RLock()
        self._cpu: dict[tuple[int, int], float] = {}
        self._fault: ServerFault | None = None
        self._report: StopReport | None = None
        self._busy = 0
        self._idle = threading.Event()
        self.oom_before = watch.oom_kills()
        self.log_path = workspace.new_log(folder, spec.name)
        self.log = LogFollower(self.log_path, spec.phases)
        self.argv = spec.argv
        try:
            self._lease = ports.lease(spec.host, spec.port)
        except OSError as error:
            raise PortTaken(
                f"it was not started: {error}", self.scene(), remedy="free the port, or let the harness choose (port 0)"
            ) from error
        self.port = self._lease.port
        self.argv = spec.command(self.port)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.host, spec.host)  # noqa: S104 -- a look-up, not a bind
        self.base_url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        marker = uuid.uuid4().hex
        self._tmp = workspace.tmpdir(folder, marker)
        self._launched = time.monotonic()
        try:
            self.guardian = Guardian(
                self.argv,
                workspace.environment(spec, marker, self._tmp),
                marker=marker,
                log_path=self.log_path,
                tmp=self._tmp,
                grace_s=spec.stop_grace_s,
            )
        except LaunchRefusedError as error:
            self._lease.close()
            raise ServerDied(
                f"it could not be run: {error}", self.scene(), returncode=None, remedy="check the command's first word"
            ) from error
        except BaseException:
            self._lease.close()
            raise
        # It leads a session and a group of its own.
        self.pid = self.pgid = self.guardian.pid

    def __enter__(self) -> Self:
        """Return the server itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the server's first process runs."""
        return self._report is None and self.guardian.poll() is None and not self.guardian.lost

    @property
    def elapsed_s(self) -> float:
        """Seconds since launch."""
        return time.monotonic() - self._launched

    @property
    def phase(self) -> str:
        """The label of what the server began last."""
        return self.timeline[-1][1]

    def check(self) -> None:
        """Return if the server is well; from the first trouble on, raise the same error at every call.

        Raises:
            ServerDied: it has exited, was stopped, or its guardian was killed.
            ServerHung: it stood still for `hang_after_s` while `busy`.

        """
        with self._lock:
            self.read_log()
            if self._fault is None and self._report is not None:
                raise ServerDied("it was stopped by the harness", self.scene(), returncode=self._report.returncode)
            if self._fault is None and (code := self.guardian.poll()) is not None:
                self._fault = diagnosis.died(self, code)
            if self._fault is None and self.guardian.lost:
                self._fault = diagnosis.unguarded(self)
            if self._fault is not None:
                raise self._fault.with_traceback(None)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Wrap requests to the server, so that a stall is a hang rather than rest, and a lost connection is explained.

        Raises:
            ServerDied: instead of the client's error, if the server ended.
            ServerHung: instead of the client's error, if the server stood still for `hang_after_s`.

        """
        with self._lock:
            self._busy += 1
            if self._busy == 1:
                self._idle = threading.Event()
                threading.Thread(
                    target=self._watch, args=(self._idle,), name=f"watch {self.spec.name}", daemon=True
                ).start()
        try:
            yield
        except (OSError, http.client.HTTPException):
            self.guardian.poll(readiness.EXIT_NEWS_S)
            self.check()
            raise
        finally:
            with self._lock:
                self._busy -= 1
                if self._busy == 0:
                    self._idle.set()

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of the server, daemonised and re-parented ones included."""
        found = []
        for member in self.guardian.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(member.pid))
        return found

    def cpu_seconds(self) -> float:
        """Return the CPU time that the server's processes have used, those that were seen and have ended included."""
        return self._cpu_sum(self.guardian.members())

    def stop(self) -> StopReport:
        """End every process of the server and remove what it left. Stopping again returns the same report.

        Raises:
            ServerLeftovers: a process, the listening port or a file is still there.

        """
        with self._lock:
            if self._report is not None:
                return self._report
            self._idle.set()
            report = self.guardian.stop()
            self.guardian.close()
            self._report = report
            with contextlib.suppress(FileNotFoundError):  # whoever removed the log took away the evidence, not the duty
                self.read_log()
            left = {*report.left, *map(str, self.guardian.members())}
            problems = [f"{process} is alive" for process in sorted(left)]
            # The lease is kept until here, or another server might rightly have the port by now.
            port_is_free = ports.becomes_free(self.spec.host, self.port, _PORT_WAIT_S)
            self._lease.close()
            if not port_is_free:
                problems.append(f"port {self.port} is still taken{ports.by(self.port)}")
            problems += [f"{path} could not be removed" for path in report.undeletable]
            if problems:
                raise ServerLeftovers(
                    f"it was stopped, but {'; '.join(problems)}",
                    self.scene(),
                    remedy="end or remove these by hand; a process in state D waits for a device",
                )
            return report

    def scene(self) -> Scene:
        """Return what an error about this server shows."""
        return Scene(self.spec.name, self.argv, self.log_path, self.log.tail(), tuple(self.timeline))

    def read_log(self) -> None:
        """Take in the log's new lines, and add the phases they begin to the timeline."""
        with self._lock:
            self.timeline += [(self.elapsed_s, label) for label in self.log.poll()]

    def mark_ready(self, proof: object) -> None:
        """Take note that `proof` of a generation has come."""
        self.proof = proof
        self.started_in_s = self.elapsed_s
        self.timeline.append((self.started_in_s, "ready"))

    def new_stall(self) -> watch.Stall:
        """Return a stall rule that begins now."""
        cpu_s = self._cpu_sum(self.guardian.known_members())
        return watch.Stall(self.spec.hang_after_s, time.monotonic(), self.log.size, cpu_s)

    def stalled(self, stall: watch.Stall) -> bool:
        """Read the log and the CPU clocks, and return whether `stall` holds.

        The whole machine is searched for processes of the server only if those known so far stand still: the client
        of a benchmark shares this process's interpreter.
        """
        self.read_log()
        if not stall.observe(time.monotonic(), self.log.size, self._cpu_sum(self.guardian.known_members())):
            return False
        return stall.observe(time.monotonic(), self.log.size, self.cpu_seconds())

    def _cpu_sum(self, members: list[tree.Member]) -> float:
        with self._lock:
            self._cpu.update({(member.pid, member.start): member.cpu_s for member in members})
            return sum(self._cpu.values())

    def _watch(self, idle: threading.Event) -> None:
        """Look for a stall while the server is busy; its finding waits for `check`."""
        stall = self.new_stall()
        while not idle.wait(stall.interval_s) and self.alive:
            # Locked, so that a client that gives up meanwhile waits for the stacks in `check` rather than miss them.
            with self._lock:
                if self.stalled(stall):
                    self._fault = self._fault or diagnosis.hung(self)
                    return


def start(
    spec: ServerSpec,
    folder: Path,
    is_ready: Callable[[str], object | None],
    *,
    progress: Progress | None = None,
) -> Server:
    """Launch `spec` and wait until `is_ready(base_url)` returns a proof that a generation went through its loop.

    `is_ready` is called again and again in a thread of its own. None means not yet; its calls need time-outs of their
    own. The log is written to `folder`. Whatever goes wrong, an interrupt included, the server is torn down first.

    Raises:
        HarnessError: what `is_ready` raised to give up.
        PortTaken: `spec.port` is not free, or someone took the port before the server did.
        ServerDied: it ended before it was ready.
        ServerHung: neither log growth nor CPU progress for `hang_after_s`.
        ServerNotReady: no proof within `ready_timeout_s`.

    """
    with progress.row(spec) if progress is not None else contextlib.nullcontext() as row:
        server = Server(spec, folder)
        probe = readiness.Probe(is_ready, server.base_url)
        try:
            proof = readiness.wait(server, probe, row.update if row is not None else lambda _: None)
        except BaseException as error:
            probe.cancel()
            try:
                server.stop()
            except ServerFault as leftovers:
                error.add_note(str(leftovers))
            if isinstance(error, HarnessError) and not isinstance(error, ServerFault):
                error.add_note(server.scene().as_text())
                error.log_path = server.log_path
            raise
        server.mark_ready(proof)
        return server

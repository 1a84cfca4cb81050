"""Put a server's trouble into words: what happened, the likely cause, the remedy."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from harness.servers import ports, signs, watch
from harness.servers.errors import PortTaken, ServerDied, ServerFault, ServerHung, ServerNotReady

if TYPE_CHECKING:
    from harness.servers.server import Server

__all__ = ["answered_by_another", "died", "hung", "not_ready", "unguarded"]


def died(server: Server, code: int) -> ServerFault:
    """Return the error for a server that ended with `code`: `PortTaken` if that is why, else `ServerDied`."""
    server.read_log()
    how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    message = f"it {how} {server.elapsed_s:.1f} s after launch, last seen: {server.phase}"
    in_use = signs.ADDRESS_IN_USE
    if in_use in server.log.signs and not ports.is_free(server.spec.host, server.port):
        return PortTaken(
            f"port {server.port} was taken{ports.by(server.port)} before the server bound it; {message}",
            server.scene(),
            cause=in_use.cause,
            remedy=in_use.remedy,
        )
    sign = server.log.sign
    cause, remedy = (sign.cause, sign.remedy) if sign else ("", "")
    if sign is in_use:
        cause = (
            f"{sign.cause}; not {server.port}, on which nobody listens: either the server wants other ports too, or it "
            "binds without SO_REUSEADDR, which the harness's hold on the port then refuses"
        )
    if code == -signal.SIGKILL and signs.ENDED_ITSELF in server.log.signs:
        raised = [line for line in server.log.tail() if re.match(r"[\w.]*(?:Error|Exception)\b", line)]
        cause = signs.ENDED_ITSELF.cause + (f": {raised[-1]}" if raised else "")
        if sign is None or sign is signs.ENDED_ITSELF:
            remedy = signs.ENDED_ITSELF.remedy
    elif code == -signal.SIGKILL:
        kills = watch.oom_kills()
        remedy = "give it more memory, or use a smaller pair or KV cache; `dmesg` names the OOM killer's victims"
        cause = "out of memory (OOM): SIGKILL is how the kernel's OOM killer ends a process"
        if kills is not None and server.oom_before is not None:
            known = f"it ended {kills - server.oom_before} process(es) since the launch"
            cause = (
                f"{cause}; {known}"
                if kills > server.oom_before
                else f"someone sent SIGKILL, not the OOM killer: {known}"
            )
    return ServerDied(message, server.scene(), returncode=code, cause=cause, remedy=remedy)


def hung(server: Server) -> ServerHung:
    """Return the error for a server that stands still, with the stacks of its Python processes."""
    return ServerHung(
        f"it stood still for {server.spec.hang_after_s:g} s (log and CPU), last seen: {server.phase}",
        server.scene(),
        cause=server.log.sign.cause if server.log.sign else "see where its processes wait, below",
        remedy="if it was only slow, raise hang_after_s",
        details=watch.stacks(server.guardian.members()),
    )


def not_ready(server: Server) -> ServerNotReady:
    """Return the error for a server that lives but proves nothing, with the stacks of its Python processes."""
    return ServerNotReady(
        f"no generation came through within {server.spec.ready_timeout_s:g} s, last seen: {server.phase}",
        server.scene(),
        cause=server.log.sign.cause if server.log.sign else "",
        remedy="if it was only slow, raise ready_timeout_s",
        details=watch.stacks(server.guardian.members()),
    )


def answered_by_another(server: Server) -> ServerFault | None:
    """Return an error if it is not this server that listens on its port, so that no proof comes from another."""
    ours, anyone = ports.listener_pids(server.port, [member.pid for member in server.guardian.members()])
    if ours:
        return None
    if anyone:
        return PortTaken(
            f"something{ports.by(server.port)} answers on port {server.port}, but it is no process of this server",
            server.scene(),
            remedy=signs.ADDRESS_IN_USE.remedy,
        )
    return ServerNotReady(
        f"nothing listens on port {server.port} (/proc/net/tcp), so what answered was not this server", server.scene()
    )


def unguarded(server: Server) -> ServerDied:
    """Return the error for a server whose guardian is gone although nobody told it to go."""
    return ServerDied(
        "its guardian process is gone, and the server with it",
        server.scene(),
        returncode=None,
        remedy="find out who kills processes here (the kernel's OOM killer is one)",
    )

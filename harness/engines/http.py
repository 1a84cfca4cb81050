"""What every engine's measuring side shares: requests that know their own cost, and one way to say "refused"."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec
import requests

from harness.engines.surface import Metric, about_acceptance, metrics_of
from harness.engines.transport import Reply, Transport
from harness.errors import EvidenceError, ServerError
from harness.measure.endpoint import SEVERAL, CounterReading, Endpoint, Figure, Prompt, Said

__all__ = ["Answer", "HttpEndpoint", "prove"]

_TIMEOUT = (5.0, 300.0)
"""Seconds to connect, and between bytes: far above any request here. A dead server is the watchdog's to notice."""

SETTLE_S = 3.0
"""How long a page is given to catch up with an answer. Engines may answer before they count."""

POLL_S = 0.05

_MAX_POSITIONS = 256
"""Draft positions that a page may number; more is nonsense."""

_IDLE_S = 2.0
"""Age from which an idle connection is not trusted: uvicorn closes it after 5 seconds, maybe just as it is used."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A decoded answer, and what of the wall time of its request, `seconds`, was the client's; see `Generation`."""

    json: dict[str, Any]
    seconds: float
    send_s: float
    receive_s: float | None


class HttpEndpoint:
    """One running server. Safe to use from several threads.

    A lost connection is raised as it is (requests.RequestException, an OSError): whoever holds the server's process
    knows why.
    """

    headers: Mapping[str, str] = {"Content-Type": "application/json", "Accept": "*/*"}
    """Headers of every request with a body."""

    def __init__(self, base_url: str, label: str, *, speculative: bool) -> None:
        self.base_url = base_url
        self.label = label
        self.speculative = speculative
        self._local = threading.local()
        # Not one per thread: the threads of a round end with it, and connections last. `append` and `pop` are atomic.
        self._idle: list[Transport] = []

    def healthy(self) -> bool:
        """Return whether `/health` says 200. Raises requests.RequestException if nothing answers."""
        return bool(self._session().get(f"{self.base_url}/health", timeout=(1, 5)).ok)

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            # The server is on this machine; a proxy from the environment must not stand between.
            session.trust_env = False
            self._local.session = session
        return session

    def _post(self, path: str, body: dict[str, Any]) -> Answer:
        """Send `body` and decode the answer. Raises ServerError for a refusal, or for what is no JSON object."""
        start = time.perf_counter()
        reply = self._send(path, body)
        try:
            answer = msgspec.json.decode(reply.content)
        except msgspec.DecodeError as error:
            raise ServerError(f"{self.label}: {path} answered what is not JSON: {error}") from error
        if not isinstance(answer, dict):
            shown = reply.content[:400].decode(errors="replace")
            raise ServerError(f"{self.label}: {path} answered JSON that is no object: {shown}")
        end = time.perf_counter()
        receive_s = None if reply.arrived is None else end - reply.arrived
        return Answer(answer, end - start, reply.sent - start, receive_s)

    def _send(self, path: str, body: dict[str, Any], *, first: Callable[[bytes], bool] | None = None) -> Reply:
        transport = self._take()
        reply = transport.post(path, msgspec.json.encode(body), first=first)
        self._idle.append(transport)
        if reply.status != requests.codes.ok:
            self._refused(path, reply)
        return reply

    def _take(self) -> Transport:
        """Return the way to the server that was used last, or a new one."""
        while True:
            try:
                transport = self._idle.pop()
            except IndexError:
                return Transport(self.base_url, self.headers, _TIMEOUT)
            if time.perf_counter() - transport.used < _IDLE_S:
                return transport
            transport.close()

    def _refused(self, path: str, reply: Reply) -> NoReturn:
        raise ServerError(
            f"{self.label}: {path} answered {reply.status}: {reply.content[:400].decode(errors='replace')}",
            remedy="the request does not fit the server: see its message, and the pair's maximum length",
        )

    def _read(self, path: str, *, remedy: str) -> requests.Response:
        """GET a page of evidence. Raises EvidenceError if it cannot be had."""
        try:
            response = self._session().get(f"{self.base_url}{path}", timeout=_TIMEOUT)
            response.raise_for_status()
        except requests.RequestException as error:
            raise EvidenceError(f"{self.label}: {path} cannot be read: {error}", remedy=remedy) from error
        return response

    def _families(self, *, remedy: str) -> Iterator[Any]:
        """Yield the metrics of `/metrics`: type, samples. Raises EvidenceError if it cannot be had."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 -- 60 ms at import

        yield from text_string_to_metric_families(self._read("/metrics", remedy=remedy).text)

    def _samples(self, *, remedy: str) -> Iterator[Any]:
        """Yield the samples of `/metrics`: name, labels, value. Raises EvidenceError if it cannot be had."""
        for family in self._families(remedy=remedy):
            yield from family.samples

    def _shown(self, also: Collection[str] = (), *, remedy: str) -> dict[str, Said]:
        """Return the figures of acceptance on `/metrics`, and the counters named in `also`.

        Samples of one name are one figure: summed over ranks if it counts, and a number for each `position`, if it has
        that label. A gauge whose ranks differ is named so (`SEVERAL`), for none of them speaks for the engine. Buckets
        of histograms are left out.
        """
        counting: dict[str, bool] = {}
        found: dict[str, list[tuple[str | None, float]]] = {}
        for family in self._families(remedy=remedy):
            for sample in family.samples:
                name = sample.name
                if name.endswith(("_bucket", "_created")) or not (about_acceptance(name) or name in also):
                    continue
                counting[name] = family.type in {"counter", "histogram", "summary"}
                found.setdefault(name, []).append((sample.labels.get("position"), sample.value))
        said = {}
        for name, samples in found.items():
            suffix, figure = _figure(samples, counting=counting[name])
            said[f"/metrics {name}{suffix}"] = Said(figure)
        return said

    def metrics(self, expected: Collection[str], *, remedy: str) -> dict[str, Metric]:
        """Return what `/metrics` shows, after at most `SETTLE_S` seconds for the `expected` names to be there.

        Raises EvidenceError if it cannot be had.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = metrics_of(self._read("/metrics", remedy=remedy).text)
            if found.keys() >= set(expected) or time.monotonic() > deadline:
                return found
            time.sleep(POLL_S)


def _figure(samples: Sequence[tuple[str | None, float]], *, counting: bool) -> tuple[str, Figure]:
    """Return samples (position or None, value) of one name as a figure, and what its name must end with."""
    values = tuple(value for _, value in samples)
    if any(position is not None for position, _ in samples):
        return "", _by_position(samples)
    if counting:
        return "", sum(values)
    return ("", values[0]) if len(set(values)) == 1 else (SEVERAL, values)


def _by_position(samples: Sequence[tuple[str | None, float]]) -> tuple[float, ...]:
    """Return the samples' sums in the order of their positions, from 0; a position that is not there is nan."""
    sums: dict[int, float] = {}
    for position, value in samples:
        number = int(position) if position is not None and position.isdecimal() else -1
        sums[number] = sums.get(number, 0.0) + value
    if min(sums) < 0 or max(sums) >= _MAX_POSITIONS:
        return (math.nan,)
    return tuple(sums.get(number, math.nan) for number in range(max(sums) + 1))


class _Checked(Endpoint, Protocol):
    """An endpoint that can also say whether its server is up."""

    def healthy(self) -> bool:
        """Return whether the server says that it is well."""
        ...


def prove(endpoint: _Checked, *, k: int, not_on: str, idle: str) -> Mapping[str, object] | None:
    """Return proof that a generation went through the draft-and-verify loop; None while the server is not up.

    `/health` alone proves nothing: it answers while drafts are never made. The generation is long enough for two
    verify steps that accept all `k` drafts, so that the probe sees the drafter at work behind each. `not_on` and `idle`
    are the remedies where the engine has no counters, and where they do not move.

    Raises:
        ServerError: the server generates but does not draft although it was asked to, or drafts unasked.

    """
    try:
        if not endpoint.healthy():
            return None
        answer = endpoint.generate(Prompt("ready", token_ids=(1, 2, 3, 5)), max_tokens=max(8, k + 4))
    except requests.RequestException:
        return None
    reading = CounterReading.of(endpoint)
    counters = reading.counters
    proof = {"generated": len(answer.token_ids), "first_generation_s": round(answer.seconds, 3)}
    if not endpoint.speculative:
        if counters is not None and counters.drafts:
            raise ServerError(
                f"{endpoint.label} was launched without a drafter, yet {counters.drafts} drafts were made",
                remedy="remove the speculative flags from the pair's engine arguments",
            )
        return proof
    if counters is None:
        raise ServerError(f"{endpoint.label} answers, but speculation is not on: {reading.missing}", remedy=not_on)
    if not counters.drafts:
        raise ServerError(
            f"{endpoint.label} generated {len(answer.token_ids)} tokens without making one draft", remedy=idle
        )
    return {**proof, "drafts": counters.drafts, "accepted": counters.accepted, "source": counters.source}

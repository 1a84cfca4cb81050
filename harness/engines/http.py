"""What every engine's measuring side shares: one HTTP session per thread, and one way to say that a server refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import requests

from harness.engines.surface import Metric, metrics_of
from harness.errors import EvidenceError, ServerError
from harness.measure.endpoint import CounterReading, Endpoint, Prompt

__all__ = ["HttpEndpoint", "prove"]

_TIMEOUT = (5.0, 300.0)
"""Seconds to connect, and between bytes: far above any request here. A dead server is the watchdog's to notice."""

SETTLE_S = 3.0
"""How long a page is given to catch up with an answer. Engines may answer before they count."""

POLL_S = 0.05


class HttpEndpoint:
    """One running server. Safe to use from several threads.

    A lost connection is raised as it is (requests.RequestException, an OSError): whoever holds the server's process
    knows why.
    """

    def __init__(self, base_url: str, label: str, *, speculative: bool) -> None:
        self.base_url = base_url
        self.label = label
        self.speculative = speculative
        self._local = threading.local()

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

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._session().post(f"{self.base_url}{path}", json=body, timeout=_TIMEOUT)
        if response.status_code != requests.codes.ok:
            self._refused(path, response)
        answer: dict[str, Any] = response.json()
        return answer

    def _refused(self, path: str, response: requests.Response) -> NoReturn:
        raise ServerError(
            f"{self.label}: {path} answered {response.status_code}: {response.text[:400]}",
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

    def _samples(self, *, remedy: str) -> Iterator[Any]:
        """Yield the samples of `/metrics`: name, labels, value. Raises EvidenceError if it cannot be had."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 -- 60 ms at import

        for family in text_string_to_metric_families(self._read("/metrics", remedy=remedy).text):
            yield from family.samples

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


class _Checked(Endpoint, Protocol):
    """An endpoint that can also say whether its server is up."""

    def healthy(self) -> bool:
        """Return whether the server says that it is well."""
        ...


def prove(endpoint: _Checked, *, not_on: str, idle: str) -> Mapping[str, object] | None:
    """Return proof that a generation went through the draft-and-verify loop; None while the server is not up.

    `/health` alone proves nothing: it answers while drafts are never made. `not_on` and `idle` are the remedies where
    the engine has no counters, and where they do not move.

    Raises:
        ServerError: the server generates but does not draft although it was asked to, or drafts unasked.

    """
    try:
        if not endpoint.healthy():
            return None
        answer = endpoint.generate(Prompt("ready", token_ids=(1, 2, 3, 5)), max_tokens=8)
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

"""What every engine's measuring side shares: one HTTP session per thread, and one way to say that a server refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import requests

from harness.errors import EvidenceError, ServerError

__all__ = ["HttpEndpoint"]

_TIMEOUT = (5.0, 300.0)
"""Seconds to connect, and between bytes: far above any request here. A dead server is the watchdog's to notice."""


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

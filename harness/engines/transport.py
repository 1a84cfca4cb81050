"""A load client's way to a server on `requests`: as little work per request as it allows, and when bytes left and came.

What a load client costs is paid while other requests wait, so this goes round what a general client does for each
request: the session's merging of settings, cookies, redirects and environment proxies, the look-up of the connection
pool by URL. Measured: bench/RESULTS.md, "The load client".
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

__all__ = ["Reply", "Transport"]

_SO_TIMESTAMPNS = 35
"""Ask for the time at which the kernel received what is read (asm-generic/socket.h; Python 3.13 has no name for it)."""

_STAMPING_S = 10.0
"""Seconds that the kernel has to begin: it takes a millisecond, and longer on a machine that is busy."""

_TIMESPEC = struct.Struct("@qq")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)


@dataclasses.dataclass(frozen=True)
class Reply:
    """One whole answer. Times are of `time.perf_counter()`.

    `sent` is when the last byte of the request was handed to the kernel, `arrived` when the kernel had received the
    last byte of the answer, None where it does not say, and `first` when it had received what `Transport.post` was
    asked to look for.
    """

    status: int
    content: bytes
    sent: float
    arrived: float | None
    first: float | None


class _Socket(socket.socket):
    """A socket that knows when the kernel received what was read last.

    A thread that waits for its turn, at the interpreter's lock or the processor, finds its data late. The time after a
    read says nothing about that; the kernel's time does.
    """

    arrived: float | None = None
    asked = 0.0
    ahead = 0.0
    """When the request was begun, and by how much the wall clock, which the kernel stamps by, was ahead of ours."""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Read into `buffer` as `socket.recv_into`, and note the time."""
        room = memoryview(buffer)[:nbytes] if nbytes else buffer
        read, ancillary, _, _ = self.recvmsg_into([room], _ANCILLARY, flags)
        self.arrived = None
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(data)
                now, stamp = time.perf_counter(), seconds + nanoseconds / 1e9
                # The wall clock may have been set since the request. It is one of the two, and the longer one hides
                # no wait; nothing arrives before it was asked for.
                waited = max(0.0, time.time() - stamp, now + self.ahead - stamp)
                self.arrived = max(self.asked, now - waited)
        return read


_BEGINNING = threading.Lock()


@functools.cache
def _begin_stamping() -> tuple[_Socket, socket.socket] | None:
    """Have the kernel note when data comes, from now on: it begins a moment after the first socket has asked for it.

    Returns the sockets that keep it at it; None if it never begins (a sandbox that is not quite Linux).
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        asking = _stamping(socket.create_connection(server.getsockname()))
        sending, _ = server.accept()
    deadline = time.monotonic() + _STAMPING_S
    while asking.arrived is None and time.monotonic() < deadline:
        sending.sendall(b"x")
        asking.recv_into(bytearray(1))
    if asking.arrived is not None:
        for end in (asking, sending):
            atexit.register(end.close)
        return asking, sending
    asking.close()
    sending.close()
    return None


def _stamping(connected: socket.socket) -> _Socket:
    """Turn a connected socket into one that knows when data came."""
    timeout = connected.gettimeout()
    stamping = _Socket(fileno=connected.detach())
    stamping.settimeout(timeout)
    stamping.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return stamping


class _Connection(HTTPConnection):
    """A connection that knows when its request was handed to the kernel, in one call, and when its answer came.

    Every request here has a body, which urllib3 sends after the head in a call, and a packet, of its own.
    """

    sent = 0.0
    _asked = 0.0
    stamping: _Socket  # `sock`, which is None as soon as the server says that it will close
    _head = b""

    def connect(self) -> None:
        super().connect()
        self.sock = self.stamping = _stamping(self.sock)

    def send(self, data: Any) -> None:
        """Keep the head until the body comes, and send both."""
        if not self._head:
            self._head, self._asked = data, time.perf_counter()
            return
        whole, self._head = self._head + data, b""
        super().send(whole)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as urllib3 has it
        """Note the time, for the request has just gone, and wait for the answer."""
        self.sent = time.perf_counter()
        self.stamping.asked, self.stamping.ahead = self._asked, time.time() - self.sent
        return super().getresponse()


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class Transport(HTTPAdapter):
    """Requests to one server, one at a time. It keeps one connection, and makes another when that was closed.

    `base_url` is http://HOST:PORT: through TLS, the kernel cannot tell when an answer had come. `used` is
    `time.perf_counter()` at the end of the last request.
    """

    used = 0.0

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout: tuple[float, float]) -> None:
        super().__init__(pool_connections=1, pool_maxsize=1)
        with _BEGINNING:
            _begin_stamping()
        self._base_url = base_url
        self._headers = headers
        self._timeout = timeout
        self._prepared: dict[str, requests.PreparedRequest] = {}
        self._paths: dict[str, str] = {}
        parts = urlsplit(base_url)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool}
        self._pool = self.poolmanager.connection_from_host(parts.hostname, parts.port, parts.scheme)

    def post(self, path: str, body: bytes, *, first: Callable[[bytes], bool] | None = None) -> Reply:
        """Send `body`, which is not empty, and read the whole answer.

        With `first`, the answer is read as it comes until `first` is true of what has come. Raises
        requests.RequestException if the connection fails or the answer is cut.
        """
        prepared = self._prepared.get(path)
        if prepared is None:
            request = requests.Request("POST", self._base_url + path, headers=dict(self._headers))
            prepared = self._prepared[path] = request.prepare()
            self._paths[str(prepared.url)] = prepared.path_url
        prepared.body = body
        prepared.headers["Content-Length"] = str(len(body))
        raw: Any = self.send(prepared, stream=True, timeout=self._timeout).raw
        connection: _Connection = raw.connection  # of which the answer lets go when it has been read
        source = connection.stamping
        first_at = None
        came = b""
        try:
            while first is not None and first_at is None and (piece := raw.read1(decode_content=True)):
                came += piece
                if first(came):
                    first_at = time.perf_counter() if source.arrived is None else source.arrived
            content = came + raw.read(decode_content=True)
        except urllib3.exceptions.HTTPError as error:
            raise requests.ConnectionError(error, request=prepared) from error
        self.used = time.perf_counter()
        arrived = source.arrived
        # The answer can be there before the thread that sent the request runs again.
        sent = connection.sent if arrived is None else min(connection.sent, arrived)
        return Reply(raw.status, content, sent, arrived, first_at)

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> Any:
        """Return the one pool; requests looks it up by the URL for every request."""
        return self._pool

    def request_url(self, request: requests.PreparedRequest, proxies: Any) -> str:  # noqa: ARG002 -- requests' signature
        """Return the path, made once; requests takes the URL apart twice for every request."""
        return self._paths[str(request.url)]

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        """Return a response that carries the connection's own; requests looks for cookies and an encoding."""
        response = requests.Response()
        response.status_code, response.raw, response.request, response.url = resp.status, resp, req, str(req.url)
        return response

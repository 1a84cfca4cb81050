"""A server of OpenAI's API whose answers a test writes."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class Server(http.server.ThreadingHTTPServer):
    """`answer(path, body)` returns bytes, pieces to send one by one, a status, or bytes and the length to claim.

    `answered` is set once an answer has been handed to the kernel.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Callable[[str, dict[str, Any]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.connections = 0
        self.answered = threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self._send(self.server.answer(self.path, body))
        self.server.answered.set()

    def _send(self, answer: Any) -> None:
        if isinstance(answer, int):
            self.send_error(answer)
            return
        self.send_response(200)
        if isinstance(answer, bytes | tuple):
            content, length = answer if isinstance(answer, tuple) else (answer, len(answer))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = self.close_connection or length != len(content)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in itertools.chain(answer, [b""]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def log_message(self, *_: object) -> None:
        pass


def completion(tokens: int = 4, **more: Any) -> bytes:
    """Return an answer that is not streamed."""
    usage = {"prompt_tokens": 3, "completion_tokens": tokens}
    return json.dumps({"choices": [{"text": "x", "finish_reason": "length"}], "usage": usage, **more}).encode()


def event(**data: Any) -> bytes:
    """Return one event of a stream."""
    return f"data: {json.dumps(data)}\n\n".encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, dict[str, Any]], Any]], Server]]:
    servers = []

    def start(answer: Callable[[str, dict[str, Any]], Any]) -> Server:
        server = Server(answer)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()

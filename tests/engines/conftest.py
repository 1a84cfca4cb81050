"""Fixtures of the tests of engine environments."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.wheel_index import Index, offline_index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return offline_index(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def _seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seed")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (folder / "copy.py").write_text("import shutil, sys\nshutil.copytree(*sys.argv[1:], True, dirs_exist_ok=True)\n")
    return folder


@pytest.fixture
def quick_venv(_seed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy one virtual environment instead of making many: its pip, run as `-m pip`, does not mind."""
    monkeypatch.setattr("harness.engines.environment._VENV", (str(_seed / "copy.py"), str(_seed / "venv")))


@pytest.fixture
def serve() -> Iterator[Callable[[Mapping[str, Any]], str]]:
    """Answer each path with text, with a status if it is a number, or with what a function returns; returns the URL."""
    servers = []

    def start(answers: Mapping[str, Any]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.get(self.path, 404)
                answer = answer() if callable(answer) else answer
                self.send_response(answer if isinstance(answer, int) else 200)
                body = b"" if isinstance(answer, int) else answer.encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()

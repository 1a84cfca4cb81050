"""What a person sees while a server starts, and how the harness knows what is usual."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from harness.servers import progress as progress_module
from harness.servers.errors import ServerDied
from harness.servers.history import History
from harness.servers.progress import Progress
from harness.servers.server import start
from tests.servers.support import generated, until


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "cache" / "times.json")


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def monotonic(self):
        return self.now


def test_lines_where_there_is_no_terminal(fake, history, monkeypatch):
    monkeypatch.setattr(progress_module, "time", clock := Clock())
    out = io.StringIO()
    history.record(fake(), 30.0)
    with Progress(out, history).row(fake()) as row:
        row.update("loading weights")
        for _ in range(31):
            clock.now += 1.0
            row.update("loading weights")
        row.update("serving")
    assert out.getvalue().splitlines() == [
        "server fake: starting, usually 30 s (0 s)",
        "server fake: loading weights (0 s)",
        "server fake: still loading weights (15 s)",
        "server fake: still loading weights (30 s)",
        "server fake: serving (31 s)",
        "server fake: ready (31 s)",
    ]
    assert history.usual_s(fake()) == 30.5


def test_a_failed_start_says_so_and_teaches_nothing(fake, history, tmp_path):
    out = io.StringIO()
    with pytest.raises(ServerDied):
        start(fake("die"), tmp_path, generated, progress=Progress(out, history))
    assert "server fake: failed: ServerDied" in out.getvalue()
    assert history.usual_s(fake("die")) is None


def test_a_real_start_in_lines(fake, history, tmp_path):
    out = io.StringIO()
    with start(fake(), tmp_path, generated, progress=Progress(out, history)):
        assert re.search(r"^server fake: ready \(\d+ s\)$", out.getvalue(), re.MULTILINE)
        assert history.usual_s(fake()) > 0


def screen(work):
    """Run `work(stream)` with a pseudo-terminal's end as the stream; return the bytes that the terminal got."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    got = []

    def read():
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # the other end is closed
                return
            got.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as stream:
        work(stream, lambda: b"".join(got).decode())
    reader.join()
    os.close(master)
    return b"".join(got).decode()


def test_live_rows_in_a_terminal(fake, history, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    history.record(fake(), 42.0)

    def work(stream, shown):
        shown_by = Progress(stream, history)
        with shown_by.row(fake()) as one:
            with contextlib.suppress(ValueError), shown_by.row(fake(name="other")) as two:
                one.update("loading [weights]")
                two.update("compiling")
                until(lambda: "loading [weights]" in shown() and "compiling" in shown(), "both rows")
                raise ValueError
            one.update("serving")
            until(lambda: "serving" in shown(), "the last phase")

    text = screen(work)
    assert "usually 42 s" in text
    assert "server fake: ready" in text
    assert "server other: failed: ValueError" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_history_falls_back_on_the_name(fake, history):
    assert history.usual_s(fake()) is None
    history.record(fake("child"), 10.0)
    history.record(fake("child"), 20.0)
    history.record(fake("child"), 90.0)
    assert history.usual_s(fake()) == 20.0
    assert history.usual_s(fake(name="other")) is None
    history.record(fake(), 5.0)
    assert history.usual_s(fake()) == 5.0


def test_history_is_bounded(fake, history):
    for number in range(250):
        history.record(fake(str(number)), 1.0)
    for seconds in range(30):
        history.record(fake("249"), float(seconds))
    data = json.loads(history.path.read_text())
    assert len(data) == 200
    assert data[fake("249").key]["seconds"] == [float(seconds) for seconds in range(20, 30)]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"k": 1}', '{"k": {"name": "fake", "seconds": ["x"]}}', '"\\ud800"']
)
def test_a_damaged_history_costs_the_hint_only(fake, history, content):
    history.path.parent.mkdir()
    history.path.write_text(content)
    assert history.usual_s(fake()) is None
    history.record(fake(), 3.0)
    assert history.usual_s(fake()) == 3.0


def test_a_history_that_cannot_be_written_costs_the_hint_only(fake, tmp_path):
    (tmp_path / "file").touch()
    history = History(tmp_path / "file" / "times.json")
    history.record(fake(), 3.0)
    assert history.usual_s(fake()) is None


def test_history_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert History().path == tmp_path / "draftgate" / "startup-times.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert History().path == tmp_path / ".cache" / "draftgate" / "startup-times.json"


def test_concurrent_writers_lose_nothing(history):
    """Four processes, each with specs of its own."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from harness.servers.history import History\n"
        "from harness.servers.spec import ServerSpec\n"
        "for n in range(20): History(Path(sys.argv[2])).record(ServerSpec(f'{sys.argv[3]}-{n}', ('x',)), 1.0)\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parents[2]), str(history.path)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(4)]
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    names = {entry["name"] for entry in json.loads(history.path.read_text()).values()}
    assert names == {f"{writer}-{n}" for writer in range(4) for n in range(20)}
    assert sorted(path.name for path in history.path.parent.iterdir()) == ["times.json", "times.lock"]

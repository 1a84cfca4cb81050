"""Specs of the fake server, and an independent look for anything that a test left running."""

import os
import sys
import time
from pathlib import Path

import pytest

from harness.servers.spec import ServerSpec
from tests.servers.support import FAKE, PHASES, marked, runs


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Where the fake server writes the pids of its children. Afterwards nothing that knew of it may run."""
    folder = tmp_path / "notes"
    folder.mkdir()
    shm = f"/dev/shm/fake-{os.getpid()}-{time.monotonic_ns()}-"
    monkeypatch.setenv("FAKE_NOTES", str(folder))
    monkeypatch.setenv("FAKE_SHM", shm)
    yield folder
    left = marked(f"FAKE_NOTES={folder}")
    left += [pid for file in folder.glob("[!.]*") if (pid := file.read_text()) and runs(pid)]
    assert left == [], "the test left processes"
    assert list(Path("/dev/shm").glob(f"{Path(shm).name}*")) == [], "the test left shared memory"


@pytest.fixture
def fake(notes):
    """Make the spec of a fake server: `fake(mode, ..., field=value)`."""

    def make(*modes, **fields):
        settings = {
            "name": "fake",
            "ready_timeout_s": 60.0,
            "hang_after_s": 60.0,
            "stop_grace_s": 30.0,
            "phases": PHASES,
        }
        return ServerSpec(argv=(sys.executable, str(FAKE), "{port}", *modes), **{**settings, **fields})

    return make

"""The fake server's readiness check, and a look for processes that does not go through the code under test."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from harness.servers.spec import Phase

FAKE = Path(__file__).with_name("fake_server.py")
PHASES = (
    Phase("phase: loading", "loading weights"),
    Phase("phase: binding", "binding"),
    Phase("phase: serving", "serving"),
)
# Far above what anything here takes: to be reached only by a defect.
PATIENCE_S = 60.0


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)
    return value


def runs(pid):
    """Whether `pid` is a live process. Reads /proc itself, not through the code under test."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def marked(text):
    """The live processes with `text` in their environment, but for this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environ = (folder / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in environ and runs(folder.name):
                found.append(int(folder.name))
    return found


def generated(base_url):
    """The fake server's proof that something was drafted, None while there is no answer."""
    try:
        with urllib.request.urlopen(f"{base_url}/generate", timeout=5) as answer:
            return json.load(answer)["drafts"]
    except (OSError, urllib.error.URLError, http.client.HTTPException):
        return None

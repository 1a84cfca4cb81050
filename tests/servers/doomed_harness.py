"""A harness to be killed: `doomed_harness.py FOLDER ready|starting|forked MODE...` starts one fake server and waits."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.servers.server import start
from harness.servers.spec import ServerSpec
from tests.servers.support import FAKE, generated

folder, when, modes = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
spec = ServerSpec("fake", (sys.executable, str(FAKE), "{port}", *modes), stop_grace_s=1.0)


def is_ready(base_url):
    if (proof := generated(base_url)) is not None:
        (folder / "url").write_text(base_url)
        if when == "starting":
            (folder / "up").touch()
            return None
    return proof


server = start(spec, folder, is_ready)
if when == "forked" and os.fork() == 0:
    time.sleep(600)
(folder / "up").touch()
time.sleep(600)

"""Starting a server: what ready means, and every way in which it may not come to that."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from harness.errors import EvidenceError, HarnessError
from harness.servers import tree, watch
from harness.servers.errors import PortTaken, ServerDied, ServerHung, ServerNotReady
from harness.servers.server import start
from harness.servers.spec import ServerSpec
from tests.servers.support import FAKE, generated, marked, runs, until


def test_a_ready_server(fake, tmp_path):
    with start(fake("child"), tmp_path, generated) as server:
        assert server.proof == 5
        assert server.alive
        server.check()
        assert os.getsid(server.pid) == server.pid == server.pgid == os.getpgid(server.pid)
        assert server.pid != os.getsid(0)
        assert {process.pid for process in server.processes()} == {
            server.pid,
            int((tmp_path / "notes/child").read_text()),
        }
        assert server.cpu_seconds() > 0
        labels = [label for _, label in server.timeline]
        assert labels == ["launched", "loading weights", "binding", "serving", "ready"]
        seconds = [second for second, _ in server.timeline]
        assert seconds == sorted(seconds)
        assert server.started_in_s == seconds[-1]
        assert server.log_path == tmp_path / "fake.log"
    assert not server.alive
    with pytest.raises(ServerDied, match="was stopped by the harness"):
        server.check()


def test_cpu_time_of_ended_children_is_kept(fake, tmp_path, notes):
    with start(fake("child"), tmp_path, generated) as server:
        before = server.cpu_seconds()
        os.kill(int((notes / "child").read_text()), signal.SIGKILL)
        until(lambda: not runs((notes / "child").read_text()), "the child to end")
        assert server.cpu_seconds() >= before


def test_a_server_that_dies_at_start(fake, tmp_path):
    with pytest.raises(ServerDied) as caught:
        start(fake("die"), tmp_path, generated)
    error = caught.value
    assert error.returncode == 3
    assert error.argv[:2] == (sys.executable, str(FAKE))
    assert error.argv[2].isdigit()
    assert error.log_path.read_text().splitlines() == list(error.log_tail)
    for part in ("exited with code 3", "last seen: loading weights", "lacks a package", "'flux'", str(error.log_path)):
        assert part in str(error)


def test_a_server_that_kills_itself_names_what_its_child_raised(fake, tmp_path):
    with pytest.raises(ServerDied) as caught:
        start(fake("die-with-a-child"), tmp_path, generated)
    assert "killed itself: AssertionError: loaded_weight.shape is 33" in caught.value.cause
    assert "traceback" in str(caught.value)


def test_a_killed_server_is_called_out_of_memory_only_if_the_kernel_says_so(fake, tmp_path, monkeypatch):
    counts = iter([7, 7])
    monkeypatch.setattr(watch, "oom_kills", lambda: next(counts))
    with pytest.raises(ServerDied) as caught:
        start(fake("die-by-kill"), tmp_path, generated)
    assert caught.value.returncode == -signal.SIGKILL
    assert "killed by SIGKILL" in str(caught.value)
    assert "not the OOM killer" in caught.value.cause
    counts = iter([7, 8])
    with pytest.raises(ServerDied) as caught:
        start(fake("die-by-kill"), tmp_path, generated)
    assert caught.value.cause.startswith("out of memory (OOM)")
    counts = iter([None, None])
    with pytest.raises(ServerDied) as caught:
        start(fake("die-by-kill"), tmp_path, generated)
    assert caught.value.cause.startswith("out of memory (OOM)")


def test_an_exit_is_noticed_while_the_check_blocks(fake, tmp_path):
    blocked = threading.Event()
    let_go = threading.Event()

    def is_ready(_):
        blocked.set()
        let_go.wait(120)

    def kill():
        blocked.wait()
        os.kill(marked(f"FAKE_NOTES={tmp_path / 'notes'}")[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ServerDied):
        start(fake("slow"), tmp_path, is_ready)
    assert not let_go.is_set()
    let_go.set()
    killer.join()


def test_a_command_that_does_not_exist(fake, tmp_path):
    with pytest.raises(ServerDied, match=r"could not be run: .*no-such-engine") as caught:
        start(ServerSpec("fake", ("no-such-engine",)), tmp_path, generated)
    assert caught.value.returncode is None


def test_a_silent_hang_shows_the_stacks(fake, tmp_path):
    with pytest.raises(ServerHung) as caught:
        start(fake("hang", hang_after_s=2.0), tmp_path, generated)
    assert re.search(r"hang_here \(\S*fake_server.py:\d+\)", caught.value.details)
    assert "last seen: loading weights" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'Permission Denied: Try running again with sudo' >&2; exit 1", "CAP_SYS_PTRACE"),
        ("echo 'Failed to find python version' >&2; exit 1", "Failed to find python version"),
    ],
)
def test_stacks_that_cannot_be_had_say_why(fake, tmp_path, monkeypatch, script, says):
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert says in watch.stacks([tree.read(os.getpid())])


def test_without_py_spy_the_stacks_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "py-spy is not installed" in watch.stacks([])


def test_a_server_that_spins_is_not_hung_but_late(fake, tmp_path):
    with pytest.raises(ServerNotReady) as caught:
        start(fake("spin", ready_timeout_s=3.0, hang_after_s=1.0), tmp_path, generated)
    assert "fake_server.py" in caught.value.details


def test_health_without_a_generation_is_not_ready(fake, tmp_path):
    answered = []

    def is_ready(base_url):
        answered.append(urllib.request.urlopen(f"{base_url}/generate", timeout=5).status)
        return generated(base_url)

    def patient(base_url):
        try:
            return is_ready(base_url)
        except OSError:
            return None

    with pytest.raises(ServerNotReady, match="no generation came through within 2 s"):
        start(fake("silent", ready_timeout_s=2.0), tmp_path, patient)
    assert 200 in answered


def test_the_check_may_give_up_at_once(fake, tmp_path):
    def is_ready(base_url):
        if generated(base_url):
            raise EvidenceError("it generates but drafts nothing")

    with pytest.raises(EvidenceError, match="drafts nothing") as caught:
        start(fake(), tmp_path, is_ready)
    assert "phase: serving" in "".join(caught.value.__notes__)


def test_a_defect_of_the_check_is_not_swallowed(fake, tmp_path):
    def is_ready(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(fake(), tmp_path, is_ready)


def test_an_exit_explains_the_checks_failure(fake, tmp_path):
    def is_ready(base_url):
        if generated(base_url):
            try:
                urllib.request.urlopen(f"{base_url}/die", timeout=5)
            except (OSError, http.client.HTTPException) as error:
                raise HarnessError("connection lost") from error

    with pytest.raises(ServerDied, match="exited with code 7") as caught:
        start(fake(), tmp_path, is_ready)
    # Whichever of the two was noticed first, the exit is what is raised.
    assert isinstance(caught.value.__cause__, HarnessError | None)


def test_ctrl_c_during_start_leaves_nothing(fake, tmp_path, notes):
    def is_ready(base_url):
        if generated(base_url):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with pytest.raises(KeyboardInterrupt):
        start(fake("child", "escape"), tmp_path, is_ready)
    assert marked(f"FAKE_NOTES={notes}") == []


def test_hostile_bytes_in_the_log(fake, tmp_path):
    with start(fake("hostile"), tmp_path, generated) as server:
        tail = server.scene().log_tail
        text = str(ServerDied("x", server.scene(), returncode=1))
    assert b"\xff\xfe\x00" in server.log_path.read_bytes()
    assert "\\xff\\xfe\\x00 not text red\\x07" in tail
    assert [line for line in tail if line.startswith("progress")] == ["progress 1", "progress 2"]
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_taken_fixed_port_is_refused_before_anything_starts(fake, tmp_path, notes):
    with socket.create_server(("127.0.0.1", 0)) as thief:
        port = thief.getsockname()[1]
        with pytest.raises(PortTaken, match=f"not started: 127.0.0.1:{port} is taken by pid {os.getpid()} ") as caught:
            start(fake("child", port=port), tmp_path, generated)
    assert caught.value.log_tail == ()
    assert not (notes / "child").exists()


def test_a_fixed_port_of_another_server_is_refused_while_that_one_starts(fake, tmp_path):
    with start(fake(), tmp_path, generated) as first, pytest.raises(PortTaken, match="not started"):
        start(fake(port=first.port), tmp_path, generated)
    with start(fake(port=first.port), tmp_path, generated) as second:
        assert second.port == first.port


def steal(base_url):
    """Listen on the port that a starting server was promised."""
    port = int(base_url.rpartition(":")[2])
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_a_port_that_is_taken_in_between(fake, tmp_path, notes):
    thieves = []

    def is_ready(base_url):
        if not thieves:
            thieves.append(steal(base_url))
            (notes / "go").touch()

    with pytest.raises(PortTaken, match=f"was taken by pid {os.getpid()} .*exited with code 1") as caught:
        start(fake("slow"), tmp_path, is_ready)
    assert "Address already in use" in str(caught.value)
    thieves[0].close()


def test_a_server_that_cannot_share_the_held_port_is_told_so(fake, tmp_path):
    with pytest.raises(ServerDied, match="Address already in use") as caught:
        start(fake("no-reuse"), tmp_path, generated)
    assert "without SO_REUSEADDR" in caught.value.cause


@pytest.mark.parametrize("answer", ["proof", "refusal"])
def test_no_proof_from_a_stranger(fake, tmp_path, answer):
    thieves = []

    def is_ready(base_url):
        thieves.append(steal(base_url))
        if answer == "refusal":
            raise EvidenceError("no drafts")
        return "proof"

    with pytest.raises(PortTaken, match="is no process of this server"):
        start(fake("slow"), tmp_path, is_ready)
    thieves[0].close()


def test_no_proof_without_a_listener(fake, tmp_path):
    with pytest.raises(ServerNotReady, match="nothing listens"):
        start(fake("slow"), tmp_path, lambda _: "proof")


def test_the_environment(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_GONE", "1")
    monkeypatch.setenv("FAKE_KEPT", "1")
    with start(fake(env=(("FAKE_GONE", None), ("FAKE_NEW", "2"))), tmp_path, generated) as server:
        env = psutil.Process(server.pid).environ()
    assert "FAKE_GONE" not in env
    assert (env["FAKE_KEPT"], env["FAKE_NEW"]) == ("1", "2")
    assert os.environ["FAKE_GONE"] == "1"


def test_signals_reach_the_server_as_by_default(fake, tmp_path):
    """A guardian that ignored SIGTERM by SIG_IGN would hand that down."""
    with start(fake(), tmp_path, generated) as server:
        status = Path(f"/proc/{server.pid}/status").read_text()
    ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    assert not ignored & (1 << (signal.SIGTERM - 1))
    assert not ignored & (1 << (signal.SIGINT - 1))


def test_the_log_of_an_earlier_server_is_kept(fake, tmp_path):
    with start(fake(), tmp_path, generated) as first, start(fake("child"), tmp_path, generated) as second:
        assert first.log_path != second.log_path
        assert first.port != second.port
        assert generated(first.base_url) == generated(second.base_url) == 5
    assert first.log_path.read_text()


def test_importing_the_guardian_needs_the_standard_library_only():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import harness.servers.guardian; "
        "print(*sorted({m.partition('.')[0] for m in sys.modules} - sys.stdlib_module_names))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__main__", "harness"]

"""Ending a server: nothing of it may be left, whoever ends, and however."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.servers import guardian, ports, shm, tree, workspace
from harness.servers import server as server_module
from harness.servers.errors import ServerDied, ServerLeftovers
from harness.servers.server import start
from tests.servers.support import generated, marked, runs, until

DOOMED = Path(__file__).with_name("doomed_harness.py")


def is_closed(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_a_clean_stop(fake, tmp_path):
    server = start(fake("child", "tmp"), tmp_path, generated)
    tmp = Path(psutil.Process(server.pid).environ()["TMPDIR"])
    assert (tmp / "left-behind").exists()
    guardian_pid = psutil.Process(server.pid).ppid()
    report = server.stop()
    assert report.returncode == -signal.SIGTERM
    assert report.forced == ()
    assert not tmp.exists()
    assert is_closed(server.port)
    assert not runs(server.pid)
    assert not psutil.pid_exists(guardian_pid)
    assert server.stop() is report


def test_a_server_deaf_to_sigterm_is_killed(fake, tmp_path):
    with start(fake("deaf", stop_grace_s=0.5), tmp_path, generated) as server:
        pass
    report = server.stop()
    assert report.returncode == -signal.SIGKILL
    assert report.forced == (f"pid {server.pid} (python)",)


def test_processes_that_escaped_are_found_and_ended(fake, tmp_path, notes):
    """Own session, orphaned, with and without our environment."""
    with start(fake("escape", "child"), tmp_path, generated) as server:
        pids = {int((notes / name).read_text()) for name in ("escaped", "escaped-clean", "child")}
        assert {process.pid for process in server.processes()} == {server.pid, *pids}
    assert not any(map(runs, pids))


def test_escaped_processes_are_ended_after_the_server_died(fake, tmp_path, notes):
    server = start(fake("escape"), tmp_path, generated)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive, "the exit")
    with pytest.raises(ServerDied) as first:
        server.check()
    with pytest.raises(ServerDied) as second:
        server.check()
    assert first.value is second.value
    assert runs((notes / "escaped-clean").read_text())
    assert server.stop().returncode == -signal.SIGKILL
    assert not runs((notes / "escaped-clean").read_text())


def test_a_process_that_overwrote_its_environment_is_found(fake, tmp_path):
    with start(fake("retitle"), tmp_path, generated) as server:
        assert tree.MARKER.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
        assert [process.pid for process in server.processes()] == [server.pid]


def test_shared_memory_is_removed_if_it_is_the_servers(fake, tmp_path):
    prefix = os.environ["FAKE_SHM"]
    foreign_before, foreign_later = Path(f"{prefix}before"), Path(f"{prefix}later")
    foreign_before.touch()
    try:
        server = start(fake("shm"), tmp_path, generated)
        foreign_later.touch()
        report = server.stop()
        assert report.removed == (f"{prefix}mapped", f"{prefix}open")
        assert foreign_before.exists()
        assert foreign_later.exists()
        assert f"an owner nobody saw, left alone: {foreign_later}" in server.log_path.read_text()
    finally:
        foreign_before.unlink()
        foreign_later.unlink()


def wakings(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("voluntary_ctxt_switches")))


def test_shared_memory_of_a_server_that_died_is_removed(fake, tmp_path):
    """As long as the guardian had one look between its making and the death."""
    server = start(fake("shm"), tmp_path, generated)
    parent = psutil.Process(server.pid).ppid()
    before = wakings(parent)
    until(lambda: wakings(parent) >= before + 3, "the guardian to look")
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive, "the exit")
    assert len(server.stop().removed) == 2


def test_an_entry_that_was_replaced_is_not_the_servers(tmp_path):
    memory = shm.SharedMemory(tmp_path)
    (tmp_path / "psm_x").touch()
    root = tree.Root("none", leader=-1, guardian=os.getppid())
    seen = {(os.getpid(), tree.read(os.getpid()).start)}
    memory.look(root, seen)
    assert memory.remove() == ([], [str(tmp_path / "psm_x")])


@pytest.mark.parametrize(
    ("when", "modes"),
    [
        ("ready", ("child", "escape", "shm", "tmp")),
        ("ready", ("deaf", "child")),
        ("starting", ("child", "escape", "shm", "tmp")),
        ("forked", ("child",)),
    ],
)
def test_a_killed_harness_leaves_nothing(notes, tmp_path, when, modes):
    """SIGKILL: no handler of the harness runs. `forked`: a forked child keeps its sockets open."""
    out = tmp_path / "out"
    out.mkdir()
    with (tmp_path / "stderr").open("wb") as stderr:
        harness = subprocess.Popen([sys.executable, str(DOOMED), str(out), when, *modes], stderr=stderr)
    until(lambda: (out / "up").exists() or harness.poll() is not None, "the server")
    assert harness.poll() is None, (tmp_path / "stderr").read_text()
    port = int((out / "url").read_text().rpartition(":")[2])
    children = psutil.Process(harness.pid).children(recursive=True)
    assert len(children) >= 2 + len(set(modes) & {"child"}) + 2 * ("escape" in modes)
    fork = [process for process in children if process.cmdline()[1:2] == [str(DOOMED)]]
    harness.kill()
    harness.wait()
    assert len(fork) == (when == "forked")
    rest = [process for process in children if process not in fork]
    until(lambda: not any(runs(process.pid) for process in rest), "the guardian to end everything")
    for process in fork:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: not marked(f"FAKE_NOTES={notes}"), "the forked child to end")
    assert is_closed(port)
    assert [path.name for path in out.iterdir() if path.name.startswith("dg-")] == []
    assert "the harness is gone" in (out / "fake.log").read_text()


def test_a_killed_guardian_is_noticed_and_replaced_at_the_end(fake, tmp_path, notes):
    server = start(fake("child", "escape", "tmp"), tmp_path, generated)
    assert len(server.processes()) == 4
    psutil.Process(server.pid).parent().kill()
    until(lambda: not server.alive, "its loss to be noticed")
    with pytest.raises(ServerDied, match="guardian process is gone"):
        server.check()
    until(lambda: not runs(server.pid), "the server to end with its guardian")
    assert runs((notes / "escaped-clean").read_text())
    report = server.stop()
    assert report.returncode is None
    assert not runs((notes / "escaped-clean").read_text())
    assert is_closed(server.port)


def test_a_guardian_killed_during_start(fake, tmp_path, notes):
    killed = []

    def is_ready(base_url):
        if generated(base_url) and not killed:
            server = psutil.Process(int((notes / "child").read_text())).parent()
            killed.append(server.parent())
            assert killed[0].ppid() == os.getpid()
            killed[0].kill()

    with pytest.raises(ServerDied, match="guardian process is gone"):
        start(fake("child"), tmp_path, is_ready)


def test_a_harness_and_guardian_killed_together_take_the_server_along(notes, tmp_path):
    """What the server started is then on its own, which is why this test starts nothing more."""
    out = tmp_path / "out"
    out.mkdir()
    with (tmp_path / "stderr").open("wb") as stderr:
        harness = subprocess.Popen([sys.executable, str(DOOMED), str(out), "ready"], stderr=stderr)
    until(lambda: (out / "up").exists() or harness.poll() is not None, "the server")
    family = psutil.Process(harness.pid).children(recursive=True)
    assert len(family) == 2
    os.kill(harness.pid, signal.SIGSTOP)  # so that it cannot see its guardian go
    family[0].kill()
    harness.kill()
    harness.wait()
    until(lambda: not runs(family[1].pid), "the server to end with its guardian")


def test_a_port_that_is_let_go_a_moment_later_is_no_leftover(fake, tmp_path, monkeypatch):
    server = start(fake(), tmp_path, generated)
    answers = iter([False, False, True])
    monkeypatch.setattr(ports, "is_free", lambda *_: next(answers))
    server.stop()
    assert next(answers, None) is None


def test_a_port_still_taken_after_the_stop_is_told(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_PORT_WAIT_S", 0.1)
    server = start(fake(), tmp_path, generated)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive, "the exit")
    says = f"port {server.port} is still taken by pid {os.getpid()} "
    with socket.create_server(("127.0.0.1", server.port)), pytest.raises(ServerLeftovers, match=says):
        server.stop()


def test_a_process_still_alive_after_the_stop_is_told(fake, tmp_path, monkeypatch):
    server = start(fake(), tmp_path, generated)
    survivor = tree.read(os.getpid())
    monkeypatch.setattr(server.guardian, "members", lambda: [survivor])
    with pytest.raises(ServerLeftovers, match=rf"pid {os.getpid()} \(.*\) is alive"):
        server.stop()


def test_a_folder_that_cannot_be_removed_is_told(tmp_path):
    tmp = tmp_path / "was-a-folder"
    tmp.touch()
    assert guardian.tidy(shm.SharedMemory(tmp_path / "none"), tmp) == ([], [], [str(tmp)])


def test_a_process_that_survives_is_reported_by_the_teardown(monkeypatch):
    """Kill signals that do not arrive stand in for a process in uninterruptible sleep."""
    monkeypatch.setattr(tree, "KILL_WAIT_S", 0.1)
    monkeypatch.setattr(tree, "_signal", lambda *_: None)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        root = tree.Root("none", leader=sleeper.pid, guardian=os.getpid())
        forced, left = tree.end(root, set(), 0.1, reap=lambda: None)
        assert [member.pid for member in forced] == [member.pid for member in left] == [sleeper.pid]
    finally:
        sleeper.kill()
        sleeper.wait()


def test_temporary_files_leave_room_for_a_sockets_path(tmp_path):
    short = workspace.tmpdir(Path("/x"), "0" * 32)
    assert short.parent == Path("/x")
    long = workspace.tmpdir(tmp_path / ("d" * 80), "0" * 32)
    assert len(os.fsencode(long)) <= 64


def test_a_log_that_was_removed_does_not_keep_the_server_alive(fake, tmp_path):
    server = start(fake("child"), tmp_path, generated)
    server.log_path.unlink()
    server.stop()
    assert not runs(server.pid)
    assert is_closed(server.port)

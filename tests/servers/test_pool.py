"""One server a spec; a failure stays a failure; the end of the session ends them all."""

import os
import signal
import threading

import pytest

from harness.servers import ports
from harness.servers import server as server_module
from harness.servers.errors import ServerDied, ServerLeftovers
from harness.servers.pool import ServerPool
from harness.servers.server import Server
from tests.servers.support import generated, runs, until


@pytest.fixture
def pool(notes):
    """Depends on `notes`, so that its look for leftovers comes after the pool was closed."""
    pool = ServerPool()
    yield pool
    pool.close()


def test_one_server_a_spec(pool, fake, tmp_path):
    first = pool.get(fake(), tmp_path, generated)
    assert pool.get(fake(), tmp_path / "elsewhere", generated) is first
    second = pool.get(fake("child"), tmp_path, generated)
    assert second is not first
    pool.close()
    assert not runs(first.pid)
    assert not runs(second.pid)
    pool.close()


def test_two_servers_used_at_once(pool, fake, tmp_path):
    servers = {}

    def use(mode):
        servers[mode] = pool.get(fake(mode), tmp_path, generated)
        for _ in range(20):
            with servers[mode].busy():
                assert generated(servers[mode].base_url) == 5
        servers[mode].check()

    threads = [threading.Thread(target=use, args=(mode,)) for mode in ("normal", "child", "normal")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(servers) == 2
    assert servers["normal"].port != servers["child"].port


def test_a_failed_start_is_not_tried_again(pool, fake, tmp_path):
    with pytest.raises(ServerDied) as first:
        pool.get(fake("die"), tmp_path, generated)
    with pytest.raises(ServerDied) as second:
        pool.get(fake("die"), tmp_path, generated)
    assert second.value is first.value
    assert len(list(tmp_path.glob("*.log"))) == 1
    pool.release(fake("die"))
    with pytest.raises(ServerDied) as third:
        pool.get(fake("die"), tmp_path, generated)
    assert third.value is not first.value


def test_an_interrupted_start_is_no_verdict(pool, fake, tmp_path):
    def interrupt(_):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.5)

    with pytest.raises(KeyboardInterrupt):
        pool.get(fake(), tmp_path, interrupt)
    assert pool.get(fake(), tmp_path, generated).alive


def test_a_server_that_died_is_not_replaced_in_silence(pool, fake, tmp_path):
    server = pool.get(fake(), tmp_path, generated)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive, "the exit")
    for _ in range(2):
        with pytest.raises(ServerDied):
            pool.get(fake(), tmp_path, generated)
    assert pool.release(fake()).returncode == -signal.SIGKILL
    assert pool.get(fake(), tmp_path, generated) is not server


def test_release_of_what_does_not_run(pool, fake):
    assert pool.release(fake()) is None


def test_close_tells_of_every_trouble_and_stops_the_rest(pool, fake, tmp_path, monkeypatch):
    dead = pool.get(fake(), tmp_path, generated)
    well = pool.get(fake("child"), tmp_path, generated)
    sticky = pool.get(fake("tmp"), tmp_path, generated)
    os.kill(dead.pid, signal.SIGKILL)
    until(lambda: not dead.alive, "the exit")
    is_free = ports.is_free
    monkeypatch.setattr(server_module, "_PORT_WAIT_S", 0.1)
    monkeypatch.setattr(ports, "is_free", lambda host, port: port != sticky.port and is_free(host, port))
    with pytest.raises(ExceptionGroup) as caught:
        pool.close()
    assert [type(error) for error in caught.value.exceptions] == [ServerLeftovers, ServerDied]
    assert not any(runs(server.pid) for server in (dead, well, sticky))
    pool.close()


def test_close_does_not_repeat_what_was_told(pool, fake, tmp_path):
    server = pool.get(fake(), tmp_path, generated)
    assert isinstance(server, Server)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive, "the exit")
    with pytest.raises(ServerDied):
        pool.get(fake(), tmp_path, generated)
    pool.close()

"""While requests are out: a stall is a hang, a lost connection is explained; at rest neither is."""

import http.client
import os
import signal
import time
import urllib.request

import pytest

from harness.servers import watch
from harness.servers.errors import ServerDied, ServerHung
from harness.servers.server import start
from tests.servers.support import generated, until


def get(server, path):
    with urllib.request.urlopen(f"{server.base_url}{path}", timeout=3) as answer:
        return answer.status


def test_a_server_at_rest_is_not_hung(fake, tmp_path):
    with start(fake(hang_after_s=0.5), tmp_path, generated) as server:
        rest = time.monotonic() + 1.5  # three times the limit: the absence of an event has no condition to wait for
        until(lambda: time.monotonic() > rest, "the rest")
        server.check()
        with server.busy():
            assert get(server, "/generate") == 200
        server.check()


def test_a_stall_under_requests_is_a_hang(fake, tmp_path):
    with start(fake(hang_after_s=1.0), tmp_path, generated) as server:
        with pytest.raises(ServerHung) as caught, server.busy():
            get(server, "/block")
        assert isinstance(caught.value.__context__, TimeoutError)
        assert "do_GET" in caught.value.details
        with pytest.raises(ServerHung) as again:
            server.check()
        assert again.value is caught.value


def test_a_lost_connection_is_explained_by_the_exit(fake, tmp_path):
    with start(fake(), tmp_path, generated) as server:
        with pytest.raises(ServerDied, match="exited with code 7"), server.busy():
            get(server, "/die")
        assert not server.alive


def test_other_errors_of_the_client_are_its_own(fake, tmp_path):
    with start(fake(), tmp_path, generated) as server:
        with pytest.raises(urllib.error.HTTPError), server.busy():
            get(server, "/no-such-path")
        with pytest.raises(ZeroDivisionError), server.busy():
            raise ZeroDivisionError
        with pytest.raises(http.client.IncompleteRead), server.busy():
            raise http.client.IncompleteRead(b"")
        server.check()


def test_nested_use_ends_with_the_last(fake, tmp_path):
    with start(fake(), tmp_path, generated) as server:
        with server.busy(), server.busy():
            os.kill(server.pid, signal.SIGKILL)
            until(lambda: not server.alive, "the exit")
        with pytest.raises(ServerDied):
            server.check()


def test_stall_rule():
    stall = watch.Stall(limit_s=10.0, since=100.0, log_size=5, cpu_s=1.0)
    assert not stall.observe(109.9, 5, 1.0)
    assert stall.observe(110.0, 5, 1.0)
    assert not stall.observe(111.0, 6, 1.0), "log growth is progress"
    assert not stall.observe(120.9, 6, 1.0)
    assert stall.observe(121.0, 6, 1.0)
    assert not stall.observe(122.0, 6, 2.0), "CPU time is progress"
    for second in range(123, 132):  # wake-ups of idle threads, half a per cent of a core, are none
        assert not stall.observe(second, 6, 2.0 + 0.005 * (second - 122))
    assert stall.observe(132.0, 6, 2.05)

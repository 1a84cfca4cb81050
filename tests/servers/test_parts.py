"""The parts that need no server: specs, logs, signs, ports."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ServerError, UsageError
from harness.servers import ports, signs
from harness.servers.errors import Scene, ServerHung
from harness.servers.log import LogFollower
from harness.servers.spec import Phase, ServerSpec

SPEC = ServerSpec("c0", ("engine", "--port", "{port}", "--json", '{"k": 1}'), env=(("A", "1"), ("B", None)))


def test_key_is_the_same_in_every_process_and_differs_with_every_field():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from harness.servers.spec import *; "
        """print(ServerSpec("c0", ("engine", "--port", "{port}", "--json", '{"k": 1}'), """
        """env=(("A", "1"), ("B", None))).key)"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[2])], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == SPEC.key
    fields = {
        "name": "c1",
        "argv": ("x",),
        "env": (("A", "1"),),
        "host": "::1",
        "port": 1,
        "ready_timeout_s": 1.0,
        "hang_after_s": 1.0,
        "stop_grace_s": 1.0,
        "phases": (Phase("a", "b"),),
    }
    assert set(fields) == set(SPEC.__dataclass_fields__)
    keys = {ServerSpec(**{**vars(SPEC), name: value}).key for name, value in fields.items()}
    assert len(keys | {SPEC.key}) == len(fields) + 1
    assert hash(SPEC) == hash(ServerSpec(**vars(SPEC)))


def test_only_the_port_is_replaced():
    assert SPEC.command(81) == ("engine", "--port", "81", "--json", '{"k": 1}')


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "a/b"}, "ServerSpec.name is 'a/b'"),
        ({"argv": ()}, "ServerSpec.argv is empty"),
        ({"port": 70000}, "ServerSpec.port is 70000"),
        ({"hang_after_s": 0.0}, "ServerSpec.hang_after_s is 0.0"),
        ({"ready_timeout_s": float("nan")}, "ServerSpec.ready_timeout_s is nan"),
    ],
)
def test_specs_that_no_launch_could_honour(fields, says):
    with pytest.raises(UsageError, match=says):
        ServerSpec(**{"name": "a", "argv": ("x",), **fields})


def test_a_phase_with_a_bad_pattern_is_refused():
    with pytest.raises(UsageError, match="is not a regular expression"):
        Phase("(", "loading")


def test_the_log_is_followed_across_partial_lines(tmp_path):
    path = tmp_path / "log"
    path.touch()
    log = LogFollower(path, [Phase("loading", "weights"), Phase("serving", "serve")])
    assert log.poll() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"load")
        assert log.poll() == []
        assert log.tail() == ("load",)
        file.write(b"ing\nloading more\nserv")
        assert log.poll() == ["weights"]
        file.write(b"ing \xe2\x82")
        assert log.poll() == []
        file.write(b"\xac\n")
        assert log.poll() == ["serve"]
    assert log.tail() == ("loading", "loading more", "serving \u20ac")
    assert log.size == path.stat().st_size


def test_a_long_log_costs_only_its_tail(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(30_000)) + b"x" * 200_000)
    log = LogFollower(path, [])
    log.poll()
    assert log.size == path.stat().st_size
    assert len(log.tail()) <= 201
    assert log.tail()[0].startswith("line 298")


def test_the_last_sign_counts(tmp_path):
    path = tmp_path / "log"
    path.write_text("WARNING ImportError: optional\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nEngine failed\n")
    log = LogFollower(path, [])
    log.poll()
    assert log.sign.cause == "the device ran out of memory"
    assert len(log.signs) == 2


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("OSError: [Errno 98] Address already in use", "port"),
        ("ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000)", "port"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "KV cache"),
        ("ValueError: Free memory on device (1.2/79.1 GiB) on startup is less than desired GPU memory", "holds memory"),
        ("api_server.py: error: unrecognized arguments: --speculative-confg", "flag"),
        ("ValueError: There is no module or parameter named 'model.x' in Eagle3LlamaForCausalLM", "tensor"),
        ("OSError: [Errno 28] No space left on device", "full"),
    ],
)
def test_known_signs(line, word):
    assert word in signs.read(line).cause


def test_everyday_lines_give_no_sign():
    for line in (
        "INFO 11-29 10:00:00 [launcher.py:29] Available routes are:",
        "WARNING libtcmalloc is not found in LD_PRELOAD",
        "INFO GPU KV cache size: 10,000 tokens",
    ):
        assert signs.read(line) is None


def test_an_error_prints_its_scene(tmp_path):
    scene = Scene("c0", ("engine", "a b"), tmp_path / "c0.log", ("one", "two"), ((0.0, "launched"), (1.5, "loading")))
    error = ServerHung("it stood still", scene, cause="because", remedy="do this", details="  Thread 1")
    assert isinstance(error, ServerError)
    assert str(error).splitlines() == [
        "server 'c0': it stood still",
        "  likely cause: because",
        "  remedy: do this",
        "  command: engine 'a b'",
        f"  log: {tmp_path / 'c0.log'}",
        "  timeline: 0.0 s launched; 1.5 s loading",
        "  last 2 lines of the log:",
        "  | one",
        "  | two",
        "  Thread 1",
    ]


def test_a_lease_keeps_its_port_from_others_but_not_from_its_server():
    lease = ports.lease("127.0.0.1")
    try:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", lease.port))
        with pytest.raises(OSError, match="kept by another server"):
            ports.lease("127.0.0.1", lease.port)
        with socket.create_server(("127.0.0.1", lease.port)):
            assert not ports.is_free("127.0.0.1", lease.port)
            with pytest.raises(OSError, match="is taken by pid"):
                ports.lease("127.0.0.1", lease.port)
        assert ports.is_free("127.0.0.1", lease.port)
    finally:
        lease.close()
    ports.lease("127.0.0.1", lease.port).close()


def test_leases_of_one_run_differ():
    leases = [ports.lease("127.0.0.1") for _ in range(50)]
    assert len({lease.port for lease in leases}) == 50
    for lease in leases:
        lease.close()


def test_a_lease_on_a_foreign_address_is_refused():
    with pytest.raises(OSError, match="assign"):
        ports.lease("192.0.2.1")

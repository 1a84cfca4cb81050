"""Arrivals are reproducible, an open loop waits for no server, and a slow client is told from a slow server."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from harness.engines.vllm import VllmEndpoint
from harness.errors import UsageError
from harness.load.openai import OpenAiEndpoint
from harness.measure import load
from harness.measure.endpoint import Generation
from harness.measure.load import ClosedLoop, Headroom, OpenLoop, Quantiles, RequestRecord, drive
from tests.measure.simulated_engine import prompts

AT_ONCE = OpenLoop(rate=1e6, seed=0)


def take(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def answered(seconds=1.0, **more):
    return Generation((1, 2, 3), seconds, "length", 3, **{"send_s": 0.0, "receive_s": 0.0, **more})


@dataclasses.dataclass
class Endpoint:
    """Does what `serve(prompt)` does, and says that it took `seconds`."""

    serve: object = lambda prompt: None
    seconds: float = 1.0

    def generate(self, prompt, max_tokens):
        self.serve(prompt)
        return answered(self.seconds)


def test_arrivals_are_drawn_from_the_seed():
    drawn = OpenLoop(rate=20.0, seed=7).arrivals(2_000)
    assert drawn == OpenLoop(rate=20.0, seed=7).arrivals(2_000)
    assert drawn[:100] == OpenLoop(rate=20.0, seed=7).arrivals(100)
    assert drawn != OpenLoop(rate=20.0, seed=8).arrivals(2_000)
    assert drawn == sorted(drawn)
    # A Poisson process: the gaps average 1 / rate, and their spread is as large as their mean.
    gaps = [later - earlier for earlier, later in itertools.pairwise(drawn)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_the_time_of_an_open_loop_begins_at_the_first_arrival(monkeypatch):
    """At this rate the first request would else come after some days, which would count in tokens per second."""
    waits = []
    monkeypatch.setattr(load.time, "sleep", waits.append)
    done = drive(Endpoint(), prompts(1), 3, OpenLoop(rate=1e-6, seed=0))
    assert len(done.requests) == 1
    assert waits == [0.0]


def test_an_open_loop_does_not_wait_for_the_server():
    """None of 50 requests is answered before all of them have come: a closed loop of fewer would wait for ever."""
    together = threading.Barrier(50)
    done = drive(Endpoint(lambda _: together.wait(30)), prompts(50), 3, AT_ONCE)
    assert [each.prompt for each in done.requests] == [prompt.name for prompt in prompts(50)]


def test_a_closed_loop_waits_for_the_server():
    inside, most, lock = [0], [0], threading.Lock()

    def serve(_):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        take(0.001)
        with lock:
            inside[0] -= 1

    assert len(drive(Endpoint(serve), prompts(50), 3, ClosedLoop(4)).requests) == 50
    assert most[0] <= 4


def test_a_request_that_could_not_be_sent_when_it_came_is_late_and_its_latency_says_so(monkeypatch):
    """With one place, the first request holds up the other two: no latency may leave that out."""
    monkeypatch.setattr(load, "MAX_IN_FLIGHT", 1)
    held = iter([0.1, 0.0, 0.0])
    done = drive(Endpoint(lambda _: take(next(held)), seconds=0.001), prompts(3), 3, AT_ONCE)
    assert all(each.latency_s >= 0.09 for each in done.requests[1:])
    assert all(each.before_s >= 0.09 for each in done.requests[1:])
    assert done.headroom.limit is not None


def test_the_wait_of_a_closed_loop_begins_when_the_slot_is_free():
    def serve(prompt):
        if prompt.name == "p01":
            take(0.05)

    done = drive(Endpoint(serve, seconds=0.0), prompts(3), 3, ClosedLoop(1))
    first, second, third = done.requests
    assert second.after_s >= 0.05  # what the endpoint does not account for is the client's
    assert third.late_s < second.after_s
    assert third.started >= first.started + 0.05


def test_a_client_that_burns_the_processor_is_the_limit():
    """A wrapper round an endpoint: what it costs is in none of the figures of what it wraps."""
    done = drive(Endpoint(lambda _: take(0.02), seconds=0.001), prompts(8), 3, ClosedLoop(1))
    assert done.headroom.limit is not None
    assert done.headroom.after.median >= 0.019


NULL_SERVER = Path(__file__).parents[2] / "bench/null_server.py"


@pytest.fixture
def null_server():
    """A server in a process of its own: what holds up the client does not hold it up."""
    with subprocess.Popen(
        [sys.executable, str(NULL_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def test_a_thread_that_holds_the_interpreter_is_the_limit(null_server):
    """The server answers at once, the client's threads get their turn late: CPU time alone need not show that."""
    endpoint = OpenAiEndpoint(null_server)
    endpoint.generate(prompts(1)[0], 4)
    stop = threading.Event()

    def hold():
        while not stop.is_set():
            pow(3, 200_000)  # one call, in which no other thread runs

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        done = drive(endpoint, prompts(20), 4, ClosedLoop(2))
    finally:
        stop.set()
        holder.join()
    headroom = Headroom.of(done.requests, done.seconds, client_cpu_s=0.0)
    assert headroom.limit[0] == "requests waited for the load client"


def test_the_engines_endpoints_measure_their_waits(null_server):
    """The null server's answers have no token ids: what is looked at is the answer before they are missed."""
    answer = VllmEndpoint(null_server, "x", speculative=False)._post("/v1/completions", {"prompt": [1]})
    assert 0 <= answer.send_s <= answer.seconds
    assert 0 <= answer.receive_s <= answer.seconds
    assert answer.json["usage"]["completion_tokens"] == 16


def test_a_request_that_fails_ends_the_load():
    sent = []

    def serve(prompt):
        sent.append(prompt.name)
        if prompt.name == "p03":
            raise ConnectionError("gone")

    for arrival in (ClosedLoop(1), OpenLoop(rate=200.0, seed=1)):
        sent.clear()
        with pytest.raises(ConnectionError):
            drive(Endpoint(serve), prompts(50), 3, arrival)
        assert len(sent) < 50


@pytest.fixture
def ended(monkeypatch):
    """Set once a pool of threads begins to end."""
    seen = threading.Event()

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def shutdown(self, *args, **settings):
            seen.set()
            super().shutdown(*args, **settings)

    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", Pool)
    return seen


def test_an_interrupt_ends_a_closed_loop_after_the_request_under_way(monkeypatch, ended):
    sent, asked = [], threading.Event()

    def serve(prompt):
        sent.append(prompt.name)
        asked.set()
        assert ended.wait(30)

    def interrupted(_):
        assert asked.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drive(Endpoint(serve), prompts(50), 3, ClosedLoop(1))
    assert sent == ["p00"]


def test_an_interrupt_ends_an_open_loop_with_those_that_wait_for_a_place(monkeypatch, ended):
    monkeypatch.setattr(load, "MAX_IN_FLIGHT", 1)
    sent, asked, arrivals = [], threading.Event(), itertools.count()

    def serve(prompt):
        sent.append(prompt.name)
        asked.set()
        assert ended.wait(30)

    def sleep(_):
        if next(arrivals) == 20:
            assert asked.wait(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(load.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        drive(Endpoint(serve), prompts(50), 3, AT_ONCE)
    assert sent == ["p00"]


def record(before, after, seconds=1.0):
    return RequestRecord("p", 0.0, seconds, 3, None, 0.0, before, after)


def test_headroom_is_the_waits_over_the_latencies():
    made = Headroom.of([record(0.01, 0.02), record(0.03, 0.0, seconds=2.0)], seconds=10.0, client_cpu_s=1.0)
    assert made.wait_share == pytest.approx(0.06 / 3.0)
    assert made.client_share == pytest.approx(0.1)
    assert (made.before, made.after) == (Quantiles(0.01, 0.03, 0.03), Quantiles(0.0, 0.02, 0.02))
    assert made.limit is None


@pytest.mark.parametrize(
    ("requests", "cpu", "words"),
    [
        ([record(0.0, 0.0)], 5.1, "busy"),
        ([record(0.051, 0.0)], 0.0, "waited"),
        ([record(0.0, 0.051)], 0.0, "waited"),
        ([record(0.0, 0.0), record(None, None)], 0.0, "not measured"),
        ([], 0.0, "not measured"),
    ],
)
def test_each_limit_turns_red(requests, cpu, words):
    assert words in Headroom.of(requests, seconds=10.0, client_cpu_s=cpu).limit[0]


def test_quantiles_are_times_that_were_seen():
    assert Quantiles.of(float(n) for n in range(1, 201)) == Quantiles(100.0, 198.0, 200.0)
    assert Quantiles.of([3.0]) == Quantiles(3.0, 3.0, 3.0)
    assert Quantiles.of([]) is None


@pytest.mark.parametrize("make", [lambda: ClosedLoop(0), lambda: OpenLoop(0.0, 1), lambda: OpenLoop(float("nan"), 1)])
def test_loads_that_mean_nothing_are_refused(make):
    with pytest.raises(UsageError):
        make()

"""Load on one endpoint, in a closed or an open loop, with everything needed to judge it later, its client included."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from harness.errors import UsageError
from harness.measure.endpoint import CounterReading, Counts, counted_between

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from harness.measure.endpoint import Endpoint, Prompt

__all__ = [
    "MAX_CLIENT_SHARE",
    "MAX_IN_FLIGHT",
    "MAX_WAIT_SHARE",
    "Answers",
    "ClosedLoop",
    "Headroom",
    "Load",
    "OpenLoop",
    "Quantiles",
    "RequestRecord",
    "Round",
    "Timed",
    "drive",
    "run_round",
]

MAX_CLIENT_SHARE = 0.5
"""Share of one core from which the load client, whose threads share one interpreter lock, slows the load it makes.

A queue at one server that is busy half of the time is as long as the service itself.
"""

MAX_WAIT_SHARE = 0.05
"""Share of the requests' time that may be spent waiting for the client.

In a closed loop a slot is idle for that share, so tokens per second are short by it at most. A speed-up r is a ratio of
two such times with the same wait in both: its gain r - 1 is understated by the faster side's share, which is this.
"""

MAX_IN_FLIGHT = 1024
"""Requests that an open loop can have under way. Beyond it they wait, which counts as waiting for the client."""


class Timed(Protocol):
    """What the load needs of an answer; `Generation` says what each figure means."""

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        ...

    @property
    def seconds(self) -> float:
        """Wall time of the request."""
        ...

    @property
    def first_token_s(self) -> float | None:
        """Time to the first token, where the request was streamed."""
        ...

    @property
    def send_s(self) -> float | None:
        """Of `seconds`, until the request had been sent."""
        ...

    @property
    def receive_s(self) -> float | None:
        """Of `seconds`, since the answer had arrived."""
        ...


class Answers(Protocol):
    """What load can be put on. Safe to call from several threads."""

    def generate(self, prompt: Prompt, max_tokens: int) -> Timed:
        """Answer `prompt`. Raises HarnessError or OSError if the server fails."""
        ...


@dataclasses.dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` slots, each of which sends its next request when the last one is answered."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"a concurrency of {self.concurrency}", remedy="give 1 or more")


@dataclasses.dataclass(frozen=True)
class OpenLoop:
    """Requests arrive as a Poisson process of `rate` a second, drawn from `seed`, whatever became of earlier ones."""

    rate: float
    seed: int

    def __post_init__(self) -> None:
        if not (0 < self.rate < math.inf):
            raise UsageError(f"a rate of {self.rate} requests a second", remedy="give a positive number")

    def arrivals(self, count: int) -> list[float]:
        """Return the first `count` arrivals, in seconds since the first of them, ascending."""
        drawn = random.Random(self.seed)  # noqa: S311 -- a workload, not a secret
        gaps = (drawn.expovariate(self.rate) for _ in range(count - 1))
        return list(itertools.accumulate(gaps, initial=0.0))


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """One request; all times are in seconds.

    `started` is when the client turned to it, since the load began, and `seconds` how long it took from then until it
    was handled. It was due `late_s` earlier: when its slot was free (closed loop), or when it arrived (open loop).
    `before_s` is from when it was due until its last byte was handed to the kernel, `after_s` from when the kernel had
    received the last byte of the answer until the client was through with it: the two waits for the client, None where
    the endpoint does not measure them.
    """

    prompt: str
    started: float
    seconds: float
    tokens: int
    first_token_s: float | None
    late_s: float = 0.0
    before_s: float | None = None
    after_s: float | None = None

    @property
    def latency_s(self) -> float:
        """From when it was due until it was handled: a client that falls behind does not make requests look quick."""
        return self.late_s + self.seconds

    @property
    def waited_s(self) -> float | None:
        """How long it waited for the client, before and after."""
        return None if self.before_s is None or self.after_s is None else self.before_s + self.after_s


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Median, 99th percentile and largest of some times in seconds. Each is one of the times, none is interpolated."""

    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Quantiles | None:
        """Return the quantiles of `times`, None if there are none: the least that so many do not exceed."""
        ordered = sorted(times)
        if not ordered:
            return None
        median, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.99))
        return cls(median, p99, ordered[-1])


@dataclasses.dataclass(frozen=True)
class Headroom:
    """How near the client came to setting the pace.

    `client_share` is its CPU time as a share of one core. `before` and `after` are the waits of `RequestRecord`;
    `wait_share` is their sum over the sum of all latencies. None where any request's wait was not measured.
    """

    client_share: float
    wait_share: float | None
    before: Quantiles | None
    after: Quantiles | None

    @classmethod
    def of(cls, requests: Sequence[RequestRecord], seconds: float, client_cpu_s: float) -> Headroom:
        """Return the headroom of a load of `seconds` of wall time."""
        before = [each.before_s for each in requests if each.before_s is not None]
        after = [each.after_s for each in requests if each.after_s is not None]
        measured = requests and len(before) == len(after) == len(requests)
        latencies = sum(each.latency_s for each in requests)
        return cls(
            client_share=client_cpu_s / seconds,
            wait_share=(sum(before) + sum(after)) / latencies if measured and latencies else None,
            before=Quantiles.of(before) if measured else None,
            after=Quantiles.of(after) if measured else None,
        )

    @property
    def limit(self) -> tuple[str, str, str] | None:
        """Return why the client may have set the pace: what happened, what was expected, what was seen."""
        if self.client_share > MAX_CLIENT_SHARE:
            return (
                "the load client itself was busy",
                f"at most {MAX_CLIENT_SHARE:.0%} of one core",
                f"{self.client_share:.0%}",
            )
        expected = f"at most {MAX_WAIT_SHARE:.0%} of the requests' time"
        if self.wait_share is None or self.before is None or self.after is None:
            return "how long requests waited for the load client was not measured", expected, "no figure"
        if self.wait_share > MAX_WAIT_SHARE:
            return "requests waited for the load client", expected, f"{self.wait_share:.1%} ({self.waits})"
        return None

    @property
    def waits(self) -> str:
        """The waits in words."""
        if self.before is None or self.after is None:
            return "not measured"
        return "; ".join(
            f"{name} median {1e3 * each.median:.2f} ms, p99 {1e3 * each.p99:.2f}, max {1e3 * each.max:.2f}"
            for name, each in (("to be sent", self.before), ("to be handled", self.after))
        )


@dataclasses.dataclass(frozen=True)
class Load:
    """What came of some requests: `client_cpu_s` is this process's CPU time in those `seconds` of wall time.

    They begin when the first request is due: an open loop's when it arrives.
    """

    seconds: float
    client_cpu_s: float
    requests: tuple[RequestRecord, ...]

    @property
    def headroom(self) -> Headroom:
        """How near the client came to setting the pace."""
        return Headroom.of(self.requests, self.seconds, self.client_cpu_s)


@dataclasses.dataclass(frozen=True)
class Round:
    """One pass over the prompts on one endpoint.

    `order` numbers all rounds of the run in the order they ran; `pair` is the pair of rounds it belongs to, None for a
    warm-up. `seconds` is wall time, `client_cpu_s` the CPU time this process spent meanwhile (all threads). `counts` is
    what the endpoint's speculation counters added, or None with the reason in `missing`.
    """

    label: str
    speculative: bool
    concurrency: int
    order: int
    pair: int | None
    seconds: float
    client_cpu_s: float
    requests: tuple[RequestRecord, ...]
    counts: Counts | None
    missing: str

    @property
    def tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(request.tokens for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.tokens / self.seconds

    @property
    def headroom(self) -> Headroom:
        """How near the client came to setting the pace."""
        return Headroom.of(self.requests, self.seconds, self.client_cpu_s)

    def as_measurements(self) -> dict[str, Any]:
        """Return the round raw, as plain data for the run record, with its headroom."""
        return dataclasses.asdict(self) | {"headroom": dataclasses.asdict(self.headroom)}


def drive(
    endpoint: Answers,
    work: Sequence[Prompt],
    max_tokens: int,
    arrival: ClosedLoop | OpenLoop,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Load:
    """Serve each prompt of `work` once, and return the requests in that order.

    Only a closed loop can run on another `clock`; waits for the client are real time in any case. Raises what
    `Answers.generate` raises, and KeyboardInterrupt, after the requests under way have ended; no further ones are sent.
    """
    run = _Run(endpoint, work, max_tokens, clock)
    workers = min(len(work), arrival.concurrency if isinstance(arrival, ClosedLoop) else MAX_IN_FLIGHT)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        arrivals = [] if isinstance(arrival, ClosedLoop) else arrival.arrivals(len(work))
        cpu_began = run.begin()
        try:
            futures: list[concurrent.futures.Future[Any]] = []
            if isinstance(arrival, ClosedLoop):
                futures += [pool.submit(run.slot) for _ in range(workers)]
            for index, arrives in enumerate(arrivals):
                due = run.real_began + arrives
                time.sleep(max(0.0, due - time.perf_counter()))
                if run.failed.is_set():
                    break
                futures.append(pool.submit(run.serve, index, due))
            for future in futures:
                future.result()
        except BaseException:
            # The pool waits for its threads, and they would go on sending.
            run.failed.set()
            raise
        seconds, client_cpu_s = clock() - run.began, time.process_time() - cpu_began
    return Load(seconds, client_cpu_s, tuple(record for record in run.records if record is not None))


class _Run:
    """The state that the threads of one load share. Times that are due are of `time.perf_counter()`."""

    def __init__(self, endpoint: Answers, work: Sequence[Prompt], max_tokens: int, clock: Callable[[], float]) -> None:
        self._endpoint, self._work, self._max_tokens, self._clock = endpoint, work, max_tokens, clock
        self._queue = collections.deque(range(len(work)))
        self.records: list[RequestRecord | None] = [None] * len(work)
        self.failed = threading.Event()
        self.began = self.real_began = 0.0

    def begin(self) -> float:
        """Take the time, and return the CPU time of this process so far."""
        self.began, self.real_began = self._clock(), time.perf_counter()
        return time.process_time()

    def slot(self) -> None:
        """Serve one request after the other until none is left."""
        free = self.real_began
        while True:
            try:
                index = self._queue.popleft()
            except IndexError:
                return
            free = self.serve(index, free)

    def serve(self, index: int, due: float) -> float:
        """Serve one request, unless another has failed, and return when it was handled."""
        if self.failed.is_set():
            return due
        turned, started = time.perf_counter(), self._clock() - self.began
        prompt = self._work[index]
        try:
            answer = self._endpoint.generate(prompt, self._max_tokens)
        except BaseException:
            self.failed.set()
            raise
        handled = time.perf_counter()
        late_s, before_s, after_s = turned - due, None, None
        if answer.send_s is not None and answer.receive_s is not None:
            before_s = late_s + answer.send_s
            # What the endpoint does not account for is the client's, too.
            after_s = answer.receive_s + max(0.0, handled - turned - answer.seconds)
        self.records[index] = RequestRecord(
            prompt.name,
            started,
            max(answer.seconds, handled - turned),
            answer.tokens,
            answer.first_token_s,
            late_s,
            before_s,
            after_s,
        )
        return handled


def run_round(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    speculative: bool,
    concurrency: int,
    order: int,
    pair: int | None,
    clock: Callable[[], float],
    times: int = 1,
) -> Round:
    """Serve every prompt equally often with `concurrency` workers, each sending its next request when one is answered.

    Every worker has two requests at least, so that the ends of a round, where workers run dry, weigh little; `times`
    makes it so many times as long. The other arguments are recorded as they are.

    Raises what `Endpoint.generate` raises.
    """
    copies = times * math.ceil(2 * concurrency / len(prompts))
    work = [prompt for _ in range(copies) for prompt in prompts]
    before = CounterReading.of(endpoint)
    load = drive(endpoint, work, max_tokens, ClosedLoop(concurrency), clock=clock)
    counts, missing = counted_between(before, CounterReading.of(endpoint))
    return Round(
        endpoint.label,
        speculative,
        concurrency,
        order,
        pair,
        load.seconds,
        load.client_cpu_s,
        load.requests,
        counts,
        missing,
    )

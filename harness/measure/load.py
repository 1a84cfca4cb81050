"""One round of closed-loop load on one endpoint, with everything needed to judge it later."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import time
from typing import TYPE_CHECKING

from harness.measure.endpoint import CounterReading, Counts, counted_between

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.measure.endpoint import Endpoint, Prompt

__all__ = ["RequestRecord", "Round", "run_round"]


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """One request of a round; `started` is in seconds since the round began."""

    prompt: str
    started: float
    seconds: float
    tokens: int
    first_token_s: float | None


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
    def client_share(self) -> float:
        """The load client's CPU time as a share of one core."""
        return self.client_cpu_s / self.seconds


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
) -> Round:
    """Serve every prompt equally often with `concurrency` workers, each sending its next request when one is answered.

    Every worker has two requests at least, so that the ends of a round, where workers run dry, weigh little. The other
    arguments are recorded as they are. Raises what `Endpoint.generate` raises.
    """
    copies = math.ceil(2 * concurrency / len(prompts))
    work = [prompt for _ in range(copies) for prompt in prompts]
    before = CounterReading.of(endpoint)
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        began, cpu_began = clock(), time.process_time()

        def answer(prompt: Prompt) -> RequestRecord:
            started = clock() - began
            generation = endpoint.generate(prompt, max_tokens)
            tokens = len(generation.token_ids)
            return RequestRecord(prompt.name, started, generation.seconds, tokens, generation.first_token_s)

        # As many threads as workers over one queue: that is a closed loop.
        requests = tuple(pool.map(answer, work))
        seconds, client_cpu_s = clock() - began, time.process_time() - cpu_began
    counts, missing = counted_between(before, CounterReading.of(endpoint))
    return Round(
        endpoint.label, speculative, concurrency, order, pair, seconds, client_cpu_s, requests, counts, missing
    )

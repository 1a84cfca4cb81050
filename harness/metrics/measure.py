"""Ask a canary one request after the other, and read all that the engine says of its acceptance after each."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.measure.endpoint import CounterReading, Counts, Endpoint, Generation, Prompt, Said, counted_between
from harness.metrics.meaning import Line
from harness.metrics.truth import Answered

if TYPE_CHECKING:
    from harness.canary.oracle import Oracle

__all__ = ["Log", "MetricsRun", "measure"]

STOPS = 2
"""Requests that end at a token in the middle of a verify step, so that what is accepted after it is not delivered."""

SETTLE_S = 3.0
"""How long figures are given to catch up with an answer."""

_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Log:
    """The engine's log: `lines` returns the figures of its lines so far; when they come is in `LogFigures`."""

    lines: Callable[[], Sequence[Line]]
    every: int | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class MetricsRun:
    """What was asked, what happened according to the oracle, and what the engine said.

    `readings` has one reading of each figure before the first request and one after each. `wrong` names the requests
    whose output was not the oracle's. `seconds` is what each request took. `counts` are the adapter's own, of all
    requests, or None with the reason.
    """

    label: str
    k: int
    requests: tuple[Answered, ...]
    wrong: tuple[str, ...]
    seconds: tuple[float, ...]
    readings: Mapping[str, tuple[Said | None, ...]]
    lines: tuple[Line, ...]
    every: int | None
    counts: Counts | None
    missing: str

    def as_measurements(self) -> dict[str, Any]:
        """Return it as plain data for the run record."""
        return {
            "label": self.label,
            "k": self.k,
            "requests": [dataclasses.asdict(each) for each in self.requests],
            "wrong": list(self.wrong),
            "seconds": list(self.seconds),
            "readings": {
                name: [None if each is None else each.value for each in said] for name, said in self.readings.items()
            },
            "lines": [{name: said.value for name, said in line.items()} for line in self.lines],
            "counts": None if self.counts is None else dataclasses.asdict(self.counts),
            "missing": self.missing,
        }


def measure(
    endpoint: Endpoint, log: Log, prompts: Sequence[Prompt], oracle: Oracle, k: int, max_tokens: int
) -> MetricsRun:
    """Serve each prompt to another length, and two that stop in the middle of a verify step.

    The engine must serve nobody else meanwhile. Raises UsageError where the prompts leave nothing to tell figures
    apart by, and what `Endpoint.generate` and `Endpoint.figures` raise.
    """
    asked = _asked(prompts, oracle, k, max_tokens)
    if log.every is None:
        _quiet(log)
    seen = len(log.lines())
    logged, said = seen, [_settled(endpoint, [])]
    before = CounterReading.of(endpoint)
    requests, wrong, seconds = [], [], []
    for prompt, tokens, truth in asked:
        answer = endpoint.generate(prompt, tokens)
        ids = prompt.token_ids or ()
        # Whether the token that ends an output is part of it differs between engines.
        ended_early = prompt.stop_token_ids and answer.tokens == truth.delivered - 1
        if not (answer.tokens == truth.delivered or ended_early) or not _says(answer, oracle, ids):
            wrong.append(prompt.name)
        seconds.append(answer.seconds)
        requests.append(dataclasses.replace(truth, delivered=answer.tokens))
        logged = len(log.lines())
        said.append(_settled(endpoint, said))
    counts, missing = counted_between(before, CounterReading.of(endpoint))
    if log.every is None:
        _line_after(log, logged)
    names = sorted({name for each in said for name in each})
    return MetricsRun(
        endpoint.label,
        k,
        tuple(requests),
        tuple(wrong),
        tuple(seconds),
        {name: tuple(each.get(name) for each in said) for name in names},
        tuple(log.lines()[seen:]),
        log.every,
        counts,
        missing,
    )


def _asked(prompts: Sequence[Prompt], oracle: Oracle, k: int, max_tokens: int) -> list[tuple[Prompt, int, Answered]]:
    """Return prompts with their output tokens and what will happen."""
    asked = []
    for index, prompt in enumerate(prompts):
        tokens = max_tokens - index % (k + 1)
        asked.append((prompt, tokens, Answered(oracle.steps(prompt.token_ids or (), tokens, k), tokens)))
    found = (_stop(prompt, oracle, k, max_tokens) for prompt in prompts)
    stops = [stop for stop in found if stop is not None]
    if len(stops) < STOPS:
        raise UsageError(
            f"{len(prompts)} prompts, of which {len(stops)} can be stopped within a verify step",
            remedy="give the pair more prompts, or more tokens",
        )
    return [*asked, *stops[:STOPS]]


def _stop(prompt: Prompt, oracle: Oracle, k: int, max_tokens: int) -> tuple[Prompt, int, Answered] | None:
    """Return the prompt with a token that ends its output within a step, before the last that it accepts (K > 1)."""
    ids = prompt.token_ids or ()
    output = oracle.continuation(ids, max_tokens)
    steps = oracle.steps(ids, max_tokens, k)
    at = 1  # the place of the step's first token in the output
    for number, accepted in enumerate(steps):
        first = output[at] if at < len(output) else None
        if number and accepted >= min(2, k) and first is not None and first not in output[:at]:
            stopped = dataclasses.replace(
                prompt, name=f"{prompt.name}-stopped", stop_token_ids=(first,), ignore_eos=False
            )
            return stopped, max_tokens, Answered(steps[: number + 1], at + 1)
        at += accepted + 1
    return None


def _says(answer: Generation, oracle: Oracle, prompt_ids: Sequence[int]) -> bool:
    return list(answer.token_ids) == oracle.continuation(prompt_ids, answer.tokens)


def _settled(endpoint: Endpoint, earlier: Sequence[Mapping[str, Said]]) -> Mapping[str, Said]:
    """Return the figures when they have caught up with the latest answer, or the last ones after `SETTLE_S` seconds.

    They have when two readings are alike, no figure of the latest of the `earlier` ones is lacking, and each that has
    changed with every request so far has changed again. Which those are is not known yet after the first request: that
    takes a third of the time at least.
    """
    began = time.monotonic()
    soonest, deadline = began + (SETTLE_S / 3 if len(earlier) == 1 else 0.0), began + SETTLE_S
    pairs = list(itertools.pairwise(earlier))
    moving = {
        name for name in (earlier[-1] if pairs else {}) if all(now.get(name) != then.get(name) for then, now in pairs)
    }
    said = endpoint.figures()
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        again = endpoint.figures()
        behind = bool(earlier) and (
            not earlier[-1].keys() <= again.keys() or any(again[name] == earlier[-1][name] for name in moving)
        )
        if again == said and not behind and time.monotonic() >= soonest:
            break
        said = again
    return said


def _quiet(log: Log) -> None:
    """Wait until the log has nothing more to say of what was before."""
    time.sleep(log.seconds)


def _line_after(log: Log, lines: int) -> None:
    """Wait for the line that comes after so many, of what was since the last of them; it may be late."""
    deadline = time.monotonic() + 3 * log.seconds
    while len(log.lines()) == lines and time.monotonic() < deadline:
        time.sleep(_POLL_S)

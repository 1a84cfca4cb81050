"""What two endpoints generate from the same prompts, and the target's own logits at every token that differs."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from harness.errors import EvidenceError
from harness.measure.endpoint import CounterReading, Counts, Prompt, TokenLogit, check_prompts, counted_between
from harness.measure.load import ClosedLoop, RequestRecord, drive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.measure.endpoint import Endpoint, Generation

__all__ = [
    "CONCURRENCY",
    "MAX_RESUMES",
    "TOP_LOGITS",
    "Comparison",
    "ConcurrentOutputs",
    "Divergence",
    "LosslessnessRun",
    "Segment",
    "measure",
]

CONCURRENCY = 4
"""Requests sent at once: a batch of them has a first and a last row and rows between, which join and leave it.

It is below what servers take unless a pair says less: SGLang 8 running requests on a CPU (harness/engines/sglang.py)
and 48 elsewhere with speculation (0.5.23, arg_groups/speculative_hook.py), vLLM 128 sequences or more (0.32.0,
engine/arg_utils.py).
"""

TOP_LOGITS = 20
"""Logits asked for at a divergence: what vLLM 0.32.0 gives by default at most (config/model.py, max_logprobs)."""

MAX_RESUMES = 8
"""How often a comparison goes on behind a divergence. More than that many near-ties in one output is itself strange."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token of a segment that differs; `position` counts generated tokens from the prompt's end.

    `logits` are the plain target's after the common prefix, highest first; empty, with the reason in `missing`, if the
    engine does not give them.
    """

    position: int
    spec_token: int
    plain_token: int
    logits: tuple[TokenLogit, ...]
    missing: str = ""


@dataclasses.dataclass(frozen=True)
class Segment:
    """One output from its token `start` on, and what it is held against: plain decoding after the prompt and its start.

    A `ConcurrentOutputs` holds a whole output against the one given alone: there, `plain` of the first segment is that.
    The seconds are wall times of the requests that were made for this segment, 0 where none was.
    """

    start: int
    spec: tuple[int, ...]
    plain: tuple[int, ...]
    spec_finish: str
    plain_finish: str
    spec_seconds: float
    plain_seconds: float
    divergence: Divergence | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt: an output and what it is held against; behind each divergence, plain decoding from the output's own.

    The first segment has both outputs whole.
    """

    name: str
    ignore_eos: bool
    segments: tuple[Segment, ...]

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """All divergences, in order."""
        return tuple(segment.divergence for segment in self.segments if segment.divergence)

    @property
    def ends_differently(self) -> bool:
        """Whether one of the two ends where the other goes on with the same tokens so far."""
        last = self.segments[-1]
        return last.divergence is None and len(last.spec) != len(last.plain)

    @property
    def total(self) -> int:
        """Tokens of the output."""
        return self.segments[-1].start + len(self.segments[-1].spec)

    @property
    def compared(self) -> int:
        """How many of them were compared: not what follows a divergence behind which the comparison ended."""
        last = self.segments[-1]
        return last.divergence.position + 1 if last.divergence else last.start + min(len(last.spec), len(last.plain))


@dataclasses.dataclass(frozen=True)
class ConcurrentOutputs:
    """What the speculative endpoint gave when the same prompts were sent again, `concurrency` of them at a time.

    `requests` says when each was under way, in the order of the prompts. `comparisons` hold each output against the one
    that the prompt got alone, and behind a divergence against plain decoding. `counts` is what the endpoint's counters
    added meanwhile, or None with the reason in `missing`. With a single prompt nothing is sent.
    """

    concurrency: int
    requests: tuple[RequestRecord, ...]
    comparisons: tuple[Comparison, ...]
    counts: Counts | None
    missing: str


@dataclasses.dataclass(frozen=True)
class LosslessnessRun:
    """Raw outputs, and what the counters of both endpoints added meanwhile.

    `spec_counts` are those of the requests that ran alone. `repeats` compares the plain endpoint with itself.
    """

    spec_label: str
    plain_label: str
    plain_speculative: bool
    max_tokens: int
    comparisons: tuple[Comparison, ...]
    repeats: tuple[Comparison, ...]
    spec_counts: Counts | None
    spec_missing: str
    plain_counts: Counts | None
    concurrent: ConcurrentOutputs

    def as_measurements(self) -> dict[str, Any]:
        """Return the raw outputs as plain data for the run record."""
        return dataclasses.asdict(self)


def measure(
    spec_endpoint: Endpoint,
    plain_endpoint: Endpoint,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    repeat: int = 4,
    side_by_side: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> LosslessnessRun:
    """Generate every prompt on both endpoints, one at a time, and look at the target's logits where they differ.

    Then the speculative one is sent all prompts again, several at once. Behind a divergence the plain target continues
    from the token that was said, so that one near-tie does not hide the rest of the output. Where the two cannot run
    `side_by_side`, the speculative one answers everything before the plain one is asked. The first `repeat` prompts are
    run twice on the plain endpoint, to see whether it repeats itself. Missing logits and counters are recorded, not
    raised. `clock` (seconds) times the requests that are sent at once. Raises UsageError for unusable prompts, and what
    `Endpoint.generate` raises.
    """
    check_prompts(prompts, max_tokens)
    before = CounterReading.of(spec_endpoint)
    plain_before = CounterReading.of(plain_endpoint) if side_by_side else None
    alone: dict[str, Generation] = {}
    comparisons: list[Comparison] = []
    for prompt in prompts:
        alone[prompt.name] = spec_endpoint.generate(prompt, max_tokens)
        if side_by_side:
            comparisons.append(_compare(prompt, alone[prompt.name], plain_endpoint, max_tokens))
    spec_counts, spec_missing = counted_between(before, CounterReading.of(spec_endpoint))
    sent = _send_at_once(spec_endpoint, prompts, max_tokens, clock)
    if plain_before is None:
        plain_before = CounterReading.of(plain_endpoint)
        comparisons = [_compare(prompt, alone[prompt.name], plain_endpoint, max_tokens) for prompt in prompts]
    repeats = tuple(
        _compare(prompt, plain_endpoint.generate(prompt, max_tokens), plain_endpoint, max_tokens)
        for prompt in prompts[:repeat]
    )
    concurrent = ConcurrentOutputs(
        sent.concurrency,
        sent.requests,
        tuple(
            _compare(prompt, sent.answers[prompt.name], plain_endpoint, max_tokens, alone[prompt.name])
            for prompt in prompts
            if prompt.name in sent.answers
        ),
        sent.counts,
        sent.missing,
    )
    plain_counts, _ = counted_between(plain_before, CounterReading.of(plain_endpoint))
    return LosslessnessRun(
        spec_endpoint.label,
        plain_endpoint.label,
        plain_endpoint.speculative,
        max_tokens,
        tuple(comparisons),
        repeats,
        spec_counts,
        spec_missing,
        plain_counts,
        concurrent,
    )


@dataclasses.dataclass(frozen=True)
class _Sent:
    """What came of requests that were sent at once; answers by the prompt's name."""

    concurrency: int
    requests: tuple[RequestRecord, ...]
    answers: Mapping[str, Generation]
    counts: Counts | None
    missing: str


class _Keeping:
    """An endpoint whose answers are kept; the load client itself keeps only their times."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.answers: dict[str, Generation] = {}

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        answer = self._endpoint.generate(prompt, max_tokens)
        self.answers[prompt.name] = answer
        return answer


def _send_at_once(endpoint: Endpoint, prompts: Sequence[Prompt], max_tokens: int, clock: Callable[[], float]) -> _Sent:
    concurrency = min(CONCURRENCY, len(prompts))
    if concurrency < 2:
        return _Sent(concurrency, (), {}, None, "a single prompt")
    before, keeping = CounterReading.of(endpoint), _Keeping(endpoint)
    load = drive(keeping, prompts, max_tokens, ClosedLoop(concurrency), clock=clock)
    counts, missing = counted_between(before, CounterReading.of(endpoint))
    return _Sent(concurrency, load.requests, keeping.answers, counts, missing)


def _compare(
    prompt: Prompt, output: Generation, plain: Endpoint, max_tokens: int, reference: Generation | None = None
) -> Comparison:
    """Hold `output` against `reference`, which is the plain endpoint's if it is not given."""
    segments: list[Segment] = []
    start, spec_seconds, plain_seconds = 0, 0.0, 0.0
    if reference is None:
        reference = plain.generate(prompt, max_tokens)
        spec_seconds, plain_seconds = output.seconds, reference.seconds
    context = prompt.token_ids or output.prompt_token_ids or reference.prompt_token_ids
    while True:
        ours, theirs = output.token_ids[start:], reference.token_ids
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        divergence = None
        if at is not None:
            logits, missing = _logits(plain, context, output.token_ids[: start + at])
            divergence = Divergence(start + at, ours[at], theirs[at], logits, missing)
        ends = output.finish_reason, reference.finish_reason, spec_seconds, plain_seconds
        segments.append(Segment(start, ours, theirs, *ends, divergence))
        # Nothing follows where the output ends on the token that differs, and without the prompt's token ids there is
        # no context to resume from.
        if at is None or context is None or at + 1 >= len(ours) or len(segments) > MAX_RESUMES:
            return Comparison(prompt.name, prompt.ignore_eos, tuple(segments))
        start += at + 1
        resumed = Prompt(prompt.name, token_ids=context + output.token_ids[:start], ignore_eos=prompt.ignore_eos)
        reference = plain.generate(resumed, max_tokens - start)
        spec_seconds, plain_seconds = 0.0, reference.seconds


def _logits(
    plain: Endpoint, context: tuple[int, ...] | None, prefix: tuple[int, ...]
) -> tuple[tuple[TokenLogit, ...], str]:
    if context is None:
        return (), "the prompt's token ids are unknown, so the target cannot be forced onto the common prefix"
    try:
        logits = plain.next_token_logits(context + prefix, TOP_LOGITS)
    except EvidenceError as error:
        return (), error.message
    if not logits or not all(math.isfinite(each.logit) for each in logits):
        return (), "the target's logits are empty or not finite"
    return tuple(sorted(logits, key=lambda each: -each.logit)), ""

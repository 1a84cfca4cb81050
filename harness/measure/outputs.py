"""What two endpoints generate from the same prompts, and the target's own logits at every token that differs."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from harness.errors import EvidenceError
from harness.measure.endpoint import CounterReading, Counts, Prompt, TokenLogit, check_prompts, counted_between

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.measure.endpoint import Endpoint, Generation

__all__ = ["MAX_RESUMES", "TOP_LOGITS", "Comparison", "Divergence", "LosslessnessRun", "Segment", "measure"]

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
    """Two outputs generated from one context: the prompt and the plain target's first `start` tokens.

    The seconds are wall times of the two requests.
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
    """One prompt: the two outputs, and, behind each divergence, the two outputs resumed on the plain target's token."""

    name: str
    ignore_eos: bool
    segments: tuple[Segment, ...]

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """All divergences, in order."""
        return tuple(segment.divergence for segment in self.segments if segment.divergence)

    @property
    def total(self) -> int:
        """Tokens of the plain output, the resumed parts included."""
        return self.segments[-1].start + len(self.segments[-1].plain)

    @property
    def compared(self) -> int:
        """How many of them were compared; what follows the last divergence was generated from another context."""
        last = self.segments[-1]
        return last.divergence.position + 1 if last.divergence else last.start + min(len(last.spec), len(last.plain))


@dataclasses.dataclass(frozen=True)
class LosslessnessRun:
    """Raw outputs, and what the counters of both endpoints added meanwhile.

    `repeats` compares the plain endpoint with itself.
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
) -> LosslessnessRun:
    """Generate every prompt on both endpoints, one at a time, and look at the target's logits where they differ.

    Behind a divergence both continue from the plain target's token, so that one near-tie does not hide the rest of the
    output. Where the two cannot run `side_by_side`, all prompts go to the speculative one first, and an output ends at
    its first divergence. The first `repeat` prompts are run twice on the plain endpoint, to see whether it repeats
    itself. Missing logits and counters are recorded, not raised. Raises UsageError for unusable prompts, and what
    `Endpoint.generate` raises.
    """
    check_prompts(prompts, max_tokens)
    before = CounterReading.of(spec_endpoint)
    answers = {} if side_by_side else {prompt: spec_endpoint.generate(prompt, max_tokens) for prompt in prompts}
    spec_counts, spec_missing = counted_between(before, CounterReading.of(spec_endpoint))
    plain_before = CounterReading.of(plain_endpoint)
    comparisons = tuple(
        _compare(spec_endpoint, plain_endpoint, prompt, max_tokens, answers.get(prompt)) for prompt in prompts
    )
    repeats = tuple(_compare(plain_endpoint, plain_endpoint, prompt, max_tokens) for prompt in prompts[:repeat])
    if side_by_side:
        spec_counts, spec_missing = counted_between(before, CounterReading.of(spec_endpoint))
    plain_counts, _ = counted_between(plain_before, CounterReading.of(plain_endpoint))
    return LosslessnessRun(
        spec_endpoint.label,
        plain_endpoint.label,
        plain_endpoint.speculative,
        max_tokens,
        comparisons,
        repeats,
        spec_counts,
        spec_missing,
        plain_counts,
    )


def _compare(
    first: Endpoint, plain: Endpoint, prompt: Prompt, max_tokens: int, given: Generation | None = None
) -> Comparison:
    """Compare the outputs of two endpoints. `given` is the first one's, where it can no longer be asked."""
    segments: list[Segment] = []
    current, start = prompt, 0
    while True:
        spec_answer = given or first.generate(current, max_tokens - start)
        plain_answer = plain.generate(current, max_tokens - start)
        context = current.token_ids or plain_answer.prompt_token_ids
        ours, theirs = spec_answer.token_ids, plain_answer.token_ids
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        divergence = None
        if at is not None:
            logits, missing = _logits(plain, context, theirs[:at])
            divergence = Divergence(start + at, ours[at], theirs[at], logits, missing)
        ends = spec_answer.finish_reason, plain_answer.finish_reason, spec_answer.seconds, plain_answer.seconds
        segments.append(Segment(start, ours, theirs, *ends, divergence))
        # Nothing follows where the plain output ends on the token that differs, and without the prompt's token ids
        # there is no context to resume from.
        too_many = given is not None or len(segments) > MAX_RESUMES
        if at is None or context is None or at + 1 >= len(theirs) or too_many:
            return Comparison(prompt.name, prompt.ignore_eos, tuple(segments))
        start += at + 1
        current = Prompt(prompt.name, token_ids=context + theirs[: at + 1], ignore_eos=prompt.ignore_eos)


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

"""What measuring code needs of a running engine: one greedy request, cumulative counters, the target's logits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Protocol

from harness.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "SEVERAL",
    "CounterReading",
    "Counters",
    "Counts",
    "Endpoint",
    "Figure",
    "Generation",
    "Prompt",
    "Said",
    "TokenLogit",
    "Witness",
    "check_prompts",
    "counted_between",
    "of_right_length",
]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One named prompt: exactly one of `token_ids`, `messages` ((role, content) pairs) and `text` is set.

    With `ignore_eos` the engine must generate exactly `max_tokens` tokens. Any of `stop_token_ids` ends it too.
    """

    name: str
    token_ids: tuple[int, ...] | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    text: str | None = None
    ignore_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = [form for form in ("token_ids", "messages", "text") if getattr(self, form)]
        if len(given) != 1:
            raise UsageError(
                f"prompt {self.name!r} has {', '.join(given) or 'no content'}",
                remedy="give exactly one of token_ids, messages and text, and not an empty one",
            )


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    `token_ids` are the generated tokens only; `seconds` the wall time of the request as the client saw it;
    `finish_reason` the engine's word ("length", "stop"); `prompt_tokens` how many tokens the engine counted in the
    prompt; `first_token_s` the time to the first token, where the request was streamed; `prompt_token_ids` the
    prompt as the engine tokenised it, where it tells (needed to force the target onto a prefix of a text prompt).

    Of `seconds`, `send_s` went by before the last byte of the request was handed to the kernel, and `receive_s` from
    when the kernel had received the last byte of the answer until it was decoded: time that the request waited for the
    client. None: not measured.
    """

    token_ids: tuple[int, ...]
    seconds: float
    finish_reason: str
    prompt_tokens: int
    first_token_s: float | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    send_s: float | None = None
    receive_s: float | None = None

    @property
    def tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What happened in some verify steps; a verify step is one pass of the target over one request's draft tokens.

    `drafts` counts verify steps that had at least one draft token, `draft_tokens` the tokens proposed, `accepted` those
    accepted (never the token that the target adds itself), `per_position[i]` the steps that accepted position i.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Tokens per verify step, the target's own included: 1 + accepted / drafts.

        Raises EvidenceError if there was no verify step.
        """
        if self.drafts <= 0:
            raise EvidenceError("no verify step happened, so there is no accept length")
        return 1.0 + self.accepted / self.drafts


@dataclasses.dataclass(frozen=True)
class Counters(Counts):
    """The same since the engine started; `source` names the counters, `at` is `time.monotonic()` at the reading."""

    source: str
    at: float

    def since(self, earlier: Counters) -> Counts:
        """Return what was counted between two readings; entries are negative where the engine was restarted.

        Raises EvidenceError if the readings do not have the same positions.
        """
        if len(self.per_position) != len(earlier.per_position):
            raise EvidenceError(
                f"{self.source} had {len(earlier.per_position)} positions, then {len(self.per_position)}",
                remedy="the two readings are not of one engine process; start the measurement again on one server",
            )
        return Counts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.per_position, earlier.per_position, strict=True)),
        )


@dataclasses.dataclass(frozen=True)
class CounterReading:
    """One attempt to read the counters: `counters`, or why there are none."""

    counters: Counters | None
    missing: str = ""

    @classmethod
    def of(cls, endpoint: Endpoint) -> CounterReading:
        """Read the counters of `endpoint`; that it has none is a fact to record, not an error."""
        try:
            return cls(endpoint.counters())
        except EvidenceError as error:
            return cls(None, missing=error.message)


def counted_between(before: CounterReading, after: CounterReading) -> tuple[Counts | None, str]:
    """Return what was counted between two readings, or None and the reason."""
    if before.counters is None or after.counters is None:
        return None, before.missing or after.missing
    try:
        return after.counters.since(before.counters), ""
    except EvidenceError as error:
        return None, error.message


@dataclasses.dataclass(frozen=True)
class TokenLogit:
    """One token of the target's next-token distribution: its raw logit, before temperature and softmax.

    A log-probability will not do: its gaps are the same, but the size of the logit, which sets the rounding, is lost.
    """

    token_id: int
    logit: float


@dataclasses.dataclass(frozen=True)
class Witness:
    """Another figure of the engine's for what an endpoint has counted: what `source` says, and what it may say.

    `low` and `high` bound what agrees with the counters; they differ where a figure lags or is rounded.
    """

    source: str
    what: str
    says: float
    low: float
    high: float

    @property
    def agrees(self) -> bool:
        """Whether the two can both be right."""
        return self.low <= self.says <= self.high


Figure = float | tuple[float, ...]
"""One number, or one for each draft position."""


SEVERAL = " (several ranks)"
"""What the name of a figure ends with that is there once for each rank, with different values: they are one tuple."""


@dataclasses.dataclass(frozen=True)
class Said:
    """A figure as it was printed: with as many decimals, so within `tolerance`."""

    value: Figure
    tolerance: float = 0.0

    def is_(self, value: Figure) -> bool:
        """Whether it can be this value. What has more entries than the other has zeros there."""
        if isinstance(self.value, float) and isinstance(value, (int, float)):
            return abs(self.value - value) <= self.tolerance + 1e-6 * max(1.0, abs(value))
        mine, other = (each if isinstance(each, tuple) else (each,) for each in (self.value, value))
        if isinstance(self.value, tuple) is not isinstance(value, tuple):
            return False
        return all(
            abs(a - b) <= self.tolerance + 1e-6 * max(1.0, abs(b))
            for a, b in itertools.zip_longest(mine, other, fillvalue=0.0)
        )


class Endpoint(Protocol):
    """A running engine. Safe to call from several threads: an adapter keeps one HTTP session per thread."""

    @property
    def label(self) -> str:
        """What findings call this endpoint, e.g. "vllm 0.32.0 with drafter"."""
        ...

    @property
    def speculative(self) -> bool:
        """Whether it was launched with a drafter. A claim; measuring code checks it against the counters."""
        ...

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        """Answer `prompt` greedily (temperature 0), ignoring the end-of-sequence token if the prompt says so.

        Raises HarnessError if the server fails or the answer has no token ids.
        """
        ...

    def counters(self) -> Counters:
        """Return the cumulative counters. Raises EvidenceError if the engine does not have them."""
        ...

    def witnesses(self) -> tuple[Witness, ...]:
        """Return the engine's other figures for all that this endpoint has counted; empty where it has none.

        Raises EvidenceError if a figure that this release has cannot be read.
        """
        ...

    def figures(self) -> Mapping[str, Said]:
        """Return every acceptance figure that the engine shows now, by place and name ("/metrics NAME").

        Raises EvidenceError if a page cannot be read.
        """
        ...

    def next_token_logits(self, prompt_token_ids: tuple[int, ...], top: int) -> list[TokenLogit]:
        """Return the `top` highest logits after `prompt_token_ids`, highest first, from the target alone.

        Raises EvidenceError if the engine cannot give them.
        """
        ...


def of_right_length(tokens: int, max_tokens: int, *, ignore_eos: bool) -> bool:
    """Return whether an output has the tokens asked for: 1 to `max_tokens`, all of them where it ignores the EOS."""
    return tokens == max_tokens if ignore_eos else 0 < tokens <= max_tokens


def check_prompts(prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Raise UsageError unless there are prompts, their names differ and `max_tokens` leaves something to draft."""
    names = [prompt.name for prompt in prompts]
    if not names:
        raise UsageError("no prompts to measure with", remedy="give at least one prompt")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"prompt names occur twice: {', '.join(repeated)}", remedy="give every prompt its own name")
    if max_tokens < 2:
        raise UsageError(
            f"max_tokens is {max_tokens}: the first token comes from prefill, so nothing would be drafted",
            remedy="set max_tokens to 2 or more (64 or more for an estimate)",
        )

"""What happened, verify step by verify step, and what a figure of it can mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from harness.measure.endpoint import Figure

__all__ = ["COUNTS", "RATIOS", "Answered", "Formula", "Stretch", "whole"]


@dataclasses.dataclass(frozen=True)
class Answered:
    """One request: the draft tokens that each of its verify steps accepted, in order, and the tokens it delivered.

    The first token comes from prefill. The last step may accept tokens beyond the end of the output.
    """

    steps: tuple[int, ...]
    delivered: int


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Neighbouring verify steps of a server that drafts `k` tokens in each.

    `requests` and `delivered` (tokens) are None where the stretch begins or ends within a request.
    """

    k: int
    steps: tuple[int, ...]
    requests: int | None = None
    delivered: int | None = None

    @functools.cached_property
    def drafts(self) -> int:
        """Verify steps."""
        return len(self.steps)

    @functools.cached_property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.steps)

    @functools.cached_property
    def per_position(self) -> tuple[int, ...]:
        """Steps that accepted the draft token at position 0 .. K-1."""
        return tuple(sum(each > position for each in self.steps) for position in range(self.k))

    @functools.cached_property
    def histogram(self) -> tuple[int, ...]:
        """Steps that accepted exactly 0 .. K draft tokens."""
        return tuple(self.steps.count(number) for number in range(self.k + 1))


def whole(k: int, requests: Sequence[Answered]) -> Stretch:
    """Return whole requests, one after the other, as one stretch."""
    steps = tuple(step for request in requests for step in request.steps)
    return Stretch(k, steps, len(requests), sum(request.delivered for request in requests))


def _delivered(stretch: Stretch) -> int:
    assert stretch.delivered is not None  # noqa: S101 -- asked of whole requests only
    return stretch.delivered


def _requests(stretch: Stretch) -> int:
    assert stretch.requests is not None  # noqa: S101 -- as above
    return stretch.requests


@dataclasses.dataclass(frozen=True)
class Formula:
    """How a figure follows from a stretch; `whole` if only from one of whole requests."""

    of: Callable[[Stretch], Figure]
    whole: bool = False


COUNTS: Mapping[str, Formula] = {
    "verify steps": Formula(lambda s: s.drafts),
    "draft tokens": Formula(lambda s: s.k * s.drafts),
    "draft tokens and the root of each step": Formula(lambda s: (s.k + 1) * s.drafts),
    "draft tokens but one of each step": Formula(lambda s: (s.k - 1) * s.drafts),
    "accepted draft tokens": Formula(lambda s: s.accepted),
    "accepted draft tokens and the target's of each step": Formula(lambda s: s.accepted + s.drafts),
    "rejected draft tokens": Formula(lambda s: s.k * s.drafts - s.accepted),
    "accepted draft tokens that were delivered": Formula(lambda s: _delivered(s) - _requests(s) - s.drafts, whole=True),
    "generated tokens, those beyond the end of an output included": Formula(
        lambda s: s.accepted + s.drafts + _requests(s), whole=True
    ),
    "delivered tokens": Formula(_delivered, whole=True),
    "delivered tokens without those of prefill": Formula(lambda s: _delivered(s) - _requests(s), whole=True),
    "requests": Formula(_requests, whole=True),
    "steps that accepted each position": Formula(lambda s: tuple(map(float, s.per_position))),
    "steps that accepted exactly 0 to K": Formula(lambda s: tuple(map(float, s.histogram))),
}
"""What can be counted."""

RATIOS: Mapping[str, Formula] = {
    "accept length": Formula(lambda s: 1 + s.accepted / s.drafts),
    "accepted draft tokens per step": Formula(lambda s: s.accepted / s.drafts),
    "delivered tokens per step, that of prefill included": Formula(lambda s: _delivered(s) / s.drafts, whole=True),
    "delivered tokens per step, without that of prefill": Formula(
        lambda s: (_delivered(s) - _requests(s)) / s.drafts, whole=True
    ),
    "generated tokens per step, that of prefill included": Formula(
        lambda s: (s.accepted + s.drafts + _requests(s)) / s.drafts, whole=True
    ),
    "acceptance rate": Formula(lambda s: s.accepted / (s.k * s.drafts)),
    "acceptance rate with the root among the drafts": Formula(lambda s: s.accepted / ((s.k + 1) * s.drafts)),
    "acceptance rate with a draft token too few": Formula(
        lambda s: s.accepted / ((s.k - 1) * s.drafts) if s.k > 1 else float("nan")
    ),
    "accept length over K": Formula(lambda s: (s.accepted + s.drafts) / (s.k * s.drafts)),
    "accept length over K + 1": Formula(lambda s: (s.accepted + s.drafts) / ((s.k + 1) * s.drafts)),
    "acceptance at each position": Formula(lambda s: tuple(each / s.drafts for each in s.per_position)),
    "acceptance at each position, given the one before": Formula(
        lambda s: tuple(
            now / before if before else 0.0
            for now, before in zip(s.per_position, (s.drafts, *s.per_position), strict=False)
        )
    ),
}
"""What can be said per step or per draft token; of a stretch without a verify step, nothing."""

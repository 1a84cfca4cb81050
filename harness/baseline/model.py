"""What a baseline holds: the case it is of, where it comes from, and the raw counts to compare with."""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import msgspec
import numpy as np

from harness.measure.acceptance import DEAD_ACCEPT_LENGTH
from harness.measure.statistics import studentised

__all__ = [
    "NEAR_DEAD",
    "SCHEMA",
    "Acceptance",
    "Baseline",
    "CaseFacts",
    "Provenance",
    "Throughput",
]

SCHEMA = 1

NEAR_DEAD = DEAD_ACCEPT_LENGTH + 0.10
"""Accept length below which nothing is a reference.

One draft token accepted in seven steps pays for no drafter, and what is a few per cent below is within reach of a
drafter of random weights (`DEAD_ACCEPT_LENGTH`): such a reference would hardly ever turn red.
"""

_ROUNDING = 1.01e-4
"""What rounding to four places may leave between a derived figure and the one stated."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(gt=0)]
_Digest = Annotated[str, msgspec.Meta(pattern="^sha256")]
_LogRatio = Annotated[float, msgspec.Meta(ge=-10, le=10)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class CaseFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal for two measurements to be compared at all; the digests are those of the record."""

    pair: _Text
    engine: _Text
    runner: _Text
    device: _Text
    method: _Text
    k: _Positive
    dtype: _Text
    target: _Digest
    drafter: _Digest
    prompts: _Digest
    max_tokens: _Positive

    def differences(self, other: CaseFacts) -> list[str]:
        """Return what is not equal, each as "key: the other's value, here this one's"."""
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [f"{key} {others[key]} -> {value}" for key, value in mine.items() if value != others[key]]


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the figures come from: facts that a comparison names when they differ, and does not refuse."""

    run: _Text
    finished: _Text
    draftgate: _Text
    distribution: _Text
    version: _Text
    python: _Text
    cpu: str
    cores: _Positive | _Share
    memory_gib: _Count
    system: str
    gpus: list[str]
    driver: _Text
    arguments: list[str]
    environment: list[str]
    packages: dict[str, str]

    def differences(self, other: Provenance) -> list[str]:
        """Return what differs from `other` in the engine, its packages, its arguments and the machine."""
        mine, others = (msgspec.structs.asdict(each) | each.packages for each in (self, other))
        keys = ("distribution", "version", "python", "arguments", "environment", "driver", "system", "draftgate")
        return [
            f"{key} {_plain(others.get(key))} -> {_plain(mine.get(key))}"
            for key in (*keys, *sorted(self.packages.keys() | other.packages.keys()))
            if mine.get(key) != others.get(key)
        ]


def _plain(value: object) -> str:
    return (" ".join(value) if isinstance(value, list) else str(value or "")) or "none"


class Acceptance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts per prompt, [verify steps, steps that accepted position 0, position 1, ...], K + 1 entries.

    `exact` says that they are a canary's, to be met by equality. `n`, `accept_length` and `standard_error` follow from
    the counts and stand there for the reader.
    """

    exact: bool
    n: _Positive
    accept_length: float
    standard_error: float
    counts: dict[str, list[_Count]]

    @classmethod
    def of(cls, counts: dict[str, list[int]], *, exact: bool) -> Acceptance:
        """Return the section for some counts. There is one verify step at least, and two prompts with one."""
        stepped = [row for row in counts.values() if row[0]]
        accepted = np.array([[sum(row[1:]) for row in stepped]], dtype=np.float64)
        steps = np.array([[row[0] for row in stepped]], dtype=np.float64)
        ratio, error, _ = studentised(accepted, steps, np.ones((1, len(stepped))))
        return cls(
            exact=exact,
            n=len(stepped),
            accept_length=round(1.0 + float(ratio[0]), 4),
            standard_error=round(float(error[0]), 4),
            counts=counts,
        )


class Throughput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Natural logarithms of the speed-up by speculation, one for each pair of rounds, by concurrency.

    `prompts` of `tokens` output tokens each made a round; `interleaved` says that rounds alternated. `speed_up` follows
    from the logarithms and stands there for the reader.
    """

    prompts: _Positive
    tokens: _Positive
    interleaved: bool
    speed_up: dict[_Positive, float]
    log_ratios: dict[_Positive, Annotated[list[_LogRatio], msgspec.Meta(min_length=2)]]

    @classmethod
    def of(cls, log_ratios: dict[int, list[float]], *, prompts: int, tokens: int, interleaved: bool) -> Throughput:
        """Return the section for some log ratios, rounded to 1e-5: a thousandth of what rounds differ by."""
        rounded = {load: [round(value, 5) for value in log_ratios[load]] for load in sorted(log_ratios)}
        speed_up = {load: round(math.exp(sum(values) / len(values)), 3) for load, values in rounded.items()}
        return cls(prompts=prompts, tokens=tokens, interleaved=interleaved, speed_up=speed_up, log_ratios=rounded)

    def faults(self) -> list[tuple[str, str]]:
        """Return what contradicts itself, as key and what is wrong."""
        if self.log_ratios.keys() != self.speed_up.keys() or not self.log_ratios:
            loads = f"{list(self.speed_up)}, and throughput.log_ratios {list(self.log_ratios)}"
            return [("throughput.speed_up", f"has the concurrencies {loads}")]
        follows = self.of(
            self.log_ratios, prompts=self.prompts, tokens=self.tokens, interleaved=self.interleaved
        ).speed_up
        return [
            (f"throughput.speed_up.{load}", f"is {stated}, and the logarithms give {follows[load]}")
            for load, stated in self.speed_up.items()
            if not math.isclose(stated, follows[load], abs_tol=10 * _ROUNDING)
        ]

    def differences(self, other: Throughput) -> list[str]:
        """Return what is not alike in the work of a round."""
        return [
            f"throughput.{key} {getattr(other, key)} -> {getattr(self, key)}"
            for key in ("prompts", "tokens", "interleaved")
            if getattr(self, key) != getattr(other, key)
        ]


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reference of one pair on one engine, runner and device class."""

    schema: int
    case: CaseFacts
    provenance: Provenance
    acceptance: Acceptance
    throughput: Throughput | None = None

    def faults(self) -> list[tuple[str, str]]:
        """Return what contradicts itself, as key and what is wrong: a file may have been edited by hand."""
        found: list[tuple[str, str]] = []
        for name, row in self.acceptance.counts.items():
            if len(row) != self.case.k + 1:
                found.append((f"acceptance.counts.{name}", f"has {len(row)} numbers, not K + 1 = {self.case.k + 1}"))
            elif any(then < now for then, now in itertools.pairwise(row)):
                found.append((f"acceptance.counts.{name}", f"rises in {row}: a position needs the one before it"))
        if sum(row[0] > 0 for row in self.acceptance.counts.values() if row) < 2:
            found.append(("acceptance.counts", "has fewer than two prompts with a verify step"))
        if found:
            return found
        derived = Acceptance.of(self.acceptance.counts, exact=self.acceptance.exact)
        for key in ("n", "accept_length", "standard_error"):
            stated, follows = getattr(self.acceptance, key), getattr(derived, key)
            if not math.isclose(stated, follows, abs_tol=_ROUNDING):
                found.append((f"acceptance.{key}", f"is {stated}, and the counts give {follows}"))
        if derived.accept_length < NEAR_DEAD:
            found.append(("acceptance.accept_length", f"is {derived.accept_length}; {NEAR_DEAD:.2f} is the least"))
        if self.throughput is not None:
            found += self.throughput.faults()
        return found

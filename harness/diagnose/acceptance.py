"""What acceptance figures say: how many draft tokens a step accepts, whatever the release calls an accept rate.

SGLang's logged accept rate counts the root up to 0.5.10.post1: accept length / num_draft_tokens, so that a dead drafter
reads 1 / (K + 1), 0.20 for five (`scheduler_metrics_mixin.py` of 0.5.5.post3, 0.5.8, 0.5.9, 0.5.10.post1; none is
logged by 0.5.3 and before). From 0.5.12 on it is accepted drafts / proposed drafts, and a dead drafter reads 0.00
(`scheduler_metrics_mixin.py` of 0.5.12, `metrics_reporter.py` of 0.5.15, 0.5.20 and 0.5.23). vLLM's is of that kind,
too (`v1/spec_decode/metrics.py`, 0.11.2 to 0.32.0).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from harness.diagnose.symptoms import OFF, Fact, Symptoms
from harness.measure.acceptance import DEAD_ACCEPT_LENGTH, DEAD_MIN_STEPS

__all__ = ["UNLEARNT", "Acceptance", "State", "prints_like", "read"]

_ROOT_FIRST, _ROOT_LAST, _DRAFTS_FIRST = Version("0.5.5.post3"), Version("0.5.10.post1"), Version("0.5.12")
_UNREAD_FIRST, _UNREAD_LAST = Version("0.5.4"), Version("0.5.11")
"""Releases at the borders, which were not read: their rate may be either."""
_PRINTED = 0.005
"""Half a unit of the last digit that engines print of a length or a rate."""

TRAINED_SHARE = 0.5
"""A drafter that accepts less at its first position than this share of its step-0 accuracy is weak. A rule of thumb:
training text is not the text that is served."""

UNLEARNT = 0.3
"""Step-0 accuracy below which a drafter has not learnt to predict, and which therefore promises nothing. A rule of
thumb."""

NEARLY_ALL = 0.9
"""Share of drafts accepted above which there is nothing to look for."""


class State(enum.StrEnum):
    """What becomes of drafts."""

    DEAD = "dead"
    """Practically none is accepted."""
    WEAK = "weak"
    """Fewer than the training, or the pair's threshold, promises."""
    SOME = "some"
    """Some are accepted; nothing says how many were to be expected."""
    EXPECTED = "expected"
    """As many as the training, or the pair's threshold, promises."""
    OFF = "off"
    """The server does not speculate."""
    AMBIGUOUS = "ambiguous"
    """The figures mean one thing in some releases and another in others, and the release is not known."""
    CONTRADICTORY = "contradictory"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """How the figures are to be read. `length` is tokens per step, None where it is not known; `k` drafts per step.

    `counts_root`: what the rate is, where it fits the length in one meaning only; that dates the release.

    `step_cost` is the time of a speculative step over that of a plain one: the accept length at which speculation
    breaks even. `notes` say how it was read, `problems` why it could not be.
    """

    state: State
    length: float | None = None
    k: int | None = None
    counts_root: bool | None = None
    speedup: float | None = None
    step_cost: float | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def slow(self) -> bool:
        """Whether speculation is known to cost more than it brings."""
        return self.speedup is not None and self.speedup < 1

    @property
    def accepted(self) -> bool:
        """Whether drafts are known to be accepted. `UNKNOWN`, after a few steps, is neither that nor `DEAD`."""
        return self.length is not None and self.length >= DEAD_ACCEPT_LENGTH


@dataclasses.dataclass(frozen=True)
class _Reading:
    k: int
    counts_root: bool

    def rate(self, length: float) -> float:
        return length / (self.k + 1) if self.counts_root else (length - 1) / self.k

    def length(self, rate: float) -> float:
        return rate * (self.k + 1) if self.counts_root else 1 + rate * self.k

    def __str__(self) -> str:
        return f"accept length / {self.k + 1}" if self.counts_root else f"accepted / {self.k} proposed drafts"


def prints_like(engine: str, version: str, *, counts_root: bool) -> bool:
    """Whether a release may print a rate of this kind."""
    if engine != "sglang":
        return not counts_root
    return (_UNREAD_FIRST <= Version(version) <= _UNREAD_LAST) if counts_root else Version(version) >= _UNREAD_LAST


def read(symptoms: Symptoms) -> Acceptance:
    """Read the figures. No figure is guessed: what has two meanings is `AMBIGUOUS`, what has none `CONTRADICTORY`."""
    k, notes = _k(symptoms)
    found = _length(symptoms, k)
    length, reading = found.length, found.reading
    notes = (*notes, *found.notes)
    if k is None and reading is None and length is not None and symptoms.accept_rate is not None:
        notes = (*notes, _k_from(length, symptoms.accept_rate.value))
    k = reading.k if reading is not None else k
    state, note = (found.state, "") if found.state else _state(symptoms, length, k)
    notes = (*notes, note)
    speedup = _speedup(symptoms)
    cost = length / speedup if length is not None and speedup else None
    if speedup is not None:
        notes = (*notes, _cost_note(symptoms, speedup, cost, length, k))
    counts_root = reading.counts_root if reading is not None else None
    return Acceptance(state, length, k, counts_root, speedup, cost, tuple(filter(None, notes)), found.problems)


def _k(symptoms: Symptoms) -> tuple[int | None, tuple[str, ...]]:
    flag = symptoms.flag_tokens
    if flag is None:
        return None, ()
    if symptoms.engine is None:
        text = f"K = {flag.value - 1} on SGLang, whose flag counts the root, and K = {flag.value} on vLLM"
        return None, (f"{flag.value} draft tokens are {text}: the engine is not known",)
    if symptoms.engine.value == "sglang":
        return flag.value - 1, (
            f"K = {flag.value - 1}: SGLang's {flag.value} draft tokens count the root ({flag.source})",
        )
    return flag.value, (f"K = {flag.value} ({flag.source})",)


def _meanings(symptoms: Symptoms) -> tuple[bool, ...]:
    """Return whether the rate may count the root; both where the release does not decide it."""
    if symptoms.engine is not None and symptoms.engine.value == "vllm":
        return (False,)
    try:
        version = Version(symptoms.version.value) if symptoms.engine and symptoms.version else None
    except InvalidVersion:
        version = None
    if version is not None and version >= _DRAFTS_FIRST:
        return (False,)
    if version is not None and _ROOT_FIRST <= version <= _ROOT_LAST:
        return (True,)
    return (True, False)


@dataclasses.dataclass(frozen=True)
class _Found:
    """What length and rate give together; `state` where they alone decide it, `reading` where only one fits."""

    length: float | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    state: State | None = None
    reading: _Reading | None = None


def _length(symptoms: Symptoms, k: int | None) -> _Found:
    """Put length and rate together."""
    length, rate = symptoms.accept_length, symptoms.accept_rate
    if symptoms.algorithm is not None and symptoms.algorithm.value == OFF:
        given = length or rate
        if given is None:
            return _Found(state=State.OFF)
        text = (
            f"the server does not speculate ({symptoms.algorithm.source}), and yet there are figures ({given.source})"
        )
        return _Found(problems=(text,), state=State.CONTRADICTORY)
    ks = [k] if k is not None else []
    if k is None and symptoms.flag_tokens is not None:
        ks = [each for each in (symptoms.flag_tokens.value - 1, symptoms.flag_tokens.value) if each > 0]
    readings = [_Reading(each, root) for each in ks for root in _meanings(symptoms)]
    if length is not None:
        top = max(ks) + 1 if ks else None
        if top is not None and length.value > top + _PRINTED:
            text = (
                f"accept length {length.value:.2f} ({length.source}), but a step of K = {top - 1} gives {top} at most"
            )
            return _Found(problems=(text,), state=State.CONTRADICTORY)
        return _checked(symptoms, length.value, readings)
    return _from_rate(rate, readings) if rate is not None else _Found()


def _from_rate(rate: Fact[float], readings: Sequence[_Reading]) -> _Found:
    """Return the length that a rate alone means."""
    if not readings:
        problem = f"an accept rate of {rate.value:.2f} says nothing without the number of draft tokens"
        return _Found(problems=(problem,), state=State.AMBIGUOUS)
    possible = {reading: reading.length(rate.value) for reading in readings}
    possible = {reading: found for reading, found in possible.items() if found >= 1 - 0.01 * (reading.k + 1)}
    if not possible:
        return _Found(
            problems=(f"accept rate {rate.value:.2f} ({rate.source}) is below 1/(K + 1)",), state=State.CONTRADICTORY
        )
    lengths = [max(found, 1.0) for found in possible.values()]
    text = "; ".join(
        f"as {reading} it is an accept length of {max(found, 1.0):.2f}" for reading, found in possible.items()
    )
    note = f"accept rate {rate.value:.2f} ({rate.source}): {text}"
    if max(lengths) - min(lengths) > 0.05:
        return _Found(problems=(f"{note}; the release decides which, and it is not known",), state=State.AMBIGUOUS)
    return _Found(lengths[0], (note,))


def _checked(symptoms: Symptoms, length: float, readings: Sequence[_Reading]) -> _Found:
    rate = symptoms.accept_rate
    if rate is None or not readings:
        return _Found(length)
    fitting = [each for each in readings if abs(each.rate(length) - rate.value) <= _PRINTED * (1 + 1 / each.k) + 1e-9]
    if fitting:
        zero = f", and {fitting[0].rate(1.0):.2f} is zero drafts accepted" if length < DEAD_ACCEPT_LENGTH else ""
        only = fitting[0] if len(fitting) == 1 else None
        return _Found(length, (f"accept rate {rate.value:.2f} is {fitting[0]}{zero}",), reading=only)
    wanted = " or ".join(dict.fromkeys(f"{each.rate(length):.2f} ({each})" for each in readings))
    pair = f"accept length {length:.2f} and accept rate {rate.value:.2f}"
    text = f"{pair} do not belong together: the rate would be {wanted}"
    return _Found(problems=(text,), state=State.CONTRADICTORY)


def _k_from(length: float, rate: float) -> str:
    """Say which K would make a length and a rate belong together."""
    if rate <= 0:
        return ""
    found = []
    for k, text in ((length / rate - 1, "if the rate counts the root"), ((length - 1) / rate, "if it does not")):
        if k > 0.5 and abs(k - round(k)) < 0.02 * max(k, 1):
            found.append(f"K = {round(k)} {text}")
    return f"by length and rate {', '.join(found)}" if found else ""


def _dead(symptoms: Symptoms, length: float) -> tuple[State, str]:
    if symptoms.steps is not None and symptoms.steps.value < DEAD_MIN_STEPS:
        few = f"accept length {length:.2f}, over {symptoms.steps.value} verify steps only"
        return State.UNKNOWN, f"{few}: a drafter is called dead after {DEAD_MIN_STEPS}"
    return State.DEAD, f"accept length {length:.2f}: practically no draft is accepted"


def _state(symptoms: Symptoms, length: float | None, k: int | None) -> tuple[State, str]:
    if length is None:
        return State.UNKNOWN, ""
    if length < DEAD_ACCEPT_LENGTH:
        return _dead(symptoms, length)
    for finding in symptoms.findings:
        if finding.code in ("ACC020", "ACC030") and finding.verdict in ("PASS", "FAIL"):
            state = State.EXPECTED if finding.verdict == "PASS" else State.WEAK
            return state, f"accept length {length:.2f}; {finding.code} is {finding.verdict} ({finding.source})"
    accuracy = symptoms.training_accuracy
    if accuracy is not None and accuracy.value >= UNLEARNT:
        promised = 1 + TRAINED_SHARE * accuracy.value
        state = State.EXPECTED if length >= promised else State.WEAK
        return state, (
            f"accept length {length:.2f}; a step-0 accuracy of {accuracy.value:.1%} promises {promised:.2f} or more "
            "(by half of it, a rule of thumb)"
        )
    if k is not None and length - 1 >= NEARLY_ALL * k:
        return State.EXPECTED, f"accept length {length:.2f} of at most {k + 1}: nearly every draft is accepted"
    return State.SOME, f"accept length {length:.2f}; what it should be is not known"


def _speedup(symptoms: Symptoms) -> float | None:
    if symptoms.tokens_per_second is None or symptoms.plain_tokens_per_second is None:
        return None
    return symptoms.tokens_per_second.value / symptoms.plain_tokens_per_second.value


def _cost_note(symptoms: Symptoms, speedup: float, cost: float | None, length: float | None, k: int | None) -> str:
    with_, without = symptoms.tokens_per_second, symptoms.plain_tokens_per_second
    if with_ is None or without is None:
        return ""
    text = f"{with_.value:g} tokens/s with speculation, {without.value:g} without: {speedup:.2f}x"
    if cost is None or length is None:
        return text
    text += (
        f"; a speculative step takes {cost:.2f} plain steps, so speculation pays above an accept length of {cost:.2f}"
    )
    if k is not None:
        text += (
            f" (at most {k + 1} with K = {k})" if cost <= k + 1 else f", which K = {k} can never give (at most {k + 1})"
        )
    return text

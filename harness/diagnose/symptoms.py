"""What is known about a server that speculates badly, each fact with its source; and where sources contradict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["OFF", "Fact", "RecordFinding", "Symptoms", "merge", "release"]

T = TypeVar("T")

OFF = "none"
"""`Symptoms.algorithm` of a server that does not speculate."""


@dataclasses.dataclass(frozen=True)
class Fact(Generic[T]):
    """A value, and who says so."""

    value: T
    source: str


def release(version: str, source: str) -> Fact[str] | None:
    """Return a release by its public version, None for no text.

    A build says more of itself after a plus sign (PEP 440): vLLM's wheels for CUDA 12.9 log `0.32.0+cu129`.
    """
    public = version.partition("+")[0]
    return Fact(public, source) if public else None


@dataclasses.dataclass(frozen=True)
class RecordFinding:
    """A finding of a run record: its code, its verdict (`PASS`, `FAIL`, ...), what was seen, and the remedy."""

    code: str
    verdict: str
    summary: str
    actual: str
    remedy: str
    source: str


@dataclasses.dataclass(frozen=True)
class Symptoms:
    """Facts; None where nobody says anything.

    `engine` is `sglang` or `vllm`. `algorithm` is the method as the engine's flag names it, in lower case (`eagle`,
    `eagle3`), or `OFF`. `flag_tokens` is the engine's own flag: SGLang's `--speculative-num-draft-tokens`, which counts
    the root (K + 1), or vLLM's `num_speculative_tokens` (K). `accept_length` in tokens per verify step, with the
    target's own, over so many verify `steps`; `accept_rate` a fraction whose meaning depends on the release. Speeds in
    output tokens per second. `trained_on`: engines on whose hidden states the drafter was trained, retrainings that
    changed nothing included. `simulated`: why acceptance looks simulated. `graphs`: whether CUDA graphs are on.
    """

    engine: Fact[str] | None = None
    version: Fact[str] | None = None
    algorithm: Fact[str] | None = None
    flag_tokens: Fact[int] | None = None
    accept_length: Fact[float] | None = None
    steps: Fact[int] | None = None
    accept_rate: Fact[float] | None = None
    tokens_per_second: Fact[float] | None = None
    plain_tokens_per_second: Fact[float] | None = None
    training_accuracy: Fact[float] | None = None
    trained_on: Fact[tuple[str, ...]] | None = None
    simulated: Fact[str] | None = None
    graphs: Fact[bool] | None = None
    findings: tuple[RecordFinding, ...] = ()


def _same(one: Any, other: Any) -> bool:
    return bool(one == other)


def _close(one: float, other: float) -> bool:
    """Whether two measurements of one server agree: windows and prompts differ, a factor of 1.1 does not matter."""
    return abs(one - other) <= 0.1 * max(abs(one), abs(other)) + 0.005


_AGREE: dict[str, Callable[[Any, Any], bool]] = {
    "accept_length": _close,
    "accept_rate": _close,
    "tokens_per_second": _close,
    "plain_tokens_per_second": _close,
}


def merge(parts: Sequence[Symptoms]) -> tuple[Symptoms, tuple[str, ...]]:
    """Return all facts together, and what contradicts what. A fact that is contradicted is taken as not known."""
    found: dict[str, Any] = {}
    contradictions = []
    for field in dataclasses.fields(Symptoms):
        if field.name in ("findings", "steps"):  # below
            continue
        facts = [fact for part in parts if (fact := getattr(part, field.name)) is not None]
        agree = _AGREE.get(field.name, _same)
        against = next((fact for fact in facts[1:] if not agree(facts[0].value, fact.value)), None)
        if against is not None:
            name = field.name.replace("_", " ")
            contradictions.append(
                f"{name} is {facts[0].value} ({facts[0].source}) and {against.value} ({against.source})"
            )
        elif facts:
            found[field.name] = facts[0]
    findings = tuple(finding for part in parts for finding in part.findings)
    length = found.get("accept_length")
    steps = next((part.steps for part in parts if length is not None and part.accept_length is length), None)
    return Symptoms(**found, steps=steps, findings=findings), tuple(contradictions)

"""What the history keeps of a run: who was measured, what was concluded, and the main figures.

Figures, by suite:

- acceptance: `accept_length` (tokens per verify step, 1 to K + 1), `acceptance.N` (share of verify steps that accepted
  draft position N, from 0)
- throughput: `speed_up.C` (output tokens per second with speculation over without, at concurrency C)
- startup: `startup_s.spec`, `startup_s.plain` (seconds to readiness)

A judgement that is INVALID gives none: what it measured shows nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from harness.errors import UsageError
from harness.report.record import read as read_record
from harness.report.record import record_path
from harness.verdict import Verdict, worst

__all__ = ["Case", "Figure", "Run", "Suite", "decode", "load", "read"]

_ALPHA = 0.05
"""Error of each bound of a speed-up, as in judging (docs/judging.md)."""

_Shape = TypeVar("_Shape")
_Seconds = Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number of a suite, with its two-sided 90 % interval where it is an estimate."""

    name: str
    value: float
    lower: float | None = None
    upper: float | None = None


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite's verdict on a case, the codes of its findings that are not PASS, and its figures."""

    name: str
    verdict: Verdict
    red: tuple[str, ...]
    figures: tuple[Figure, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of a run. What is empty or None was not known: the case could not be made.

    `measured_in` is the run that measured it, with its own start, machine and draftgate: another one than the run that
    holds it where that is a merged one.
    """

    name: str
    measured_in: str
    started: str
    draftgate: str
    machine: str
    pair: str = ""
    engine: str = ""
    version: str = ""
    runner: str = ""
    device: str = ""
    k: int | None = None
    target: str = ""
    drafter: str = ""
    prompts: str = ""
    suites: tuple[Suite, ...] = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """A run. `digest` is of its record's bytes; `machine` is JSON; times are UTC, ISO 8601."""

    id: str
    digest: str
    started: str
    finished: str
    complete: bool
    verdict: Verdict
    draftgate: str
    machine: str
    cases: tuple[Case, ...]


class _Pair(msgspec.Struct, frozen=True):
    name: str
    k: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class _Engine(msgspec.Struct, frozen=True):
    engine: str
    version: str


class _Digest(msgspec.Struct, frozen=True):
    digest: str


class _Finding(msgspec.Struct, frozen=True):
    code: str
    verdict: Verdict


class _Judgement(msgspec.Struct, frozen=True):
    suite: str
    verdict: Verdict
    findings: list[_Finding]
    measurements: dict[str, Any] = {}


class _Case(msgspec.Struct, frozen=True):
    id: str
    judgements: list[_Judgement]
    run: str = ""
    pair: _Pair | None = None
    engine: _Engine | None = None
    runner_asked: str = ""
    device: str = ""
    target: _Digest = _Digest("")
    drafter: _Digest = _Digest("")
    prompts: _Digest = _Digest("")


class _Shard(msgspec.Struct, frozen=True):
    run: str
    started: str
    draftgate: str
    machine: dict[str, Any]


class _Record(msgspec.Struct, frozen=True):
    draftgate: str
    complete: bool
    verdict: Verdict
    started: str
    cases: list[_Case]
    machine: dict[str, Any] = {}
    finished: str = ""
    merged: list[_Shard] = []


class _Totals(msgspec.Struct, frozen=True):
    drafts: _Count
    accepted: _Count
    per_position: list[_Count]


class _Interval(msgspec.Struct, frozen=True):
    lower: float | None = None
    upper: float | None = None


class _Acceptance(msgspec.Struct, frozen=True):
    totals: _Totals
    accept_length: _Interval | None = None


class _Request(msgspec.Struct, frozen=True):
    tokens: _Count


class _Round(msgspec.Struct, frozen=True):
    concurrency: _Count
    speculative: bool
    pair: int | None
    seconds: _Seconds
    requests: list[_Request]


class _Throughput(msgspec.Struct, frozen=True):
    rounds: list[_Round]


class _Server(msgspec.Struct, frozen=True):
    started_in_s: _Seconds


class _Startup(msgspec.Struct, frozen=True):
    servers: dict[str, _Server]


def load(run: Path) -> tuple[dict[str, Any], str]:
    """Return a run's record as plain data, and the digest of its bytes. Raises UsageError as `record.read` does."""
    record, text = read_record(run)
    return record, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def decode(path: Path, data: Any, shape: type[_Shape], where: str = "") -> _Shape:
    """Return `data` of the record `path` as `shape`. Raises UsageError that names the key that does not fit."""
    try:
        return msgspec.convert(data, shape)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: is no run record: {where}{error}", remedy="give the record.json of a run of this draftgate"
        ) from error


def read(run: Path) -> Run:
    """Return what the history keeps of a run, named by its folder or its record.

    Raises:
        UsageError: see `load`; or the record is not of a record's shape.

    """
    path = record_path(run)
    data, digest = load(path)
    record = decode(path, data, _Record)
    twice = [name for name, count in Counter(case.id for case in record.cases).items() if count > 1]
    if twice:
        raise UsageError(f"{path}: has case {twice[0]!r} twice", remedy="run the suites again")
    own = _Shard(path.resolve().parent.name, record.started, record.draftgate, record.machine)
    shards = {shard.run: shard for shard in record.merged}
    cases = []
    for case in record.cases:
        shard = shards.get(case.run, own)
        cases.append(
            Case(
                name=case.id,
                measured_in=shard.run,
                started=shard.started,
                draftgate=shard.draftgate,
                machine=_compact(shard.machine),
                pair=case.pair.name if case.pair else "",
                k=case.pair.k if case.pair else None,
                engine=case.engine.engine if case.engine else "",
                version=case.engine.version if case.engine else "",
                runner=case.runner_asked,
                device=case.device,
                target=case.target.digest,
                drafter=case.drafter.digest,
                prompts=case.prompts.digest,
                suites=tuple(_suites(path, case)),
            )
        )
    return Run(
        own.run, digest, record.started, record.finished, record.complete, record.verdict, record.draftgate,
        _compact(record.machine), tuple(cases),
    )  # fmt: skip


def _compact(machine: Mapping[str, Any]) -> str:
    return json.dumps(machine, sort_keys=True)


def _suites(path: Path, case: _Case) -> Iterator[Suite]:
    for name in dict.fromkeys(judgement.suite for judgement in case.judgements):
        judgements = [judgement for judgement in case.judgements if judgement.suite == name]
        figures: dict[str, Figure] = {}
        for judgement in judgements:
            if judgement.verdict is not Verdict.INVALID and name in _FIGURES:
                where = f"case {case.id!r}, measurements of {name}: "
                for figure in _FIGURES[name](path, judgement.measurements, where):
                    if math.isfinite(figure.value):
                        figures[figure.name] = figure
        yield Suite(
            name,
            worst([judgement.verdict for judgement in judgements]),
            tuple(dict.fromkeys(f.code for judgement in judgements for f in judgement.findings if f.verdict != "PASS")),
            tuple(figures.values()),
        )


def _acceptance(path: Path, measured: Mapping[str, Any], where: str) -> Iterator[Figure]:
    if "totals" not in measured:
        return
    run = decode(path, measured, _Acceptance, where)
    drafts = run.totals.drafts
    if drafts > 0:
        bounds = run.accept_length or _Interval()
        value = 1 + run.totals.accepted / drafts
        yield Figure("accept_length", value, bounds.lower, bounds.upper)
        for position, accepted in enumerate(run.totals.per_position):
            yield Figure(f"acceptance.{position}", accepted / drafts)


def _throughput(path: Path, measured: Mapping[str, Any], where: str) -> Iterator[Figure]:
    if "rounds" not in measured:
        return
    from harness.measure.statistics import mean_bounds  # noqa: PLC0415 -- imports numpy

    speeds: dict[int, dict[int, dict[bool, float]]] = {}
    for each in decode(path, measured, _Throughput, where).rounds:
        tokens = sum(request.tokens for request in each.requests)
        if each.pair is not None and tokens > 0:
            sides = speeds.setdefault(each.concurrency, {}).setdefault(each.pair, {})
            sides[each.speculative] = tokens / each.seconds
    for concurrency, pairs in speeds.items():
        ratios = [math.log(sides[True] / sides[False]) for sides in pairs.values() if len(sides) == 2]
        if len(ratios) >= 2:
            bounds = mean_bounds(ratios, _ALPHA)
            yield Figure(f"speed_up.{concurrency}", *map(_exp, (bounds.estimate, bounds.lower, bounds.upper)))


def _exp(logarithm: float) -> float:
    """Return e to that power, within what a float holds: two rounds that have little in common bound nothing."""
    return math.exp(min(logarithm, 700.0))


def _startup(path: Path, measured: Mapping[str, Any], where: str) -> Iterator[Figure]:
    if "servers" not in measured:
        return
    for label, server in decode(path, measured, _Startup, where).servers.items():
        yield Figure(f"startup_s.{label.rpartition('-')[2]}", server.started_in_s)


_FIGURES: dict[str, Callable[[Path, Mapping[str, Any], str], Iterator[Figure]]] = {
    "acceptance": _acceptance,
    "throughput": _throughput,
    "startup": _startup,
}

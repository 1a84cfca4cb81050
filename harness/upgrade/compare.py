"""Old against new: everything that was recorded of one pair under two versions of an engine, topic by topic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness.errors import EvidenceError
from harness.report.table import UPGRADE
from harness.upgrade import (
    acceptance,
    config,
    coverage,
    environment,
    features,
    figures,
    identity,
    outputs,
    surface,
    verdicts,
)
from harness.upgrade.model import Compared, Context, lost
from harness.upgrade.recorded import Side, at, need
from harness.verdict import Finding, Judgement, Verdict

__all__ = ["compare", "compare_records"]


@dataclasses.dataclass(frozen=True)
class _Topic:
    """What to take from each side (raises EvidenceError naming what is not there), and how to judge the two."""

    read: Callable[[Side], Any]
    judge: Callable[[Any, Any, Context], Compared]


_IDENTITY = _Topic(identity.read, identity.judge)
_TOPICS = (
    _Topic(coverage.read, coverage.judge),
    _Topic(config.read, config.judge),
    _Topic(features.read, features.judge),
    _Topic(acceptance.read, acceptance.judge),
    _Topic(outputs.read, outputs.judge),
    _Topic(surface.read, surface.judge),
    _Topic(figures.read, figures.judge),
    _Topic(environment.read_packages, environment.judge_packages),
    _Topic(environment.read_startup, environment.judge_startup),
    _Topic(verdicts.read, verdicts.judge),
)


def compare(old_case: Mapping[str, Any], new_case: Mapping[str, Any]) -> Judgement:
    """Judge a case of the new version against the same case of the old one.

    Both are cases as `record.json` holds them (docs/record.md), with the record's `machine`, as `RunFolder.read_case`
    returns them. What is worse is FAIL, what only one side has seen is INVALID, what is merely different is in
    `measurements["changes"]`. Cases that are not of the same pair, prompts, checkpoints and device are INVALID, and
    nothing else is looked at.
    """
    old, new = Side(old_case), Side(new_case)
    try:
        versions, context = _context(old, new)
    except _LackingError as error:
        return Judgement(UPGRADE, (lost(error.side, error.what),))
    same = _compared(_IDENTITY, old, new, context)
    done = [same]
    if all(finding.verdict is Verdict.PASS for finding in same.findings):
        done += [_compared(topic, old, new, context) for topic in _TOPICS]
    changes = [dataclasses.asdict(change) for each in done for change in each.changes]
    findings = tuple(dict.fromkeys(finding for each in done for finding in each.findings))
    return Judgement(UPGRADE, findings, {**versions, "changes": changes})


class _LackingError(Exception):
    """One side (`side`) does not have `what`."""

    def __init__(self, side: str, what: str) -> None:
        super().__init__(what)
        self.side, self.what = side, what


def _read(take: Callable[[Side], Any], name: str, side: Side) -> Any:
    """Return what a topic takes from one side.

    A record that was cut or edited may hold anything: what a topic cannot read is missing, whatever it stumbles on.
    """
    try:
        return take(side)
    except EvidenceError as error:
        raise _LackingError(name, error.message) from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _LackingError(name, f"readable evidence ({type(error).__name__}: {error})") from error


def _compared(topic: _Topic, old: Side, new: Side, context: Context) -> Compared:
    sides, findings = [], []
    for name, side in (("old", old), ("new", new)):
        try:
            sides.append(_read(topic.read, name, side))
        except _LackingError as error:
            findings.append(lost(error.side, error.what))
    return Compared(tuple(findings)) if findings else topic.judge(sides[0], sides[1], context)


def _facts(side: Side) -> tuple[str, str, dict[str, str], bool, str]:
    return (
        need(side.case, "engine.engine", str),
        need(side.case, "engine.version", str),
        environment.read_packages(side),
        at(side.case, "pair.canary") is not None,
        need(side.case, "pair.dtype", str),
    )


def _context(old: Side, new: Side) -> tuple[dict[str, Any], Context]:
    engine, was, before, canary, dtype = _read(_facts, "old", old)
    _, now, after, _, _ = _read(_facts, "new", new)
    versions = {"engine": engine, "old": was, "new": now}
    return versions, Context(engine, was, now, canary, dtype, environment.suspects(before, after))


def compare_records(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Judgement]:
    """Judge each case of the new record against its partner in the old one; returns the judgements by case id.

    Partners have the same pair, engine, runner, device and side (of a run that has two itself). A case without one is
    INVALID, as are two of a kind, and records without a case.
    """
    sides = {"old": _cases(old), "new": _cases(new)}
    judged: dict[str, Judgement] = {}
    for key in dict.fromkeys([*sides["old"], *sides["new"]]):
        olds, news = sides["old"].get(key, []), sides["new"].get(key, [])
        name = " ".join(key)
        if len(olds) == len(news) == 1:
            judged[news[0].get("id", name)] = compare(olds[0], news[0])
        else:
            findings = tuple(_partners(name, {"old": len(olds), "new": len(news)}))
            judged[(news or olds)[0].get("id", name)] = Judgement(UPGRADE, findings)
    if not judged:
        judged["(no case)"] = Judgement(UPGRADE, (lost("old", "a case"), lost("new", "a case")))
    return judged


def _partners(name: str, counts: Mapping[str, int]) -> Iterator[Finding]:
    for side, count in counts.items():
        if count == 0:
            yield lost(side, f"the case {name}")
        elif count > 1:
            yield lost(side, f"one case {name} (it has {count})")


def _cases(record: Mapping[str, Any]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    # A case of a merged run was measured where its own run was.
    merged = [entry for entry in record.get("merged") or () if isinstance(entry, Mapping)]
    machines = {str(entry.get("run")): entry.get("machine") for entry in merged}
    for case in record.get("cases") or ():
        with_machine = {"machine": machines.get(str(case.get("run"))) or record.get("machine"), **case}
        names = []
        for path in ("pair.name", "engine.engine", "runner_asked", "device"):
            try:
                names.append(str(at(case, path)))
            except EvidenceError:
                names.append("?")
        found.setdefault((*names, *filter(None, [case.get("side")])), []).append(with_machine)
    return found

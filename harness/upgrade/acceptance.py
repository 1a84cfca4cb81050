"""How often drafts were accepted under two versions: of a canary count by count, of another pair as two figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from harness.errors import EvidenceError
from harness.measure.acceptance import position_cause
from harness.measure.endpoint import Counts
from harness.upgrade.model import Change, Compared, Context, Kind, lost, shown
from harness.upgrade.recorded import Side, at, judgements, measured, need
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The counts of every prompt, their sum, and whether they equal the oracle's (None: there is no oracle)."""

    prompts: Mapping[str, Counts]
    totals: Counts
    oracle: bool | None
    source: str


def read(side: Side) -> Facts:
    """Return the counts. Raises EvidenceError if there are none, or a canary was not held against its oracle."""
    found = measured(side, "acceptance")
    if found.get("broken_off"):
        raise EvidenceError(f"the whole measurement of acceptance ({found['broken_off']})")
    k = need(side.case, "pair.k", int)
    prompts = {need(row, "name", str): _counts(row, k) for row in need(found, "prompts", list)}
    oracle = None
    if at(side.case, "pair.canary") is not None:
        verdicts = [
            finding["verdict"]
            for item in judgements(side, "acceptance")
            for finding in at(item, "findings")
            if finding["code"] == "ACC020"
        ]
        if not verdicts:
            raise EvidenceError("the comparison with the canary's oracle (ACC020)")
        oracle = verdicts[0] == Verdict.PASS
    totals = _counts(need(found, "totals", dict), k)
    if totals != _sum(prompts.values()):
        raise EvidenceError("counts that add up (the totals are not the sum over the prompts)")
    if not totals.drafts:
        raise EvidenceError("a verify step (no draft was counted)")
    return Facts(prompts, totals, oracle, str(at(found, "source")))


def _counts(row: Mapping[str, Any], k: int) -> Counts:
    numbers = [at(row, name) for name in ("drafts", "draft_tokens", "accepted")]
    positions = need(row, "per_position", list)
    if len(positions) != k or not all(isinstance(each, int) for each in (*numbers, *positions)):
        raise EvidenceError(f"whole counts of {k} positions (it has {row})")
    return Counts(numbers[0], numbers[1], numbers[2], tuple(positions))


def _sum(counts: Collection[Counts]) -> Counts:
    numbers = [sum(getattr(each, name) for each in counts) for name in ("drafts", "draft_tokens", "accepted")]
    positions = tuple(map(sum, zip(*(each.per_position for each in counts), strict=True)))
    return Counts(numbers[0], numbers[1], numbers[2], positions)


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge a canary by equality; list both figures of another pair, which the live comparison judges.

    Codes: UPG030 a canary's counts, UPG031 the accept lengths of another pair, UPG002 a prompt that one side lacks.
    """
    findings = [
        lost("new" if name in old.prompts else "old", f"the counts of prompt {name!r}")
        for name in sorted(old.prompts.keys() ^ new.prompts.keys())
    ]
    apart = [name for name in old.prompts if name in new.prompts and old.prompts[name] != new.prompts[name]]
    was, now = _text(old.totals), _text(new.totals)
    changes: tuple[Change, ...] = ()
    if old.oracle is None or new.oracle is None:
        if was != now:
            changes = (Change("acceptance", Kind.DIFFERENT, "counts", was, now),)
        findings.append(
            Finding(
                "UPG031",
                Verdict.PASS,
                f"accept length {new.totals.accept_length:.3f}, {old.totals.accept_length:.3f} before",
                expected=was,
                actual=now,
                n=len(new.prompts),
                source=f"{new.source}; listed here, judged where both versions answer the same prompts in turn",
            )
        )
        return Compared(tuple(findings), changes)
    if apart and old.oracle and new.oracle:
        text = f"a comparison with the canary's oracle that can be right: both sides equal it, and {apart[0]!r} differs"
        return Compared((*findings, lost("old", text), lost("new", text)))
    worse = bool(apart) and not new.oracle and (old.oracle or new.totals.accepted < old.totals.accepted)
    if apart:
        kind = Kind.WORSE if worse else Kind.BETTER if new.oracle else Kind.DIFFERENT
        changes = (Change("acceptance", kind, f"counts of {shown(apart)}", was, now),)
    if worse:
        first = apart[0]
        before, after = old.prompts[first], new.prompts[first]
        findings.append(
            Finding(
                "UPG030",
                Verdict.FAIL,
                f"the canary is accepted otherwise: accept length {new.totals.accept_length:.3f}, "
                f"{old.totals.accept_length:.3f} before; {len(apart)} of {len(old.prompts)} prompts differ",
                expected=f"{was}; prompt {first!r}: {_text(before)}",
                actual=f"{now}; prompt {first!r}: {_text(after)}",
                n=new.totals.drafts,
                source=new.source,
                cause=context.cause(_where(before, after)),
                remedy="look at the findings on keys, config and layers first: they name what the drafter lost",
            )
        )
    elif not findings:
        text = "the canary is accepted as before" if not apart else "the canary's counts differ, and are not worse"
        findings.append(
            Finding("UPG030", Verdict.PASS, text, expected=was, actual=now, n=new.totals.drafts, source=new.source)
        )
    return Compared(tuple(findings), changes)


def _where(before: Counts, after: Counts) -> str:
    """Return what the first position says that is accepted in a smaller share of the steps than before."""
    pairs = enumerate(zip(before.per_position, after.per_position, strict=False))
    position = next((number for number, (was, now) in pairs if now * before.drafts < was * after.drafts), None)
    if position is None:
        return "no position is accepted more rarely: K, or what the engine counts, is not what it was"
    return position_cause(position)


def _text(counts: Counts) -> str:
    return f"{counts.drafts} drafts, {counts.accepted} accepted, per position {list(counts.per_position)}"

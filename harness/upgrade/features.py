"""What reaches the drafter under two versions: how wide, through its projection or not, from which target layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from harness.errors import EvidenceError
from harness.probe.facts import Capture, Proposal, Serving
from harness.upgrade.model import Change, Compared, Context, Kind, lost
from harness.upgrade.recorded import Side, concluded
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]

FINAL_NORM = "after the final norm"

Rank = tuple[int, int]
"""Data-parallel rank, rank."""


@dataclasses.dataclass(frozen=True)
class Fed:
    """What one rank's drafter was fed: of all proposals, the widths; for each slot, what its states equal in all."""

    proposals: int
    widths: tuple[int, ...]
    projected: tuple[int, ...]
    went_around: int
    passes: tuple[int, ...]
    slots: tuple[frozenset[str], ...]
    said: str
    classes: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """What each rank was fed, and what the aux_hidden suite made of it."""

    ranks: Mapping[Rank, Fed]
    right: Verdict


def read(side: Side) -> Facts:
    """Return what each rank was fed. Raises EvidenceError if a rank saw no proposal, or no layer was compared."""
    found = side.evidence
    if not found.servings:
        raise EvidenceError("evidence of a drafter at work")
    ranks = {}
    for serving in found.servings:
        captured = [proposal for proposal in serving.proposals if proposal.captures]
        if not captured:
            why = "; ".join(serving.unobserved) or f"{len(serving.proposals)} proposals"
            raise EvidenceError(f"the captured layers of rank {serving.place.rank} ({why})")
        ranks[serving.place.dp_rank, serving.place.rank] = _fed(serving, captured)
    return Facts(ranks, concluded(side, "aux_hidden"))


def _fed(serving: Serving, captured: Sequence[Proposal]) -> Fed:
    proposals = serving.proposals
    count = max(len(proposal.captures) for proposal in captured)
    return Fed(
        len(proposals),
        tuple(sorted({proposal.feature_width for proposal in proposals})),
        tuple(sorted({width for proposal in proposals for width in proposal.projection_widths})),
        serving.went_around,
        tuple(sorted({proposal.passes for proposal in proposals})),
        tuple(_slot(captured, number) for number in range(count)),
        f"asked the target for {serving.requested}, which declares {serving.declared}",
        f"{serving.proposer}, {serving.drafter_class}",
    )


def _slot(captured: Sequence[Proposal], number: int) -> frozenset[str]:
    """Return what one slot's states equal in every proposal; nothing if the proposals do not agree."""
    seen = [_equals(each.captures[number]) if number < len(each.captures) else frozenset[str]() for each in captured]
    return frozenset.intersection(*seen)


def _equals(capture: Capture) -> frozenset[str]:
    layers = {f"layer {layer}" for layer in capture.layers}
    return frozenset(layers | {FINAL_NORM} if capture.final_norm else layers)


def judge(was: Facts, now: Facts, context: Context) -> Compared:
    """Judge every rank, slot by slot. What changed from wrong to right, by the aux_hidden suite, is a repair.

    Codes: UPG020 another width, or the projection is newly bypassed or given another width; UPG021 a slot that is fed
    from another layer; UPG002 a rank, or a slot of the old version, of which nothing is known.
    """
    old, new = was.ranks, now.ranks
    repaired = was.right is Verdict.FAIL and now.right is Verdict.PASS
    findings = [
        lost("new" if rank in old else "old", f"the drafter at work on rank {rank[1]}")
        for rank in sorted(old.keys() ^ new.keys())
    ]
    changes: list[Change] = []
    for rank in sorted(old.keys() & new.keys()):
        before, after = old[rank], new[rank]
        where = f"rank {rank[1]}"
        unknown = [number for number, slot in enumerate(before.slots) if not slot]
        if unknown and not repaired:
            findings.append(lost("old", f"the layer that feeds slot {unknown[0]} on {where}"))
        layers = Compared(()) if unknown and not repaired else _layers(before, after, where, context)
        for done in (_width(before, after, where, context), layers):
            better = _mended(done, context) if repaired else done
            findings += better.findings
            changes += better.changes
        for what, said, says in (
            ("passes of the drafter per proposal", str(before.passes), str(after.passes)),
            ("proposer and drafter", before.classes, after.classes),
            ("what the engine says", before.said, after.said),
        ):
            if said != says:
                changes.append(Change("features", Kind.DIFFERENT, f"{where}: {what}", said, says))
    return Compared(tuple(findings), tuple(changes))


def _mended(done: Compared, context: Context) -> Compared:
    """Return what is otherwise than before as better than before."""
    text = f"was wrong in {context.old_version}, and is right"
    findings = tuple(
        each
        if each.verdict is Verdict.PASS
        else dataclasses.replace(each, verdict=Verdict.PASS, summary=f"{each.summary}; {text}", cause="", remedy="")
        for each in done.findings
    )
    return Compared(findings, tuple(dataclasses.replace(each, kind=Kind.BETTER) for each in done.changes))


def _width(before: Fed, after: Fed, where: str, context: Context) -> Compared:
    source = f"probe, {where}"
    was, now = (
        f"{list(each.widths)}, projection sees {list(each.projected)}"
        + (f", bypassed in {each.went_around} of {each.proposals} proposals" if each.went_around else "")
        for each in (before, after)
    )
    if before.projected and not after.projected and not after.went_around:
        return Compared((lost("new", f"what the projection is given on {where}"),))
    wrong = []
    if after.widths != before.widths:
        wrong.append(f"features of width {list(after.widths)} reach the drafter, {list(before.widths)} before")
    if after.went_around > before.went_around:
        wrong.append(f"the projection is bypassed in {after.went_around} of {after.proposals} proposals")
    elif before.projected and after.projected != before.projected:
        wrong.append(f"the projection is given {list(after.projected)}, {list(before.projected)} before")
    if not wrong:
        mended = (Change("features", Kind.BETTER, f"{where}: width", was, now),) if was != now else ()
        text = f"the features are as wide as before: {list(after.widths)}"
        return Compared((Finding("UPG020", Verdict.PASS, text, n=after.proposals, source=source),), mended)
    finding = Finding(
        "UPG020",
        Verdict.FAIL,
        "; ".join(wrong),
        expected=was,
        actual=now,
        n=after.proposals,
        source=source,
        cause=context.cause(
            f"{context.engine} {context.new_version} concatenates another number of layers, or takes the drafter for "
            "one that reads a single hidden state"
        ),
        remedy="check how the new version is told that this is EAGLE-3, and the layer ids in the drafter's config",
    )
    return Compared((finding,), (Change("features", Kind.WORSE, f"{where}: width", was, now),))


def _layers(before: Fed, after: Fed, where: str, context: Context) -> Compared:
    count = max(len(before.slots), len(after.slots))
    olds, news = (
        [fed.slots[number] if number < len(fed.slots) else None for number in range(count)] for fed in (before, after)
    )
    apart = [
        number
        for number, (was, now) in enumerate(zip(olds, news, strict=True))
        if was is None or now is None or not was & now
    ]
    source = f"probe, {where}: the states' values"
    if not apart:
        text = f"each of {count} slots is fed from the input of the same layer: {_shown(news)}"
        return Compared((Finding("UPG021", Verdict.PASS, text, n=after.proposals, source=source),))
    finding = Finding(
        "UPG021",
        Verdict.FAIL,
        f"the inputs of other target layers feed the drafter: {_shown(news)}, before {_shown(olds)}",
        expected=_shown(olds),
        actual=f"{_shown(news)}; the engine {after.said}",
        n=after.proposals,
        source=source,
        cause=context.cause(_shift(olds, news, context)),
        remedy="write the ids that the new version turns into these layers into the drafter's config (the aux_hidden "
        f"suite names them), or stay on {context.old_version}",
    )
    changes = tuple(
        Change("features", Kind.WORSE, f"{where}: slot {number}", _one(olds[number]), _one(news[number]))
        for number in apart
    )
    return Compared((finding,), changes)


def _shift(olds: Sequence[frozenset[str] | None], news: Sequence[frozenset[str] | None], context: Context) -> str:
    """Return what the change looks like: all slots moved by one number, another order, or neither."""
    engine = f"{context.engine} {context.new_version}"
    moves = [
        {int(b.split()[1]) - int(a.split()[1]) for a in was - {FINAL_NORM} for b in now - {FINAL_NORM}}
        for was, now in zip(olds, news, strict=True)
        if was and now
    ]
    common = set.intersection(*moves) if len(moves) == len(olds) else set()
    if common - {0}:
        return f"{engine} reads the ids otherwise: each layer is {min(common, key=abs):+d}"
    if sorted(map(_one, olds)) == sorted(map(_one, news)):
        return f"{engine} concatenates them in another order"
    if not any(news):
        return f"in {engine} the states are altered on the way, or come from elsewhere than the residual stream"
    return f"{engine} takes the layer ids from elsewhere, or falls back to its defaults"


def _one(slot: frozenset[str] | None) -> str:
    return "no slot" if slot is None else " or ".join(sorted(slot)) or "no layer"


def _shown(slots: Sequence[frozenset[str] | None]) -> str:
    """Return the slots as a drafter's config writes its ids, where each is one layer; else each in words."""
    words = [_one(slot) for slot in slots]
    if all(re.fullmatch(r"layer \d+", word) for word in words):
        return f"[{', '.join(word.removeprefix('layer ') for word in words)}]"
    return ", ".join(words)

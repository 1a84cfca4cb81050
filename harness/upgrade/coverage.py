"""Which checkpoint keys landed and which tensors were filled, on each rank, under two versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.errors import EvidenceError
from harness.gate.weights import Exceptions, State, borrowed, fates_of, load_exceptions, padding_of, state_of
from harness.probe.facts import Evidence, Fate, Parameter
from harness.upgrade.model import Change, Compared, Context, Kind, lost, shown
from harness.upgrade.recorded import Side
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]

_LANDED = (Fate.USED, Fate.READ)
_FILLED = (State.FILLED, State.EXCUSED)
_ROLES = ("target", "drafter")

Rank = tuple[str, int, int]
"""Role, data-parallel rank, rank."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """One model on one rank: each key's fate, each tensor, and what is known of it."""

    model_class: str
    fates: Mapping[str, Fate]
    from_files: frozenset[str]
    states: Mapping[str, State]
    tensors: Mapping[str, Parameter]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Every load of one side, and the reviewed exceptions of its version."""

    ranks: Mapping[Rank, Loaded]
    exceptions: Exceptions


def read(side: Side) -> Facts:
    """Return what was loaded, per role and rank. Raises EvidenceError naming what could not be followed."""
    found = side.evidence
    exceptions = load_exceptions(found.engine, found.engine_version)
    lent = borrowed(found)
    ranks: dict[Rank, Loaded] = {}
    for role in _ROLES:
        if not found.of(role):
            raise EvidenceError(f"a load of the {role}")
        for load in found.of(role):
            where = f"the {role}'s load on rank {load.place.rank}"
            if load.error or not load.tapped:
                raise EvidenceError(f"{where} ({load.error or '; '.join(load.limits) or 'not followed'})")
            if not any(key.in_files for key in load.keys):
                raise EvidenceError(f"keys of {where}")
            if not any(each.elements for each in load.parameters):
                raise EvidenceError(f"tensors of {where}")
            names = {name for each in load.parameters for name in (each.name, *each.aliases)}
            homeless = sorted({name for key in load.keys for name in key.landed} - names)
            if homeless:
                raise EvidenceError(f"the tensor {homeless[0]} in {where}, where a key landed")
            ranks[role, load.place.dp_rank, load.place.rank] = _loaded(found, role, load.place, exceptions, lent)
    return Facts(ranks, exceptions)


def _loaded(found: Evidence, role: str, place: Any, exceptions: Exceptions, lent: set[str]) -> Loaded:
    here = tuple(
        load for load in found.of(role) if (load.place.dp_rank, load.place.rank) == (place.dp_rank, place.rank)
    )
    tensors = {
        each.name: each for load in here for each in load.parameters if each.kind != "attribute" and each.elements
    }
    shared = lent if role == "drafter" else set()
    padding = padding_of(role, found.of(role), exceptions)
    return Loaded(
        here[0].model_class,
        fates_of(dataclasses.replace(found, loads=here), role),
        frozenset(key.name for load in here for key in load.keys if key.in_files),
        {name: state_of(role, each, exceptions, shared, padding.get(name, 0)) for name, each in tensors.items()},
        tensors,
    )


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge both roles on every rank.

    Codes: UPG010 keys that landed and no longer do, UPG011 tensors that are newly not filled (INVALID where that can
    no longer be told), UPG002 a rank or key that one side did not look at.
    """
    findings = [
        lost("new" if rank in old.ranks else "old", f"a load of the {rank[0]} on rank {rank[2]}")
        for rank in sorted(old.ranks.keys() ^ new.ranks.keys())
    ]
    changes: list[Change] = []
    for role in _ROLES:
        both = [(old.ranks[rank], new.ranks[rank]) for rank in sorted(old.ranks.keys() & new.ranks.keys())
                if rank[0] == role]  # fmt: skip
        if both:
            keys = _keys(role, both, new.exceptions, context)
            tensors = _tensors(role, both, context)
            findings += (*keys.findings, *tensors.findings)
            changes += (*keys.changes, *tensors.changes)
    return Compared(tuple(findings), tuple(changes))


def _keys(role: str, both: Sequence[tuple[Loaded, Loaded]], exceptions: Exceptions, context: Context) -> Compared:
    dropped: dict[str, str] = {}
    regained: set[str] = set()
    by_design: set[str] = set()
    unseen: set[str] = set()
    for before, after in both:
        unseen |= before.from_files ^ after.from_files
        for name in before.fates.keys() & after.fates.keys():
            was, now = before.fates[name], after.fates[name]
            if was in _LANDED and now not in _LANDED:
                if exceptions.reason(role, "key", name):
                    by_design.add(name)
                else:
                    dropped[name] = now.value
            elif was not in _LANDED and now in _LANDED:
                regained.add(name)
    topic = "keys"
    changes = (
        *(Change(topic, Kind.WORSE, f"{role}: {name}", "landed", fate) for name, fate in sorted(dropped.items())),
        *(Change(topic, Kind.BETTER, f"{role}: {name}", "landed nowhere", "landed") for name in sorted(regained)),
        *(
            Change(topic, Kind.DIFFERENT, f"{role}: {name}", "landed", "ignored by design")
            for name in sorted(by_design)
        ),
    )
    seen = len(set().union(*(before.fates for before, _ in both)))
    source = f"probe: {role}'s load_weights on {len(both)} rank(s)"
    findings = [
        lost("new" if any(name in before.from_files for before, _ in both) else "old", f"the {role}'s key {name}")
        for name in sorted(unseen)
    ]
    if dropped:
        findings.append(
            Finding(
                "UPG010",
                Verdict.FAIL,
                f"{len(dropped)} of {seen} keys of the {role} landed in {context.old_version} and no longer do: "
                + shown(sorted(dropped)),
                expected="every key lands that landed before",
                actual=shown([f"{name}: {fate}" for name, fate in sorted(dropped.items())]),
                n=seen,
                source=source,
                cause=context.cause(f"{context.engine} {context.new_version} knows these tensors by other names"),
                remedy="rename the keys to the dialect of the new version (`draftgate convert`), or stay on "
                f"{context.old_version}",
            )
        )
    elif not findings:
        text = f"every key of the {role} that landed before still lands"
        findings.append(Finding("UPG010", Verdict.PASS, text, n=seen, source=source))
    return Compared(tuple(findings), changes)


def _tensors(role: str, both: Sequence[tuple[Loaded, Loaded]], context: Context) -> Compared:
    unfilled: dict[str, Parameter] = {}
    unsure: set[str] = set()
    mended: set[str] = set()
    for before, after in both:
        for name, state in after.states.items():
            was = before.states.get(name)
            if state is State.LACKING and was is not State.LACKING:
                unfilled[name] = after.tensors[name]
            elif state is State.UNSURE and was is not State.UNSURE:
                unsure.add(name)
            elif state in _FILLED and was is State.LACKING:
                mended.add(name)
    seen = sum(len(after.states) for _, after in both)
    source = f"probe: the {role}'s tensors after load_weights on {len(both)} rank(s)"
    changes = (
        *(
            Change("tensors", Kind.WORSE, f"{role}: {name}", "filled or not there", f"{each.untouched} of "
                   f"{each.elements} elements as constructed")
            for name, each in sorted(unfilled.items())
        ),
        *(Change("tensors", Kind.BETTER, f"{role}: {name}", "not filled", "filled") for name in sorted(mended)),
        *_rebuilt(role, both),
    )  # fmt: skip
    if unfilled:
        finding = Finding(
            "UPG011",
            Verdict.FAIL,
            f"{len(unfilled)} tensors of the {role} are newly not filled: {shown(sorted(unfilled))}",
            expected="every tensor filled that was filled before, and every new one",
            actual=shown(
                [
                    f"{name} {list(each.shape)}: {each.written} of {each.elements} elements written"
                    for name, each in sorted(unfilled.items())
                ]
            ),
            n=seen,
            source=source,
            cause=context.cause(f"{context.engine} {context.new_version} builds or fills them otherwise"),
            remedy="look for them among the checkpoint's keys: rename them for the new version, or export again",
        )
    elif unsure:
        finding = Finding(
            "UPG011",
            Verdict.INVALID,
            f"whether {len(unsure)} tensors of the {role} are filled can no longer be told: {shown(sorted(unsure))}",
            n=seen,
            source=source,
            cause="the new version writes them in ways that cannot be counted",
            remedy="serve with the engine's default loader for this check; see the evidence for each tensor",
        )
    else:
        text = f"no tensor of the {role} is newly unfilled"
        finding = Finding("UPG011", Verdict.PASS, text, n=seen, source=source)
    return Compared((finding,), changes)


def _rebuilt(role: str, both: Sequence[tuple[Loaded, Loaded]]) -> Iterator[Change]:
    """Yield how the model is built otherwise: another class, tensors that came or went, or have another shape."""
    before, after = both[0]
    kind = Kind.DIFFERENT
    if before.model_class != after.model_class:
        yield Change("tensors", kind, f"{role}: model class", before.model_class, after.model_class)
    gone = sorted(before.tensors.keys() - after.tensors.keys())
    come = sorted(after.tensors.keys() - before.tensors.keys())
    if gone or come:
        yield Change("tensors", kind, f"{role}: tensors of the model", shown(gone), shown(come))
    for name in sorted(before.tensors.keys() & after.tensors.keys()):
        old, new = before.tensors[name], after.tensors[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            yield Change(
                "tensors", kind, f"{role}: {name}", f"{list(old.shape)} {old.dtype}", f"{list(new.shape)} {new.dtype}"
            )

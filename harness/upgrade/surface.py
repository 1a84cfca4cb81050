"""What the engine shows to dashboards and launch scripts under two versions: metrics, keys of answers, flags."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator, Mapping

from harness.engines.surface import Metric
from harness.errors import EvidenceError
from harness.upgrade.model import Change, Compared, Context, Kind, lost, shown
from harness.upgrade.recorded import Side, at, measured, need
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]

_SPECULATIVE = re.compile(r"(?:^|[:._-])spec(?:_|-|ulative)")
"""Names that are about speculation: vllm:spec_decode_..., sglang:spec_..., meta_info spec_..., --speculative-..."""

_NEAR = 0.75
"""How alike two names must be (difflib's ratio) for one to be named as what became of the other."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The metrics by name, and other names by where they stand."""

    metrics: Mapping[str, Metric]
    names: Mapping[str, frozenset[str]]


def read(side: Side) -> Facts:
    """Return what the speculative server showed. Raises EvidenceError if it was not read."""
    servers = need(measured(side, "startup"), "servers", dict)
    found = [facts["surface"] for label, facts in servers.items() if label.endswith("-spec") and "surface" in facts]
    if not found:
        raise EvidenceError("the surface of the speculative server (metrics, flags, keys of answers)")
    if "missing" in found[0]:
        raise EvidenceError(f"the surface of the speculative server ({found[0]['missing']})")
    metrics = {
        name: Metric(at(row, "type"), tuple(at(row, "labels")), at(row, "help"))
        for name, row in need(found[0], "metrics", dict).items()
    }
    if not any(map(_SPECULATIVE.search, metrics)):
        raise EvidenceError("metrics of speculation")
    places = need(found[0], "names", dict)
    return Facts(metrics, {place: frozenset(need(places, place, list)) for place in places})


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge the names that are about speculation, which draftgate and dashboards read; list all others.

    Codes: UPG050 a metric that vanished, is of another type or lost a label; UPG051 a flag, or a key of an answer, that
    vanished; UPG002 a list of names that one side lacks.
    """
    findings = [
        lost("new" if place in old.names else "old", f"the names in {place}")
        for place in sorted(old.names.keys() ^ new.names.keys())
    ]
    metrics = _vanished("UPG050", "metric", old.metrics.keys(), new.metrics.keys(), context)
    altered = _altered(old.metrics, new.metrics, context)
    findings += (*metrics.findings, *altered.findings)
    changes = [*metrics.changes, *altered.changes]
    for place in sorted(old.names.keys() & new.names.keys()):
        done = _vanished("UPG051", f"name in {place}", old.names[place], new.names[place], context)
        findings += done.findings
        changes += done.changes
    return Compared(tuple(findings), tuple(changes))


def _vanished(code: str, what: str, old: Collection[str], new: Collection[str], context: Context) -> Compared:
    gone, come = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    red = [name for name in gone if _SPECULATIVE.search(name)]
    near = {name: next(iter(_nearest(name, come, new)), "") for name in gone}
    changes = [
        Change("surface", Kind.WORSE if name in red else Kind.DIFFERENT, f"{what}: {name}", "there",
               f"gone; nearest: {near[name]}" if near[name] else "gone")
        for name in gone
    ]  # fmt: skip
    if come:
        changes.append(Change("surface", Kind.DIFFERENT, f"{what}: {len(come)} new", "", shown(come)))
    source = f"{what}, the speculative server after a generation"
    if not red:
        text = f"no {what} that is about speculation vanished"
        return Compared((Finding(code, Verdict.PASS, text, n=len(set(old)), source=source),), tuple(changes))
    finding = Finding(
        code,
        Verdict.FAIL,
        f"{len(red)} names about speculation vanished, {what}: {shown(red)}",
        expected=shown(red),
        actual=shown([f"nearest to {name}: {near[name] or 'nothing like it'}" for name in red]),
        n=len(set(old)),
        source=source,
        cause=context.cause(f"{context.engine} {context.new_version} renamed or removed them"),
        remedy="change dashboards, alerts and launch scripts first: an alert on a name that is gone stays silent",
    )
    return Compared((finding,), tuple(changes))


def _nearest(name: str, come: Collection[str], new: Collection[str]) -> Iterator[str]:
    """Yield what the name may have become: a new name first, else any that is there."""
    for names in (come, new):
        yield from difflib.get_close_matches(name, list(names), n=1, cutoff=_NEAR)


def _altered(old: Mapping[str, Metric], new: Mapping[str, Metric], context: Context) -> Compared:
    """Judge the metrics that are there on both sides, and do not mean the same."""
    changes: list[Change] = []
    red: list[str] = []
    for name in sorted(old.keys() & new.keys()):
        was, now = old[name], new[name]
        lacking, come = sorted(set(was.labels) - set(now.labels)), sorted(set(now.labels) - set(was.labels))
        worse = bool(_SPECULATIVE.search(name)) and (was.type != now.type or bool(lacking))
        if worse:
            red.append(name)
        for what, before, after in (
            ("type", was.type, now.type),
            ("labels that went and came,", ", ".join(lacking), ", ".join(come)),
            ("meaning", was.help, now.help),
        ):
            if before != after:
                kind = Kind.WORSE if worse and what != "meaning" else Kind.DIFFERENT
                changes.append(Change("surface", kind, f"{what} of metric {name}", before, after))
    if not red:
        return Compared((), tuple(changes))
    was, now = old[red[0]], new[red[0]]
    finding = Finding(
        "UPG050",
        Verdict.FAIL,
        f"{len(red)} metrics about speculation changed meaning: {shown(red)}",
        expected=f"{red[0]}: a {was.type} with labels {', '.join(was.labels) or 'none'}",
        actual=f"{red[0]}: a {now.type} with labels {', '.join(now.labels) or 'none'}",
        n=len(old),
        source="metric types and labels, the speculative server after a generation",
        cause=context.cause(f"{context.engine} {context.new_version} counts or groups them otherwise"),
        remedy="change the queries that use them first: rate() of a gauge, or a label that is gone, gives no error",
    )
    return Compared((finding,), tuple(changes))

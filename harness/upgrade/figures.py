"""What the engine's own acceptance figures mean under two versions."""

from __future__ import annotations

from collections.abc import Mapping

from harness.upgrade.model import Change, Compared, Context, Kind, lost, shown
from harness.upgrade.recorded import Side, at, measured, need
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]

Facts = Mapping[str, frozenset[str]] | None
"""The meanings that each figure can have, none if it is not understood; None if the pair does not ask for them."""


def read(side: Side) -> Facts:
    """Return what each figure can mean. Raises EvidenceError if the suite `metrics` was asked and did not find out."""
    if "metrics" in at(side.case, "not_asked"):
        return None
    can_mean = need(measured(side, "metrics"), "can_mean", dict)
    return {name: frozenset(at(can_mean, name)) for name in can_mean}


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge the figures that are understood of the old version; what only the new one has is listed.

    Codes: UPG052 a figure that cannot mean the same on both sides, or is gone; UPG002 if only one side was asked.
    """
    if old is None or new is None:
        sides = [side for side, facts in (("old", old), ("new", new)) if facts is None]
        return Compared(
            tuple(lost(side, "what the engine's figures mean") for side in sides) if len(sides) == 1 else ()
        )
    understood = sorted(name for name in old if old[name])
    red = [name for name in understood if not old[name] & new.get(name, frozenset())]
    fresh = sorted(name for name in new if new[name] and not old.get(name))
    changes = [
        Change("figures", kind, name, _words(old, name), _words(new, name))
        for kind, names in ((Kind.WORSE, red), (Kind.DIFFERENT, fresh))
        for name in names
    ]
    source = "the suite metrics: figures against the canary's own verify steps"
    if not understood:
        return Compared((lost("old", "an acceptance figure that is understood"),), tuple(changes))
    if not red:
        text = f"{len(understood)} acceptance figures mean the same"
        return Compared((Finding("UPG052", Verdict.PASS, text, n=len(understood), source=source),), tuple(changes))
    finding = Finding(
        "UPG052",
        Verdict.FAIL,
        f"{len(red)} acceptance figures mean something else, or nothing: {shown(red)}",
        expected=shown([f"{name}: {_words(old, name)}" for name in red]),
        actual=shown([f"{name}: {_words(new, name)}" for name in red]),
        n=len(understood),
        source=source,
        cause=context.cause(f"{context.engine} {context.new_version} counts otherwise"),
        remedy="change the dashboards and alerts that read them; do not compare their values across the upgrade",
    )
    return Compared((finding,), tuple(changes))


def _words(facts: Mapping[str, frozenset[str]], name: str) -> str:
    return " or ".join(sorted(facts[name])) or "not understood" if name in facts else "not there"

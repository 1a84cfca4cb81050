"""What the engine's own acceptance figures mean under two versions."""

from __future__ import annotations

from collections.abc import Mapping

from harness.upgrade.model import Change, Compared, Context, Kind, lost, shown
from harness.upgrade.recorded import Side, at, measured, need
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]

Facts = Mapping[str, frozenset[str]] | None
"""The meanings that each figure can have, by the figure's name; None if the pair does not ask for them."""


def read(side: Side) -> Facts:
    """Return what each figure can mean. Raises EvidenceError if the suite `metrics` was asked and did not find out."""
    if "metrics" in at(side.case, "not_asked"):
        return None
    can_mean = need(measured(side, "metrics"), "can_mean", dict)
    return {name: frozenset(need(can_mean, name, list)) for name in can_mean if can_mean[name] != []}


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge the figures that are understood on both sides; what only one side has or understands is listed.

    Codes: UPG052 a figure that cannot mean the same on both sides; UPG002 if only one side was asked.
    """
    if old is None or new is None:
        sides = [side for side, facts in (("old", old), ("new", new)) if facts is None]
        return Compared(
            tuple(lost(side, "what the engine's figures mean") for side in sides) if len(sides) == 1 else ()
        )
    both = sorted(old.keys() & new.keys())
    red = [name for name in both if not old[name] & new[name]]
    changes = [
        Change("figures", Kind.WORSE, name, " or ".join(sorted(old[name])), " or ".join(sorted(new[name])))
        for name in red
    ]
    for name in sorted(old.keys() ^ new.keys()):
        was, now = (" or ".join(sorted(facts[name])) if name in facts else "not there, or not understood"
                    for facts in (old, new))  # fmt: skip
        changes.append(Change("figures", Kind.DIFFERENT, name, was, now))
    source = "the suite metrics: figures against the canary's own verify steps"
    if not both:
        return Compared((lost("new", "an acceptance figure that is understood on both sides"),), tuple(changes))
    if not red:
        text = f"{len(both)} acceptance figures mean the same"
        return Compared((Finding("UPG052", Verdict.PASS, text, n=len(both), source=source),), tuple(changes))
    finding = Finding(
        "UPG052",
        Verdict.FAIL,
        f"{len(red)} acceptance figures mean something else: {shown(red)}",
        expected=shown([f"{name}: {' or '.join(sorted(old[name]))}" for name in red]),
        actual=shown([f"{name}: {' or '.join(sorted(new[name]))}" for name in red]),
        n=len(both),
        source=source,
        cause=context.cause(f"{context.engine} {context.new_version} counts otherwise"),
        remedy="change the dashboards and alerts that read them; do not compare their values across the upgrade",
    )
    return Compared((finding,), tuple(changes))

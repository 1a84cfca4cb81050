"""Are two cases of the same thing: pair, checkpoints, prompts, engine, runner and device."""

from __future__ import annotations

import dataclasses

from harness.errors import EvidenceError
from harness.pairs.model import Pair
from harness.upgrade.model import Compared, Context, shown
from harness.upgrade.recorded import Side, at, need
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]

_PATHS = {"source", "target", "drafter", "rebuild"}
"""Where a pair lies on one machine; the digests say what lies there."""

_SOFT = {"python", "system", "memory_bytes", "cores", "driver"}
"""Facts of a machine that may differ: nothing here is timed, and system and driver are listed with the packages."""

Facts = dict[str, str]


def read(side: Side) -> Facts:
    """Return, by name, what must be the same on both sides. Raises EvidenceError naming what the record lacks."""
    facts: Facts = {}
    for each in dataclasses.fields(Pair):
        value = at(side.case, f"pair.{each.name}")
        if each.name == "workload":
            if "prompts_file" not in value:
                raise EvidenceError("pair.workload.prompts_file")
            value = {name: entry for name, entry in value.items() if name != "prompts_file"}
        if each.name not in _PATHS:
            facts[f"pair.{each.name}"] = repr(value)
    for path in ("target.digest", "drafter.digest", "prompts.digest", "engine.engine", "runner_asked", "device"):
        facts[path] = need(side.case, path, str)
    need(side.case, "machine.cpu", str)
    facts |= {f"machine.{name}": repr(value) for name, value in at(side.case, "machine").items() if name not in _SOFT}
    return facts


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge whether the two can be compared at all.

    Code: UPG001, PASS or INVALID.
    """
    names = sorted(old | new)
    apart = [name for name in names if old.get(name) != new.get(name)]
    source = "record: pair, target, drafter, prompts, engine, runner_asked, device, machine"
    if not apart:
        return Compared(
            (
                Finding(
                    "UPG001",
                    Verdict.PASS,
                    f"{context.engine} {context.old_version} and {context.new_version} ran the same pair",
                    actual=f"{len(names)} facts are the same",
                    n=len(names),
                    source=source,
                ),
            )
        )
    first = apart[0]
    return Compared(
        (
            Finding(
                "UPG001",
                Verdict.INVALID,
                f"the two cases are not comparable: {shown(apart)}",
                expected=f"{first}: {old.get(first, 'nothing')}, as on the old side",
                actual=f"{first}: {new.get(first, 'nothing')}",
                n=len(names),
                source=source,
                cause="the two runs were not of the same pair, prompts, checkpoints and device",
                remedy="run both versions from one pairs file, on one machine",
            ),
        )
    )

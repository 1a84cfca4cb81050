"""Which keys of the drafter's config the engine reads, under two versions."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from harness.contracts.config import settings
from harness.errors import EvidenceError
from harness.gate.weights import load_exceptions
from harness.probe.facts import ConfigKey
from harness.upgrade.model import Change, Compared, Context, Kind, lost, shown
from harness.upgrade.recorded import Side
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The keys of the drafter's config by path, what they decide where they matter, and the keys asked for in vain."""

    keys: Mapping[str, ConfigKey]
    meanings: Mapping[str, str]
    absent: frozenset[str]


def read(side: Side) -> Facts:
    """Return the reads of the drafter's config. Raises EvidenceError if none was seen."""
    found = side.evidence
    if not any(key.read for key in found.config):
        raise EvidenceError("reads of the drafter's config")
    meanings = {key.path: rule.reason for rule in load_exceptions(found.engine, found.engine_version).config
                for key in found.config if rule.covers(key)}  # fmt: skip
    for setting in settings(_nested(found.config)):
        for key in found.config:
            if f".{key.path}".endswith(f".{setting.key}"):
                meanings.setdefault(key.path, setting.meaning)
    return Facts({key.path: key for key in found.config}, meanings, frozenset(each.path for each in found.absent))


def _nested(leaves: tuple[ConfigKey, ...]) -> dict[str, Any]:
    """Return the config that has these leaves."""
    config: dict[str, Any] = {}
    for leaf in leaves:
        *outer, last = leaf.path.split(".")
        part = config
        for name in outer:
            part = part.setdefault(name, {})
        part[last] = leaf.value
    return config


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge the keys that the old version read.

    Codes: UPG012 a key that changes what the drafter computes is newly ignored, UPG002 a key that one side lacks.
    """
    findings = [
        lost("new" if path in old.keys else "old", f"the config key {path}")
        for path in sorted(old.keys.keys() ^ new.keys.keys())
    ]
    both = sorted(old.keys.keys() & new.keys.keys())
    ignored = [path for path in both if old.keys[path].read and not new.keys[path].read]
    heeded = [path for path in both if new.keys[path].read and not old.keys[path].read]
    matters = {path: old.meanings.get(path) or new.meanings[path] for path in ignored
               if path in old.meanings or path in new.meanings}  # fmt: skip
    asked = sorted(new.absent - old.absent)
    changes = [
        *(
            Change("config", Kind.WORSE if path in matters else Kind.DIFFERENT, path, "read", "ignored")
            for path in ignored
        ),
        *(Change("config", Kind.DIFFERENT, path, "ignored", "read") for path in heeded),
    ]
    if asked:
        changes.append(Change("config", Kind.DIFFERENT, "keys asked for that are not there", "", ", ".join(asked)))
    source = f"probe: reads of the drafter's config ({len(both)} keys)"
    if matters:
        instead = {path: difflib.get_close_matches(path.rpartition(".")[2], asked, n=1, cutoff=0.5) for path in matters}
        looked = [f"{near[0]} in place of {path}" for path, near in instead.items() if near]
        findings.append(
            Finding(
                "UPG012",
                Verdict.FAIL,
                f"{len(matters)} config keys that change the drafter are no longer read: {shown(list(matters))}",
                expected=f"read, as by {context.old_version}",
                actual="; ".join(f"{path} = {new.keys[path].value!r} ({why})" for path, why in matters.items()),
                n=len(both),
                source=source,
                cause=context.cause(
                    f"{context.engine} {context.new_version} "
                    + (f"newly asks for {', '.join(looked)}" if looked else "has no such setting, or elsewhere")
                ),
                remedy="put the setting where the new version reads it (`draftgate check` says where), or stay on "
                f"{context.old_version}",
            )
        )
    elif not findings:
        text = "every config key that changes the drafter and was read is still read"
        findings.append(Finding("UPG012", Verdict.PASS, text, n=len(both), source=source))
    return Compared(tuple(findings), tuple(changes))

"""What stands around the two runs: the packages beside the engine, and how long each server took to start."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping

from harness.errors import EvidenceError
from harness.upgrade.model import Change, Compared, Context, Kind, lost
from harness.upgrade.recorded import Side, at, measured, need
from harness.verdict import Finding, Verdict

__all__ = ["judge_packages", "judge_startup", "read_packages", "read_startup", "suspects"]

_RELEVANT = (
    r"vllm.*|sglang.*",
    r"torch",
    r"transformers",
    r"flashinfer.*|flash-attn.*|driver",
    r"triton.*|pytorch-triton.*",
    r"sgl-.*|torch.*|xformers|xgrammar|outlines.*",
    r"nvidia-.*|cuda.*|compressed-tensors|safetensors|tokenizers|numpy",
)
"""What can change what an engine computes, the likeliest first."""

_BELOW = ("driver", "system")
"""What of the machine is below the packages."""

_NAMED = 3


def _rank(package: str) -> int:
    return next((rank for rank, pattern in enumerate(_RELEVANT) if re.fullmatch(pattern, package)), len(_RELEVANT))


def read_packages(side: Side) -> dict[str, str]:
    """Return the versions of every package, of Python, system and driver. Raises EvidenceError if there are none."""
    below = {name: str(value) for name, value in need(side.case, "machine", dict).items() if name in _BELOW}
    return {
        "python": need(side.case, "engine.python_version", str),
        **below,
        **need(side.case, "engine.packages", dict),
    }


def _apart(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the packages whose version changed, came or went, the most relevant first."""
    return sorted((name for name in old.keys() | new.keys() if old.get(name) != new.get(name)),
                  key=lambda name: (_rank(name), name))  # fmt: skip


def suspects(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the packages that are the likeliest to have changed what the engine computes; "" if none changed."""
    chosen = [name for name in _apart(old, new) if _rank(name) < len(_RELEVANT)][:_NAMED]
    return ", ".join(f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in chosen)


def judge_packages(old: Mapping[str, str], new: Mapping[str, str], context: Context) -> Compared:
    """List the packages whose version changed. Code: UPG060, always PASS."""
    names = _apart(old, new)
    text = f"{len(names)} of {len(old.keys() | new.keys())} packages changed"
    finding = Finding(
        "UPG060",
        Verdict.PASS,
        f"{text}: {context.suspects}" if context.suspects else text,
        n=len(new),
        source="engine.packages of both records",
    )
    changes = (Change("packages", Kind.DIFFERENT, name, old.get(name, ""), new.get(name, "")) for name in names)
    return Compared((finding,), tuple(changes))


@dataclasses.dataclass(frozen=True)
class Started:
    """How long one server took, and how long each phase of that, in seconds."""

    seconds: float
    phases: Mapping[str, float]


def read_startup(side: Side) -> dict[str, Started]:
    """Return each server's start-up by kind, "spec" or "plain". Raises EvidenceError if it was not recorded."""
    made = {}
    for label, facts in need(measured(side, "startup"), "servers", dict).items():
        timeline = need(facts, "timeline", list)
        phases: dict[str, float] = {}
        for (begun, phase), (ended, _) in itertools.pairwise(timeline):
            phases[phase] = phases.get(phase, 0.0) + ended - begun
        seconds = at(facts, "started_in_s")
        if not isinstance(seconds, (int, float)):
            raise EvidenceError(f"started_in_s of {label}")
        made[label.rpartition("-")[2]] = Started(seconds, phases)
    return made


def judge_startup(old: Mapping[str, Started], new: Mapping[str, Started], context: Context) -> Compared:
    """List how long each server took to start. Codes: UPG061, always PASS; UPG002 a server that one side lacks."""
    findings = [
        lost("new" if kind in old else "old", f"the start-up of the {kind} server")
        for kind in sorted(old.keys() ^ new.keys())
    ]
    changes = []
    for kind in sorted(old.keys() & new.keys()):
        was, now = old[kind], new[kind]
        phases = {phase: _step(was, now, phase) for phase in (*was.phases, *now.phases)}
        moved = max(phases, key=lambda phase: abs(phases[phase]))
        findings.append(
            Finding(
                "UPG061",
                Verdict.PASS,
                f"the {kind} server of {context.new_version} was ready after {now.seconds:.1f} s, "
                f"{was.seconds:.1f} s before; most moved: {moved}, {phases[moved]:+.1f} s",
                n=1,
                source="start-up timelines, one start each: listed, not judged",
            )
        )
        for phase in phases:
            before, after = _seconds(was, phase), _seconds(now, phase)
            if before != after:
                changes.append(Change("start-up", Kind.DIFFERENT, f"{kind}: {phase}", before, after))
    return Compared(tuple(findings), tuple(changes))


def _step(old: Started, new: Started, phase: str) -> float:
    return new.phases.get(phase, 0.0) - old.phases.get(phase, 0.0)


def _seconds(started: Started, phase: str) -> str:
    return f"{started.phases[phase]:.1f} s" if phase in started.phases else ""

"""What the servers wrote under two versions, token by token, with and without speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from harness.errors import EvidenceError
from harness.upgrade.model import Change, Compared, Context, Kind, lost, shown
from harness.upgrade.recorded import Side, concluded, measured, need
from harness.verdict import Finding, Verdict

__all__ = ["judge", "read"]

_MODES = {"spec": "with speculation", "plain": "without speculation"}

Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Each prompt's whole output with and without speculation, and what the losslessness suite concluded."""

    outputs: Mapping[str, Mapping[str, Tokens]]
    lossless: Verdict


def read(side: Side) -> Facts:
    """Return the outputs. Raises EvidenceError naming a prompt that has none."""
    outputs: dict[str, dict[str, Tokens]] = {mode: {} for mode in _MODES}
    for row in need(measured(side, "losslessness"), "comparisons", list):
        name = need(row, "name", str)
        first = need(row, "segments", list)[0]  # later ones are behind a difference
        for mode, found in outputs.items():
            found[name] = tuple(need(first, mode, list))
            if not all(isinstance(token, int) for token in found[name]):
                raise EvidenceError(f"the token ids of prompt {name!r}, {_MODES[mode]}")
    return Facts(outputs, concluded(side, "losslessness"))


def judge(old: Facts, new: Facts, context: Context) -> Compared:
    """Judge a canary's outputs by equality; another pair's may differ by rounding, as long as speculation is lossless.

    Where a canary's failed the losslessness suite and now pass it, they are the oracle's now: a repair.

    Kernels of two versions add up in other orders, in float32 too, and what the target's logits were where two versions
    part is in neither record. So a difference is listed, and is a finding only where speculation broke the text.

    Codes: UPG040 (with speculation), UPG041 (without), UPG002 a prompt that one side lacks.
    """
    findings: list[Finding] = []
    changes: list[Change] = []
    for code, mode in (("UPG040", "spec"), ("UPG041", "plain")):
        before, after = old.outputs[mode], new.outputs[mode]
        findings += [
            lost("new" if name in before else "old", f"the output of prompt {name!r}, {_MODES[mode]}")
            for name in sorted(before.keys() ^ after.keys())
        ]
        both = [name for name in before if name in after]
        apart = [name for name in both if before[name] != after[name]]
        broken = mode == "spec" and new.lossless is Verdict.FAIL and old.lossless is not Verdict.FAIL
        mended = context.canary and old.lossless is Verdict.FAIL and new.lossless is Verdict.PASS
        worse = bool(apart) and ((context.canary and not mended) or broken)
        source = "token ids of the losslessness suite"
        if not apart:
            text = f"the outputs {_MODES[mode]} are the same tokens"
            findings.append(Finding(code, Verdict.PASS, text, n=len(both), source=source))
            continue
        first = apart[0]
        at_, was, now = _apart(before[first], after[first])
        place = f"prompt {first!r}, token {at_}"
        changes.append(
            Change(
                "outputs",
                Kind.WORSE if worse else Kind.BETTER if mended else Kind.DIFFERENT,
                f"{_MODES[mode]}: {len(apart)} of {len(both)} prompts ({shown(apart)}), first at {place}",
                was,
                now,
            )
        )
        findings.append(
            Finding(
                code,
                Verdict.FAIL if worse else Verdict.PASS,
                f"{len(apart)} of {len(both)} outputs {_MODES[mode]} changed, the first at {place}",
                expected=f"{place}: {was}",
                actual=f"{place}: {now}",
                n=len(both),
                source=source,
                cause=context.cause(_cause(mode, old, new)) if worse else "",
                remedy="a canary has no near-ties, so this is no rounding: see the new version's losslessness suite"
                if worse
                else "",
            )
        )
    return Compared(tuple(findings), tuple(changes))


def _apart(before: Tokens, after: Tokens) -> tuple[int, str, str]:
    """Return where two outputs part, and what stands there on each side."""
    position = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    if position is None:
        return min(len(before), len(after)), f"{len(before)} tokens", f"{len(after)} tokens"
    return position, str(before[position]), str(after[position])


def _cause(mode: str, old: Facts, new: Facts) -> str:
    if mode == "plain" or old.outputs["plain"] != new.outputs["plain"]:
        return "the target itself computes something else, with or without a drafter"
    return "the target still writes the same without speculation: verification or sampling of drafts changed"

"""Judging parity: from measured distances to findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.gate.aux_hidden import Expected, ids_to_write
from harness.parity.capture import Asked, Captured
from harness.parity.compare import ROOM, Between, Measured, Row, Slot
from harness.verdict import Finding, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["incomparable", "judge_between", "judge_engine", "judge_tokens", "nothing", "unusable"]

_SCALED = 1e-3
"""How far a cosine may be from 1 for a difference to be called one of scale."""

_NAMED = 3


def nothing(reason: str, remedy: str) -> Finding:
    """Return the finding of an engine of which nothing, or not all, was captured."""
    return Finding(
        "PAR001",
        Verdict.INVALID,
        "the states that reach the drafter were not captured",
        actual=reason,
        source="probe, features",
        cause="the server did not serve, or the probe did not see all that was asked",
        remedy=remedy,
    )


def unusable(reason: str, remedy: str) -> Finding:
    """Return the finding of a reference that cannot be had."""
    return Finding(
        "PAR007",
        Verdict.INVALID,
        "there is no plain forward to compare with",
        actual=reason,
        source="transformers",
        remedy=remedy,
    )


def judge_tokens(asked: Sequence[Asked], tokens: Mapping[str, tuple[int, ...]], engine: str) -> list[Finding]:
    """Judge that the engine and the reference tokenised the conversations alike. `tokens` are the reference's."""
    spoken = [each for each in asked if each.name in tokens]
    for each in spoken:
        theirs = tokens[each.name]
        if each.prompt_ids != theirs:
            pairs = zip((*each.prompt_ids, None), (*theirs, None), strict=False)
            at = next((index for index, (one, other) in enumerate(pairs) if one != other), 0)
            return [
                Finding(
                    "PAR004",
                    Verdict.INVALID,
                    f"{engine} and the reference tokenise prompt {each.name} differently, from token {at} on",
                    expected=f"{len(theirs)} tokens, there {list(theirs[at : at + 4])}",
                    actual=f"{len(each.prompt_ids)} tokens, there {list(each.prompt_ids[at : at + 4])}",
                    n=len(spoken),
                    source="the answer's prompt tokens; transformers' chat template",
                    cause="another chat template, or a token added at the start",
                    remedy="give both the same template; states of different tokens are not compared",
                )
            ]
    if not spoken:
        return []
    return [
        Finding(
            "PAR004",
            Verdict.PASS,
            f"{engine} and the reference tokenise the prompts alike",
            n=len(spoken),
            source="the answers' prompt tokens; transformers' chat template",
        )
    ]


def judge_engine(
    engine: str, version: str, measured: Measured, want: Expected, captured: Captured, dtype: str
) -> list[Finding]:
    """Judge one engine's slots against the reference.

    Codes: PAR002 a slot is another layer of the reference, PAR003 the same layer and off beyond the dtype's rounding,
    PAR006 another number of slots than the drafter was trained on, PAR007 the reference's own rounding hides what is to
    be seen, PAR008 the config's ids have two readings, and the pair does not say which is right.
    """
    name = f"{engine} {version}"
    slots, layers = measured.slots, want.layers
    if len(slots) != len(layers):
        found = [f"slot {slot.index}: {measured.label(slot.nearest)}" for slot in slots]
        return [
            Finding(
                "PAR006",
                Verdict.FAIL,
                f"{name} hands over {len(slots)} states a token, {len(layers)} are expected",
                expected=f"inputs of layers {list(layers)} ({want.layers_source})",
                actual="; ".join(found),
                n=len(measured.rows),
                source="probe, features",
                cause="the engine runs the drafter by another method, or captures another number of layers",
                remedy="see AUX002 of `draftgate run`",
            )
        ]
    moved = [slot for slot in slots if slot.nearest != slot.judged and _matches(slot, slot.nearest)]
    moved = [slot for slot in moved if not _matches(slot, slot.judged)]
    findings = [
        _blind(slot, measured, dtype)
        for slot in slots
        if slot not in moved and 2 * slot.tolerance[slot.judged] >= slot.apart
    ]
    if moved:
        findings.append(_moved(engine, name, measured, moved, want, captured.requested))
    elif all(slot.nearest == slot.judged for slot in slots):
        findings.append(
            Finding(
                "PAR002",
                Verdict.PASS,
                f"the slots of {name} are nearest to the inputs of layers {list(layers)} of the reference",
                expected=f"inputs of layers {list(layers)} ({want.layers_source})",
                n=len(measured.rows),
                source="probe, features; all states of a plain forward",
            )
        )
    stayed = [slot for slot in slots if slot not in moved]
    off = [slot for slot in stayed if (slot.error > slot.limit).any()]
    findings += [_off(name, measured, slot, dtype) for slot in off]
    if stayed and not off:
        findings.append(_agree(name, measured, stayed, dtype, captured))
    return findings


def _matches(slot: Slot, state: int) -> bool:
    return slot.search[state] <= slot.tolerance[state]


def _blind(slot: Slot, measured: Measured, dtype: str) -> Finding:
    return Finding(
        "PAR007",
        Verdict.INVALID,
        f"in {dtype} rounding hides whether slot {slot.index} is {measured.label(slot.judged)}",
        expected="a tolerance of less than half the distance to the nearest other layer",
        actual=f"tolerance {slot.tolerance[slot.judged]:.2g}, the nearest other layer is {slot.apart:.2g} away",
        n=len(measured.rows),
        source=f"plain forward in {dtype} and in the wider dtype",
        cause="the target's states are computed too coarsely in this dtype for a capture one layer off to show",
        remedy='compare in float32: a pair with dtype = "float32"',
    )


def _moved(
    engine: str,
    name: str,
    measured: Measured,
    moved: Sequence[Slot],
    want: Expected,
    requested: Sequence[int] | None,
) -> Finding:
    said = [
        f"slot {slot.index} of {name} is {measured.label(slot.nearest)} of the reference, not {slot.judged}"
        for slot in moved
    ]
    nearest = [slot.nearest for slot in measured.slots]
    ambiguous = want.one_reading and nearest == [layer + 1 for layer in want.layers]
    captured = [[state] for state in nearest]
    return Finding(
        "PAR008" if ambiguous else "PAR002",
        Verdict.INVALID if ambiguous else Verdict.FAIL,
        "; ".join(said) if len(said) <= _NAMED else f"{said[0]} (and {len(said) - 1} more slots)",
        expected=f"inputs of layers {list(want.layers)} ({want.layers_source})",
        actual="; ".join(
            f"slot {slot.index}: error {slot.search[slot.nearest]:.2g} to {measured.label(slot.nearest)}, "
            f"{slot.search[slot.judged]:.2g} to layer {slot.judged}"
            for slot in moved
        ),
        n=len(measured.rows),
        source="probe, features; all states of a plain forward",
        cause="the drafter's ids mean layer inputs to one side and outputs to the other, or their order was changed",
        remedy="write the layers whose inputs the drafter was trained on into the pair: expect.aux_layers"
        if ambiguous
        else ids_to_write(engine, requested, captured, want.layers),
    )


def _off(name: str, measured: Measured, slot: Slot, dtype: str) -> Finding:
    bad = np.flatnonzero(slot.error > slot.limit)
    broken = np.flatnonzero(~slot.finite)
    worst = int(broken[0]) if broken.size else int((slot.error / slot.limit).argmax())
    where = _where(measured.rows[worst])
    if broken.size:
        summary = (
            f"slot {slot.index} of {name} has values that are not finite in {broken.size} of {slot.error.size} rows"
        )
        actual = f"first at {where}"
        cause, remedy = "the engine's forward overflows or reads memory that nobody wrote", "see its log for NaN"
    else:
        expected = measured.label(slot.judged)
        nearest = slot.nearest
        summary = (
            f"slot {slot.index} of {name} is {expected}, off beyond {dtype} in {bad.size} of {slot.error.size} rows"
            if nearest == slot.judged
            else f"slot {slot.index} of {name} is no state of the reference, the nearest is {measured.label(nearest)}"
        )
        actual = (
            f"relative error {slot.error[worst]:.3g}, cosine {slot.cosine[worst]:.5f} at {where}; "
            f"median error {slot.search[slot.judged]:.3g}"
        )
        cause, remedy = _why(slot, bad)
    return Finding(
        "PAR003",
        Verdict.FAIL,
        summary,
        expected=_tolerance(slot, worst, dtype),
        actual=actual,
        n=int(slot.error.size),
        source="probe, features; plain forward",
        cause=cause,
        remedy=remedy,
    )


def _why(slot: Slot, bad: NDArray[Any]) -> tuple[str, str]:
    scales = slot.scale[bad]
    if (1 - slot.cosine[bad] < _SCALED).all() and abs(np.median(scales) - 1) > slot.tolerance[slot.judged]:
        return (
            f"the values are scaled: the direction is right, the length {np.median(scales):.4g} times the reference's",
            "look for a norm or a multiplier between the capture and the drafter",
        )
    if bad.size < slot.error.size / 2:
        return (
            "single rows are wrong, the others right: positions, masks or a cache, not the capture",
            "compare these positions with the engine's attention backend exchanged",
        )
    return (
        "the engine computes other states than the target's own forward: kernels, quantisation, or another checkpoint",
        "serve the target without quantisation and with another attention backend, then compare again",
    )


def _agree(name: str, measured: Measured, slots: Sequence[Slot], dtype: str, captured: Captured) -> Finding:
    worst = max(slots, key=lambda slot: float((slot.error / slot.limit).max()))
    at = int((worst.error / worst.limit).argmax())
    decoded = sum(row.decoded for row in measured.rows)
    return Finding(
        "PAR003",
        Verdict.PASS,
        f"the states that {name} feeds the drafter agree with a plain forward within {dtype}",
        expected=_tolerance(worst, at, dtype),
        actual=f"relative error {worst.error[at]:.3g} where it is nearest to that, cosine {worst.cosine[at]:.6f}: "
        f"slot {worst.index}, "
        f"{_where(measured.rows[at])}; {len(measured.rows) - decoded} rows of prompts, {decoded} of generated tokens, "
        f"{captured.rejected} of refused drafts left out",
        n=len(measured.rows) * len(slots),
        source="probe, features; plain forward",
    )


def _tolerance(slot: Slot, row: int, dtype: str) -> str:
    return (
        f"relative error up to {slot.limit[row]:.3g} there: {ROOM:g} times the largest of {dtype}'s unit roundoff, "
        f"what a plain forward loses by rounding in that row, and in the median row ({slot.noise[slot.judged]:.2g})"
    )


def _where(row: Row) -> str:
    return f"{row.prompt} position {row.position} (token {row.token_id}, {'generated' if row.decoded else 'prompt'})"


def incomparable(names: tuple[str, ...], reason: str) -> Finding:
    """Return the finding of two engines of which no rows can be laid side by side."""
    return Finding(
        "PAR005",
        Verdict.INVALID,
        f"{' and '.join(names)} cannot be compared with each other",
        actual=reason,
        source="probe, features of both engines",
    )


def _limits(measured: Measured, slot: int, rows: Sequence[Row]) -> NDArray[Any]:
    """Return what one engine's error may be in each of these rows."""
    at = {(row.prompt, row.position): number for number, row in enumerate(measured.rows)}
    limits: NDArray[Any] = measured.slots[slot].limit[[at[row.prompt, row.position] for row in rows]]
    return limits


def judge_between(
    names: tuple[str, str],
    measured: tuple[Measured, Measured],
    found: tuple[tuple[Row, ...], tuple[Between, ...]],
) -> list[Finding]:
    """Judge two engines' states against each other: PAR005. Both are allowed their own distance from the reference."""
    rows, slots = found
    first, second = names
    places = [(one.nearest, two.nearest) for one, two in zip(measured[0].slots, measured[1].slots, strict=True)]
    apart = [
        f"slot {index} is {measured[0].label(one)} on {first} and {measured[1].label(two)} on {second}"
        for index, (one, two) in enumerate(places)
        if one != two
    ]
    limits = [_limits(measured[0], index, rows) + _limits(measured[1], index, rows) for index in range(len(places))]
    worst = max(slots, key=lambda slot: float((slot.error / limits[slot.index]).max()))
    at = int((worst.error / limits[worst.index]).argmax())
    numbers = (
        f"relative error {worst.error[at]:.3g}, cosine {worst.cosine[at]:.6f}: slot {worst.index}, {_where(rows[at])}; "
        f"median {float(np.median(worst.error)):.3g}"
    )
    expected = f"relative error up to {limits[worst.index][at]:.3g}: each engine's tolerance against the plain forward"
    source = "probe, features of both engines after the same tokens"
    if apart:
        return [
            Finding(
                "PAR005",
                Verdict.FAIL,
                apart[0] + (f" (and {len(apart) - 1} more slots)" if len(apart) > 1 else ""),
                expected="the same layer on both",
                actual=numbers,
                n=len(rows),
                source=source,
                cause="the engines read the drafter's layer ids differently",
                remedy="a drafter trained on one's states is fed others by the other: see PAR002 for the ids to write",
            )
        ]
    if any((slot.error > limits[slot.index]).any() for slot in slots):
        return [
            Finding(
                "PAR005",
                Verdict.FAIL,
                f"{first} and {second} feed the drafter different states, from the same layers",
                expected=expected,
                actual=numbers,
                n=len(rows),
                source=source,
                cause="see PAR003: which of the two is off from the plain forward",
                remedy="a drafter trained on the states of one will be accepted less by the other",
            )
        ]
    return [
        Finding(
            "PAR005",
            Verdict.PASS,
            f"{first} and {second} feed the drafter the same states",
            expected=expected,
            actual=numbers,
            n=len(rows) * len(slots),
            source=source,
        )
    ]

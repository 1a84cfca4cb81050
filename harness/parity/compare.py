"""How far the states that an engine hands to its drafter are from the target's own: numbers only, in numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import EvidenceError
from harness.parity.reference import Forward

__all__ = ["ROOM", "UNIT", "Between", "Measured", "Row", "Rows", "Slot", "between", "measure"]

UNIT: Mapping[str, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""The unit roundoff: the largest relative error of rounding one number to the dtype, to nearest."""

ROOM = 6.0
"""How many times the rounding of the plain forward an engine's may be.

Both compute the same sums in the same dtype in another order, so their errors are of one size and independent of each
other. The plain forward's is known, row by row: it is run in the wider dtype as well. On SmolLM2-135M in float32, over
1110 values of row and slot, vLLM 0.32.0 had 1.4 to 1.7 times the plain forward's in the median and 3.7 times at most
(docs/parity.md). Six leaves room for kernels that keep less in the wider dtype; a layer off is far beyond.
"""

_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class Rows:
    """What an engine handed over for one prompt: features [rows, n_aux x hidden] at these positions of the sequence.

    `token_ids` is the sequence, the prompt and what was generated; its first `prompt_tokens` are the prompt. A position
    occurs once.
    """

    prompt: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    positions: NDArray[Any]
    features: NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """Where one row stands; `decoded` says that its token was generated, not given."""

    prompt: str
    position: int
    token_id: int
    decoded: bool


@dataclasses.dataclass(frozen=True)
class Slot:
    """One auxiliary chunk of the features, against the reference in the wider dtype.

    `search[k]` is the median over rows of the relative L2 error to state k, `noise[k]` that of the reference itself in
    the pair's dtype, and `tolerance[k]` what an engine's may be. `error`, `cosine`, `scale` and `limit` [rows] are to
    the state `judged`: the expected one, or the nearest where no state is expected. A row's `limit` is more than the
    tolerance where the reference itself loses more in that row. `apart` is the distance from that state to the nearest
    other, and `finite` [rows] says which rows have finite values only; the others have an infinite error.
    """

    index: int
    search: tuple[float, ...]
    noise: tuple[float, ...]
    tolerance: tuple[float, ...]
    judged: int
    error: NDArray[Any]
    cosine: NDArray[Any]
    scale: NDArray[Any]
    limit: NDArray[Any]
    apart: float
    finite: NDArray[Any]

    @property
    def nearest(self) -> int:
        """The state that this slot is nearest to: the judged one where it is as near as any."""
        best = min(range(len(self.search)), key=self.search.__getitem__)
        return self.judged if self.search[self.judged] <= self.search[best] else best


@dataclasses.dataclass(frozen=True)
class Measured:
    """All slots of one engine. `layers` is the number of the target's decoder layers."""

    rows: tuple[Row, ...]
    slots: tuple[Slot, ...]
    layers: int

    def label(self, state: int) -> str:
        """Name a state of the reference."""
        if state < self.layers:
            return f"layer {state}"
        return "the last layer's output" if state == self.layers else "the final normed state"


def measure(
    captured: Sequence[Rows], forwards: Mapping[tuple[int, ...], Forward], expected: Sequence[int], dtype: str
) -> Measured:
    """Compare every row of every slot with every state of the reference.

    `expected` are the states that the slots should be, in order; a slot beyond them is judged by its nearest.

    Raises:
        EvidenceError: there is nothing to compare, the reference lacks a sequence, or the widths do not fit.

    """
    rows = tuple(_rows(captured))
    if not rows:
        raise EvidenceError("no row of features is there to be compared", remedy="see the server's log")
    lacking = next((each.prompt for each in captured if each.token_ids not in forwards), None)
    if lacking is not None:
        raise EvidenceError(f"the plain forward has no states of prompt {lacking}")
    states, _, hidden = forwards[captured[0].token_ids].wide.shape
    width = captured[0].features.shape[1]
    if width % hidden or any(each.features.shape[1] != width for each in captured):
        raise EvidenceError(
            f"features {sorted({each.features.shape[1] for each in captured})} wide, the target's states {hidden}",
            remedy="is the reference the target that was served?",
        )
    if max(expected, default=0) >= states:
        raise EvidenceError(f"layer {max(expected)} is expected, the reference has {states - 2}")
    handed = np.concatenate([_double(each.features) for each in captured])
    chunks = [handed[:, start : start + hidden] for start in range(0, width, hidden)]
    search = np.full((len(chunks), states), np.inf)
    noise = np.zeros((states, len(rows)))
    for state in range(states):
        wide = _state(captured, forwards, state, wide=True)
        noise[state] = _error(_state(captured, forwards, state, wide=False), wide)
        for index, chunk in enumerate(chunks):
            search[index, state] = np.median(_error(chunk, wide))
    typical = np.median(noise, axis=1)
    tolerance = ROOM * np.maximum(UNIT[dtype], typical)
    slots = []
    for index, chunk in enumerate(chunks):
        judged = expected[index] if index < len(expected) else int(search[index].argmin())
        wide = _state(captured, forwards, judged, wide=True)
        others = [state for state in range(states) if state != judged]
        apart = min(float(np.median(_error(_state(captured, forwards, other, wide=True), wide))) for other in others)
        slots.append(
            Slot(
                index,
                tuple(map(float, search[index])),
                tuple(map(float, typical)),
                tuple(map(float, tolerance)),
                judged,
                error=_error(chunk, wide),
                cosine=_cosine(chunk, wide),
                scale=_dot(chunk, wide) / np.maximum(_dot(wide, wide), _TINY),
                limit=np.maximum(tolerance[judged], ROOM * noise[judged]),
                apart=apart,
                finite=np.isfinite(chunk).all(axis=1),
            )
        )
    return Measured(rows, tuple(slots), states - 2)


@dataclasses.dataclass(frozen=True)
class Between:
    """One slot of two engines against each other, row by row: relative to the first one's."""

    index: int
    error: NDArray[Any]
    cosine: NDArray[Any]


def between(first: Sequence[Rows], second: Sequence[Rows], hidden: int) -> tuple[tuple[Row, ...], tuple[Between, ...]]:
    """Compare the rows that both engines handed over after the same tokens, chunk by chunk of `hidden` values.

    Raises EvidenceError where no row is common, or the widths differ.
    """
    others = {each.prompt: each for each in second}
    rows, ours, theirs = [], [], []
    for each in first:
        other = others.get(each.prompt)
        if other is None:
            continue
        at = {int(position): number for number, position in enumerate(other.positions)}
        for number, row in enumerate(_rows([each])):
            end = row.position + 1
            if row.position in at and each.token_ids[:end] == other.token_ids[:end]:
                rows.append(row)
                ours.append(each.features[number])
                theirs.append(other.features[at[row.position]])
    if not rows:
        raise EvidenceError("no row was handed over by both engines after the same tokens")
    if ours[0].shape != theirs[0].shape:
        raise EvidenceError(f"the one hands over {ours[0].shape[0]} values a row, the other {theirs[0].shape[0]}")
    left, right = _double(np.stack(ours)), _double(np.stack(theirs))
    found = []
    for index, start in enumerate(range(0, left.shape[1], hidden)):
        one, other_one = left[:, start : start + hidden], right[:, start : start + hidden]
        found.append(Between(index, _error(other_one, one), _cosine(one, other_one)))
    return tuple(rows), tuple(found)


def _rows(captured: Sequence[Rows]) -> list[Row]:
    return [
        Row(each.prompt, int(position), each.token_ids[int(position)], int(position) >= each.prompt_tokens)
        for each in captured
        for position in each.positions
    ]


def _double(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float64)


def _state(
    captured: Sequence[Rows], forwards: Mapping[tuple[int, ...], Forward], state: int, *, wide: bool
) -> NDArray[Any]:
    """Return one state of the reference [rows, hidden], at the rows that were captured."""
    parts = []
    for each in captured:
        forward = forwards[each.token_ids]
        parts.append((forward.wide if wide else forward.own)[state][each.positions])
    return _double(np.concatenate(parts))


def _dot(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        product: NDArray[Any] = (left * right).sum(axis=1)
    return product


def _cosine(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        cosine: NDArray[Any] = _dot(left, right) / np.maximum(np.sqrt(_dot(left, left) * _dot(right, right)), _TINY)
    return cosine


def _error(values: NDArray[Any], truth: NDArray[Any]) -> NDArray[Any]:
    """Return |values - truth| / |truth| of each row; infinite where a value is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        error: NDArray[Any] = np.linalg.norm(values - truth, axis=1) / np.maximum(np.linalg.norm(truth, axis=1), _TINY)
    return np.where(np.isfinite(error), error, np.inf)

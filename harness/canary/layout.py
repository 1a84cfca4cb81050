"""Where things stand in a canary's residual stream, and how its energy is kept.

Every vector that an RMSNorm sees has mean square exactly 1, so a norm multiplies by its weight and does nothing else:
all values are then small whole numbers times powers of two, which bfloat16 holds exactly, at any width. `ballast` makes
it so: channels that nobody reads and that hold whatever energy is missing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.canary.spec import CODES, CanarySpec
from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "BALLAST",
    "EPS",
    "ON",
    "ROPE_THETA",
    "DrafterLayout",
    "Mlp",
    "Reader",
    "TargetLayout",
    "ballast",
    "depth_amplitude",
    "depth_tag",
    "fixed_norm",
    "free_norm",
    "head_phase",
    "weight_dtype",
]

EPS = 1e-5
"""`rms_norm_eps` of target and drafter."""
ROPE_THETA = 10000.0
BALLAST = 4
"""Channels of ballast: four leave less than 2^-24 of the energy missing."""
ON = 32.0
"""A gate at ON is open (silu(32) is 32 in float32 and bfloat16), one at -ON is shut (silu(-32) is -4e-13)."""


def weight_dtype(spec: CanarySpec) -> np.dtype[Any]:
    """Return the numpy dtype of the spec's weights."""
    import ml_dtypes  # noqa: PLC0415 -- keeps the import of this package light

    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16 if spec.dtype == "bfloat16" else np.dtype(np.float32)


class _Allocator:
    """Hands out channels from 0 up."""

    def __init__(self, spec: CanarySpec) -> None:
        self.spec = spec
        self.used = 0

    def take(self, count: int) -> range:
        start, self.used = self.used, self.used + count
        if self.used > self.spec.hidden:
            raise UsageError(
                f"canary {self.spec.name!r}: hidden {self.spec.hidden} is too narrow for {self.spec.classes} classes",
                remedy="widen hidden or use fewer classes",
            )
        return range(start, self.used)


@dataclasses.dataclass(frozen=True)
class TargetLayout:
    """The target's channels. Each one-hot group but `token` ends in a rest channel, which is 1 while no other is.

    `one` is the constant 1; `token` the class of the current token; `code` the code of the token two before; `stamps`
    the code of the current token, one group for each auxiliary layer, each away from rest only at its layer's input;
    `out` the class of the next token; `depth` the layer's number in binary, as plus or minus `depth_amplitude`.
    """

    one: int
    token: range
    code: range
    stamps: tuple[range, range, range]
    out: range
    depth: range
    ballast: range

    @classmethod
    def of(cls, spec: CanarySpec) -> TargetLayout:
        """Allocate the channels. Raises `UsageError` when `hidden` is too narrow."""
        new = _Allocator(spec)
        return cls(
            one=new.take(1)[0],
            token=new.take(spec.classes),
            code=new.take(CODES + 1),
            stamps=(new.take(CODES + 1), new.take(CODES + 1), new.take(CODES + 1)),
            out=new.take(spec.classes + 1),
            depth=new.take(spec.layers.bit_length()),
            ballast=new.take(BALLAST),
        )


@dataclasses.dataclass(frozen=True)
class DrafterLayout:
    """The drafter's channels, unlike the target's on purpose: the target's `embed_tokens` or `lm_head` do not fit.

    `out` the class drafted last, its rest channel for none; `prev` three times the code of the token before the
    current one; `token` and `code` as the target's, `code` times three, both empty outside the layer; `room` holds the
    energy of those two meanwhile; `one` the constant 1; `trade` a constant that keeps the energy when `norm_output`
    doubles `out`.
    """

    out: range
    ballast: range
    token: range
    prev: range
    code: range
    room: range
    trade: int
    one: int

    @classmethod
    def of(cls, spec: CanarySpec) -> DrafterLayout:
        """Allocate the channels. Raises `UsageError` when `hidden` is too narrow."""
        new = _Allocator(spec)
        return cls(
            out=new.take(spec.classes + 1),
            ballast=new.take(BALLAST),
            token=new.take(spec.classes),
            prev=new.take(CODES),
            code=new.take(CODES),
            room=new.take(4),
            trade=new.take(1)[0],
            one=new.take(1)[0],
        )


def ballast(energy: float, hidden: int) -> list[float]:
    """Return BALLAST values, each exact in bfloat16, that bring a vector of this energy to mean square 1 - EPS.

    Greedy: the largest value of 8 significant bits whose square still fits, four times; each leaves at most 2^-7 of
    what was missing. Raises `UsageError` when the vector has more energy than `hidden` allows.
    """
    missing = hidden * (1 - EPS) - energy
    if missing < 1:
        raise UsageError(f"hidden {hidden} leaves no room for the canary's values", remedy="widen hidden")
    values = []
    for _ in range(BALLAST):
        mantissa, exponent = math.frexp(math.sqrt(missing))
        value = math.ldexp(math.floor(mantissa * 256), exponent - 8)
        values.append(value)
        missing -= value * value
    return values


def depth_amplitude(spec: CanarySpec) -> float:
    """Return the power of two that the depth tag's bits have, so that the tag holds up to a quarter of the energy."""
    bits = spec.layers.bit_length()
    return 2.0 ** math.floor(math.log2(math.sqrt(spec.hidden / 4 / bits)))


def depth_tag(spec: CanarySpec, layer: int) -> NDArray[np.float64]:
    """Return the tag that the input of `layer` bears: its number in binary, in plus and minus `depth_amplitude`."""
    bits = np.array([(layer >> bit) & 1 for bit in range(spec.layers.bit_length())])
    return (2.0 * bits - 1.0) * depth_amplitude(spec)


def free_norm(
    rng: np.random.Generator, size: int, *, marks: Sequence[int], one: Sequence[int], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return a norm weight: 8 or 16 on `marks`, 1 on `one`, random powers of two elsewhere.

    Matrices that read the norm divide by it, exactly. With the engine's default, ones, they read marks an eighth or
    less of what they are, against an unchanged constant: no threshold is reached.
    """
    weight = rng.choice([0.25, 0.5, 2.0, 4.0], size=size).astype(dtype)
    weight[list(marks)] = rng.choice([8.0, 16.0], size=len(marks)).astype(dtype)
    weight[list(one)] = 1.0
    return weight


def fixed_norm(rng: np.random.Generator, size: int, values: dict[int, float], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a norm weight with these values, and random powers of two on the channels that are always empty."""
    weight = rng.choice([0.25, 0.5, 2.0, 4.0], size=size).astype(dtype)
    for channel, value in values.items():
        weight[channel] = value
    return weight


class Reader:
    """Writes columns of a matrix that reads a normalised vector, in the vector's own units.

    `base` is the matrix's column that reads channel 0 of the vector.
    """

    def __init__(self, matrix: NDArray[Any], norm: NDArray[Any], base: int = 0) -> None:
        self._matrix = matrix
        self._norm = norm
        self._base = base

    def read(self, row: int, channel: int, value: float) -> None:
        """Let `row` add `value` times the channel as it was before the norm."""
        self._matrix[row, self._base + channel] = value / float(self._norm[channel])


class Mlp:
    """A SwiGLU block in closed form, one neuron at a time.

    A neuron writes `write * value(x)` while `when(x)` is 1, and nothing while it is -1 or less.
    """

    def __init__(self, hidden: int, size: int, norm: NDArray[Any], one: int) -> None:
        self.gate = np.zeros((size, hidden), norm.dtype)
        self.up = np.zeros((size, hidden), norm.dtype)
        self.down = np.zeros((hidden, size), norm.dtype)
        self._one = one
        self._gate = Reader(self.gate, norm)
        self._up = Reader(self.up, norm)
        self._next = 0

    def neuron(
        self,
        write: dict[int, float],
        *,
        value: dict[int, float] | None = None,
        when: dict[int, float] | None = None,
    ) -> None:
        """Add a neuron. `value` and `when` map channel to coefficient and default to the constant 1."""
        for channel, coefficient in (when or {self._one: 1.0}).items():
            self._gate.read(self._next, channel, ON * coefficient)
        for channel, coefficient in (value or {self._one: 1.0}).items():
            self._up.read(self._next, channel, coefficient)
        for channel, amount in write.items():
            self.down[channel, self._next] = amount / ON
        self._next += 1


def head_phase(distance: int, head_dim: int) -> NDArray[np.float64]:
    """Return the query that, against the key `head_phase(0)`, peaks at the position `distance` tokens back.

    Rotary embedding turns pair f of a vector at position p by p * theta^(-2f/head_dim). A query turned back by
    `distance` therefore meets the key of position p - distance in phase. One position off costs 120 or more in the
    exponent of the softmax (up to 4096 positions, all of it rounded to bfloat16), so the others have e^-120.
    """
    pairs = head_dim // 2
    angle = distance * ROPE_THETA ** (-np.arange(pairs) / pairs)
    return 32.0 * np.concatenate([np.cos(angle), -np.sin(angle)])

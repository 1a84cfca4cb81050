"""Tensors that differ only in their numbers, as one: 61 layers of 384 experts are a few dozen families."""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping

from harness.checkpoint.header import BITS, Tensor

__all__ = ["Families", "Family"]

_DIGITS = bytes.maketrans(b"0123456789", b"##########")
_NUMBER = re.compile(r"(?<![^.])#+(?![^.])")
_FIELDS = operator.attrgetter("dtype", "shape")


@dataclasses.dataclass(frozen=True)
class Family:
    """Tensors of one dtype and shape whose names differ only in digits.

    In `pattern`, `*` stands for a part of the name that is a number, `#` for a digit within a part.
    """

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int


class Families:
    """Groups the tensors of several files, which are added one after the other."""

    def __init__(self) -> None:
        self._counts: collections.Counter[tuple[bytes, tuple[str, tuple[int, ...]]]] = collections.Counter()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of one file."""
        self._counts.update(zip(_patterns(tensors), map(_FIELDS, tensors.values()), strict=True))

    def all(self) -> tuple[Family, ...]:
        """Return the families, largest first."""
        # Numbers of one digit and of two were two patterns so far.
        merged: collections.Counter[tuple[str, tuple[str, tuple[int, ...]]]] = collections.Counter()
        for (pattern, kind), count in self._counts.items():
            merged[_NUMBER.sub("*", pattern.decode()), kind] += count
        families = [
            Family(pattern, dtype, shape, count, count * math.prod(shape) * BITS[dtype] // 8)
            for (pattern, (dtype, shape)), count in merged.items()
        ]
        return tuple(sorted(families, key=lambda family: (-family.nbytes, family.pattern)))


def _patterns(names: Iterable[str]) -> list[bytes]:
    """Return each name with its digits replaced, all at once: one name after the other takes three times as long."""
    listed = list(names)
    found = "\n".join(listed).encode().translate(_DIGITS).split(b"\n")
    if len(found) == len(listed):
        return found
    return [name.encode().translate(_DIGITS) for name in listed]  # a name has a line break, or there is none

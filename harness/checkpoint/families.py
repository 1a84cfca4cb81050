"""Tensors that differ only in their numbers, as one: 61 layers of 384 experts are a few dozen families."""

from __future__ import annotations

import collections
import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.checkpoint.header import Tensor

__all__ = ["Family", "group"]

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


def group(tensors: Iterable[Mapping[str, Tensor]]) -> tuple[Family, ...]:
    """Return the families of the tensors of several files, largest first."""
    counts: collections.Counter[tuple[str, tuple[str, tuple[int, ...]]]] = collections.Counter()
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for part in tensors:
        fields = list(map(_FIELDS, part.values()))
        counts.update(zip(_patterns(part), fields, strict=True))
        for kind in set(fields).difference(sizes):
            sizes[kind] = next(tensor.nbytes for tensor in part.values() if _FIELDS(tensor) == kind)
    # Numbers of one digit and of two were two patterns so far.
    merged: collections.Counter[tuple[str, tuple[str, tuple[int, ...]]]] = collections.Counter()
    for (pattern, kind), count in counts.items():
        merged[_NUMBER.sub("*", pattern), kind] += count
    families = [
        Family(pattern, *kind, count=count, nbytes=count * sizes[kind]) for (pattern, kind), count in merged.items()
    ]
    return tuple(sorted(families, key=lambda family: (-family.nbytes, family.pattern)))


def _patterns(names: Iterable[str]) -> list[str]:
    """Return each name with its digits replaced, all at once: one name after the other takes three times as long."""
    listed = list(names)
    found = "\n".join(listed).encode().translate(_DIGITS).decode().split("\n")
    if len(found) == len(listed):
        return found
    return [name.encode().translate(_DIGITS).decode() for name in listed]  # a name has a line break

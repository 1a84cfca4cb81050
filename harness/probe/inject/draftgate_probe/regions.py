"""Which bytes of one tensor storage hold data of which checkpoint keys: an interval map, and the views onto it."""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Any

import torch

RUNS = 1024
"""Strided views of more contiguous runs than this are kept as boxes and counted with a mask at the end."""

MASK = 1 << 28
"""Largest mask, in elements (one byte each), that is built to count odd strided writes; beyond it counts are bounds."""

Keys = frozenset[str]
NOTHING: Keys = frozenset()


@dataclasses.dataclass(frozen=True)
class View:
    """How a tensor lies in its storage, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Any) -> View:
        """Read it from a tensor."""
        return cls(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())

    @property
    def elements(self) -> int:
        """Number of elements, repeated ones included."""
        return math.prod(self.size)

    def extent(self) -> tuple[int, int]:
        """Return the first byte and the byte after the last; empty for a tensor without elements."""
        if not self.elements:
            return (self.offset * self.itemsize, self.offset * self.itemsize)
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset * self.itemsize, (last + 1) * self.itemsize)

    def runs(self) -> list[tuple[int, int]] | None:
        """Return the contiguous byte ranges it consists of, or None if there are more than `RUNS`."""
        if not self.elements:
            return []
        dims = sorted(
            (stride, size) for size, stride in zip(self.size, self.stride, strict=True) if size > 1 and stride > 0
        )
        length = 1
        while dims and dims[0][0] == length:
            length *= dims.pop(0)[1]
        if math.prod(size for _, size in dims) > RUNS:
            return None
        starts = [self.offset]
        for stride, size in reversed(dims):
            starts = [start + i * stride for start in starts for i in range(size)]
        return [(start * self.itemsize, (start + length) * self.itemsize) for start in starts]


@dataclasses.dataclass
class Count:
    """What a view holds, in elements."""

    written: int
    filled: int
    keys: Keys
    exact: bool


class Regions:
    """The history of one storage: disjoint byte segments, each with the keys whose data it holds (none: filled)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[tuple[int, int, Keys]] = []
        self._boxes: list[tuple[View, Keys]] = []
        self._writes: list[tuple[int, int, int]] = []  # first byte, byte after the last, bytes of key data replaced
        self.ever: set[str] = set()
        self.inexact = False

    def write(self, view: View, keys: Keys) -> None:
        """Record a write of data of `keys` over a whole view. No keys: the engine filled it."""
        low, high = view.extent()
        if low == high:
            return
        runs = None if self._boxes else view.runs()
        replaced = 0
        if runs is None:
            self._boxes.append((view, keys))
        else:
            for start, end in runs:
                replaced += self._paint(start, end, keys)
        if keys:
            self.ever |= keys
            self._writes.append((low, high, replaced))

    def mix(self, view: View, keys: Keys) -> None:
        """Record an in-place operation that adds data of `keys` to what is there (`add_`, for instance)."""
        self.write(view, keys | self.keys(view))

    def keys(self, view: View) -> Keys:
        """Return the keys whose data may lie within a view: exact for contiguous ones, by extent for others."""
        low, high = view.extent()
        found: set[str] = set()
        for _, _, keys in self._between(low, high):
            found |= keys
        for box, keys in self._boxes:
            start, end = box.extent()
            if start < high and low < end:
                found |= keys
        return frozenset(found)

    def writes(self, view: View) -> tuple[int, int]:
        """Return how many writes of key data touched a view, and how many elements of key data they replaced."""
        low, high = view.extent()
        hits = [replaced for start, end, replaced in self._writes if start < high and low < end]
        return len(hits), sum(hits) // view.itemsize

    def count(self, view: View) -> Count:
        """Count a view's elements by what they hold now."""
        runs = view.runs()
        if runs is not None and not self._boxes:
            written = filled = 0
            keys: set[str] = set()
            for start, end in runs:
                for low, high, here in self._between(start, end):
                    size = min(high, end) - max(low, start)
                    written, filled = (written + size, filled) if here else (written, filled + size)
                    keys |= here
            return Count(written // view.itemsize, filled // view.itemsize, frozenset(keys), not self.inexact)
        return self._count_by_mask(view)

    def _count_by_mask(self, view: View) -> Count:
        low, high = view.extent()
        span = (high - low) // view.itemsize
        odd = any(box.itemsize != view.itemsize for box, _ in self._boxes)
        if span > MASK or odd:
            written = sum(box.elements for box, keys in self._boxes if keys)
            return Count(min(written, view.elements), 0, self.keys(view), exact=False)
        # Two bits of history per element: 1 holds key data, 2 filled. Offsets are relative to the view's extent.
        first = low // view.itemsize
        mask = torch.zeros(span, dtype=torch.uint8, device="cpu")
        for start, end, keys in self._between(low, high):
            a, b = max(start, low) // view.itemsize - first, min(end, high) // view.itemsize - first
            mask[a:b] = 1 if keys else 2
        for box, keys in self._boxes:
            begin, end = box.extent()
            if end <= low or begin >= high:
                continue
            if begin < low or end > high:  # a box that reaches beyond this view: count it as an upper bound
                return Count(view.elements, 0, self.keys(view), exact=False)
            mask.as_strided(box.size, box.stride, box.offset - first).fill_(1 if keys else 2)
        seen = mask.as_strided(view.size, view.stride, view.offset - first)
        return Count(int((seen == 1).sum()), int((seen == 2).sum()), self.keys(view), not self.inexact)

    def _between(self, low: int, high: int) -> list[tuple[int, int, Keys]]:
        first = bisect.bisect_right(self._starts, low) - 1
        if first < 0 or self._segments[first][1] <= low:
            first += 1
        return self._segments[first : bisect.bisect_left(self._starts, high)]

    def _paint(self, low: int, high: int, keys: Keys) -> int:
        old = self._between(low, high)
        replaced = sum(min(end, high) - max(start, low) for start, end, here in old if here)
        new = [(low, high, keys)]
        if old:
            first = self._segments.index(old[0], max(0, bisect.bisect_left(self._starts, old[0][0])))
            if old[0][0] < low:
                new.insert(0, (old[0][0], low, old[0][2]))
            if old[-1][1] > high:
                new.append((high, old[-1][1], old[-1][2]))
        else:
            first = bisect.bisect_left(self._starts, low)
        self._segments[first : first + len(old)] = new
        self._starts[first : first + len(old)] = [segment[0] for segment in new]
        return replaced

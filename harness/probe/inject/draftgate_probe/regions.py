"""Which bytes of one tensor storage hold data of which checkpoint keys: an interval map, and the views onto it."""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

RUNS = 1024
"""Strided views of more contiguous runs than this are kept as boxes and counted with a mask at the end."""

MASK = 1 << 28
"""Largest mask, in elements (one byte each), that is built to count odd strided writes; beyond it counts are bounds."""

PIECES = 64
"""Of a checkpoint tensor that is taken in more rectangles than this, which part was taken is not followed."""

Keys = frozenset[str]
NOTHING: Keys = frozenset()

Piece = tuple[int, int, int, int, int]
"""A rectangle of a tensor's bytes, laid out in rows: bytes of a row, first row, row after the last, first byte in each
of them, byte after the last. A contiguous range is one in the tensor's only row."""


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
        length, repeats = self._repeats()
        if math.prod(count for _, count in repeats) > RUNS:
            return None
        starts = _starts(self.offset, repeats)
        return [(start * self.itemsize, (start + length) * self.itemsize) for start in starts]

    def pieces(self, whole: View) -> list[Piece] | None:
        """Return which bytes of a contiguous tensor this view of it shows; None where that takes too many pieces."""
        low, high = self.extent()
        first, last = whole.extent()
        size = last - first
        if low == high:
            return []
        if size != whole.elements * whole.itemsize or low < first or high > last:
            return None
        length, repeats = self._repeats()
        start, run = low - first, length * self.itemsize
        if not repeats:
            return [(size, 0, 1, start, start + run)]
        (stride, count), *outer = [(stride * self.itemsize, count) for stride, count in repeats]
        if size % stride or math.prod(count for _, count in outer) > PIECES:
            return None
        starts = _starts(start, outer)
        if any(each % stride + run > stride for each in starts):
            return None
        return [(stride, each // stride, each // stride + count, each % stride, each % stride + run) for each in starts]

    def _repeats(self) -> tuple[int, list[tuple[int, int]]]:
        """Return how long its contiguous runs are, and the strides and counts by which they repeat, smallest first."""
        dims = sorted(
            (stride, size) for size, stride in zip(self.size, self.stride, strict=True) if size > 1 and stride > 0
        )
        length, repeats = 1, list[tuple[int, int]]()
        for stride, size in dims:
            if not repeats and stride == length:
                length *= size
            elif repeats and stride == repeats[-1][0] * repeats[-1][1]:
                repeats[-1] = (repeats[-1][0], repeats[-1][1] * size)
            else:
                repeats.append((stride, size))
        return length, repeats


def _starts(first: int, repeats: list[tuple[int, int]]) -> list[int]:
    starts = [first]
    for stride, count in reversed(repeats):
        starts = [start + i * stride for start in starts for i in range(count)]
    return starts


class Share:
    """Which part of a checkpoint tensor of `size` bytes was taken. `pieces` is None where that is not known."""

    def __init__(self, size: int = 0, pieces: list[Piece] | None = None) -> None:
        self.size = size
        self.pieces = pieces

    def add(self, other: Share) -> None:
        """Add what the other has of the same tensor."""
        if self.size != other.size or other.pieces is None:
            self.pieces = None
        for piece in other.pieces or ():
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        if self.pieces is None:
            return
        for at, other in enumerate(self.pieces):
            joined = _joined(other, piece)
            if joined is not None:
                del self.pieces[at]
                self._add(joined)  # which may touch another one now
                return
        self.pieces.append(piece)
        if len(self.pieces) > PIECES:
            self.pieces = None


def gather(found: dict[str, Share], data: Iterable[tuple[str, Share]]) -> None:
    """Add to what was found of each key what more of it there is."""
    for key, share in data:
        if key not in found:
            found[key] = Share(share.size, [])
        found[key].add(share)


def _joined(one: Piece, two: Piece) -> Piece | None:
    """Return the rectangle that two of them make together, if they make one."""
    if one[0] != two[0]:
        return None
    for at, same in ((1, 3), (3, 1)):
        touch = one[at] <= two[at + 1] and two[at] <= one[at + 1]
        if touch and one[same : same + 2] == two[same : same + 2]:
            low, high = min(one[at], two[at]), max(one[at + 1], two[at + 1])
            return (one[0], low, high, *one[3:]) if at == 1 else (*one[:3], low, high)
    return None


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
        self.own: dict[str, View] = {}  # how the checkpoint tensors lie that were offered in this storage
        self.shares: dict[str, Share] = {}  # of those whose data came from another, which part has come

    def note(self, data: dict[str, Share]) -> None:
        """Record which part of each key's tensor has reached this storage."""
        gather(self.shares, data.items())

    def share(self, view: View, key: str) -> Share:
        """Return which part of a key's tensor a view may hold; in a storage it was copied to, any view holds all."""
        whole = self.own.get(key)
        if whole is not None:
            return Share(whole.elements * whole.itemsize, view.pieces(whole))
        return self.shares.get(key) or Share()

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

"""How much of a checkpoint tensor was taken, from the rectangles of its bytes that each rank took."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

__all__ = ["Piece", "covered"]

Piece = tuple[int, int, int, int, int]
"""Bytes of a row, first row, row after the last, first byte in each of them, byte after the last."""


def covered(size: int, pieces: Iterable[Piece]) -> int | None:
    """Return how many of a tensor's `size` bytes the pieces cover together; None if their rows do not fit together."""
    pieces = list(pieces)
    widths = {piece[0] for piece in pieces} - {size}
    if len(widths) > 1:
        return None
    width = widths.pop() if widths else size
    boxes = [box for piece in pieces for box in _in_rows(piece, width)]
    edges = sorted({edge for box in boxes for edge in box[3:]})
    total = 0
    for left, right in itertools.pairwise(edges):
        done = 0
        for first, last in sorted(box[1:3] for box in boxes if box[3] <= left and right <= box[4]):
            total += max(0, last - max(first, done)) * (right - left)
            done = max(done, last)
    return total


def _in_rows(piece: Piece, width: int) -> list[Piece]:
    """Return a piece as pieces of rows `width` long: a range that breaks rows is at most three."""
    if piece[0] == width:
        return [piece]
    (first, left), (last, right) = divmod(piece[3], width), divmod(piece[4], width)
    if first == last:
        return [(width, first, first + 1, left, right)]
    head = [(width, first, first + 1, left, width)] if left else []
    tail = [(width, last, last + 1, 0, right)] if right else []
    return [*head, (width, first + bool(left), last, 0, width), *tail]

"""What a tensor's data look like: NaN, infinities, all zero, constant rows. Streamed; imports numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint.data import blocks
from harness.checkpoint.findings import Finding, Severity
from harness.checkpoint.header import BITS, Shard

__all__ = ["BLOCK", "Statistics", "judge", "measure"]

BLOCK = 8 << 20
"""Bytes that are read at a time. Peak memory is some five times that, whatever the tensor's size."""

_FLOATS = ("F16", "BF16", "F32", "F64", "C64", "F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What was counted in one tensor.

    `nan` and `inf` are numbers of elements. A row runs along the last axis; `rows` is 0 for vectors and scalars, whose
    being constant says nothing. Dtypes of less than a byte are looked at as bytes.
    """

    nan: int
    inf: int
    all_zero: bool
    rows: int
    constant_rows: int


def measure(shard: Shard, name: str) -> Statistics:
    """Read all of a tensor and count. Raises `CheckpointError` when the data cannot be read."""
    tensor = shard.tensors[name]
    bits = BITS[tensor.dtype]
    width = tensor.shape[-1] if len(tensor.shape) > 1 and bits >= 8 else 0
    row_bytes = width * bits // 8
    limit = BLOCK // row_bytes * row_bytes if 0 < row_bytes <= BLOCK else BLOCK
    nan = inf = 0
    zero = True
    rows = _Rows(width)
    for block in blocks(shard, name, limit):
        words = block.view(_UNSIGNED[block.dtype.itemsize])
        if tensor.dtype in _FLOATS:
            nan += int(np.count_nonzero(np.isnan(block)))
            inf += int(np.count_nonzero(np.isinf(block)))
        zero = zero and not _has_nonzero(words, tensor.dtype)
        rows.add(words)
    total = tensor.nbytes // row_bytes if row_bytes else 0
    return Statistics(nan, inf, zero and tensor.nbytes > 0, total, rows.constant)


def _has_nonzero(words: NDArray[Any], dtype: str) -> bool:
    """Return whether an element is neither 0 nor -0. F8_E8M0 is an exponent without sign and has no zero."""
    if dtype == "F8_E8M0":
        return True
    if dtype == "C64":
        words = words.view(np.uint32)
    return bool((words << words.dtype.type(1) if dtype in _FLOATS else words).any())


class _Rows:
    """Counts rows whose elements are all the same, bit by bit, over blocks that may end within a row."""

    def __init__(self, width: int) -> None:
        self.constant = 0
        self._width = width
        self._seen = 0
        self._first: Any = None
        self._same = True

    def add(self, words: NDArray[Any]) -> None:
        if not self._width:
            return
        if self._seen == 0 and len(words) % self._width == 0:
            table = words.reshape(-1, self._width)
            self.constant += int(np.count_nonzero((table == table[:, :1]).all(axis=1)))
            return
        while len(words):
            part, words = words[: self._width - self._seen], words[self._width - self._seen :]
            if self._seen == 0:
                self._first, self._same = part[0], True
            self._same = self._same and bool((part == self._first).all())
            self._seen += len(part)
            if self._seen == self._width:
                self.constant += self._same
                self._seen = 0


def judge(name: str, dtype: str, found: Statistics) -> Iterator[Finding]:
    """Say what is wrong with a tensor. Codes: INS301 NaN, INS302 infinity, INS303 all zero, INS304 constant rows."""
    remedy = "export again; if it comes back, training has diverged or the tensor was never written"
    for code, count, what in (("INS301", found.nan, "NaN"), ("INS302", found.inf, "infinite")):
        if count:
            yield Finding(code, Severity.ERROR, name, f"{count} elements are {what}", remedy)
    if dtype not in _FLOATS:
        return
    if found.all_zero:
        matrix = found.rows > 0
        yield Finding(
            "INS303",
            Severity.ERROR if matrix else Severity.WARNING,
            name,
            "every element is zero",
            remedy if matrix else "a bias, or a norm that adds one, may be zero; other vectors may not",
        )
    elif found.constant_rows:
        yield Finding(
            "INS304",
            Severity.NOTE if found.constant_rows < found.rows else Severity.WARNING,
            name,
            f"{found.constant_rows} of {found.rows} rows hold one value throughout (rows of padding do)",
        )

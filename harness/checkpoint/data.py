"""Reading a tensor's data, in pieces of bounded size. Imports numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from harness.checkpoint.header import BITS, Shard
from harness.errors import CheckpointError

__all__ = ["NUMPY", "alike", "blocks", "whole"]

NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.uint8,  # as a bool, a byte of 2 would be True and equal to nothing
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I16": "<i2",
        "U16": "<u2",
        "F16": "<f2",
        "BF16": ml_dtypes.bfloat16,
        "I32": "<i4",
        "U32": "<u4",
        "F32": "<f4",
        "C64": "<c8",
        "F64": "<f8",
        "I64": "<i8",
        "U64": "<u8",
    }.items()
}
"""NumPy's dtype for each of safetensors'. Those of less than a byte have none: NumPy cannot address them."""


def blocks(shard: Shard, name: str, limit: int) -> Iterator[NDArray[Any]]:
    """Yield a tensor's elements in order, flat, in arrays of at most `limit` bytes, each gone when the next is read.

    A dtype of less than a byte comes as bytes (uint8).

    Raises:
        CheckpointError: the file became shorter, or cannot be read.

    """
    tensor = shard.tensors[name]
    dtype = NUMPY.get(tensor.dtype, np.dtype(np.uint8))
    step = max(limit // dtype.itemsize, 1) * dtype.itemsize
    position, end = shard.span(name)
    try:
        with shard.path.open("rb", buffering=0) as handle:
            while position < end:
                raw = os.pread(handle.fileno(), min(step, end - position), position)
                raw = raw[: len(raw) // dtype.itemsize * dtype.itemsize]
                if not raw:
                    raise CheckpointError(
                        f"{shard.path}: byte {position}: the file became shorter while it was read",
                        remedy="wait until it is written, then try again",
                    )
                yield np.frombuffer(raw, dtype)
                position += len(raw)
    except OSError as error:
        raise CheckpointError(f"{shard.path}: byte {position}: cannot be read: {error.strerror}") from error


def alike(shard: Shard, name: str, other_shard: Shard, other: str) -> bool:
    """Whether two tensors have the same shape and values, of whatever dtypes, as far as the coarser one can tell.

    Raises as `blocks`.
    """
    one, two = shard.tensors[name], other_shard.tensors[other]
    if one.shape != two.shape:
        return False
    sizes = [BITS[one.dtype], BITS[two.dtype]]
    if one.dtype != two.dtype and min(sizes) < 8:
        return False  # values that are packed in other ways
    limit = 1 << 24
    coarser = NUMPY.get((one if sizes[0] <= sizes[1] else two).dtype, np.dtype(np.uint8))
    pairs = zip(
        blocks(shard, name, limit // 64 * sizes[0]), blocks(other_shard, other, limit // 64 * sizes[1]), strict=True
    )
    if one.dtype == two.dtype:
        return all(np.array_equal(left.view(np.uint8), right.view(np.uint8)) for left, right in pairs)
    return all(np.array_equal(left.astype(coarser), right.astype(coarser)) for left, right in pairs)


def whole(shard: Shard, name: str) -> NDArray[Any]:
    """Return a tensor, in its shape. For small ones. Raises as `blocks`, and ValueError for less than a byte."""
    tensor = shard.tensors[name]
    if BITS[tensor.dtype] < 8:
        raise ValueError(f"{tensor.dtype} has no NumPy dtype")
    parts = list(blocks(shard, name, 1 << 24))
    flat = np.concatenate(parts) if parts else np.empty(0, NUMPY[tensor.dtype])
    return flat.reshape(tensor.shape)

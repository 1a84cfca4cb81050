"""The header of one safetensors file: its tensors, or at which byte it is wrong.

Two ways lead through a header and must agree (tests/fuzz): `_quick` decodes what every writer writes, in a tenth of a
second for 200,000 tensors, and declines everything else; `_careful` reads byte by byte and says what is wrong.

The format is that of safetensors 0.8 (README.md, "Format"): 8 bytes of little-endian length, a JSON object, the data.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.checkpoint.strict_json import JsonError, Scanner, shorten
from harness.errors import CheckpointError

__all__ = ["BITS", "HEADER_LIMIT", "Dtype", "HeaderError", "Shard", "Tensor", "parse", "read_header", "refuse_pickle"]

HEADER_LIMIT = 100_000_000
"""Bytes. The limit of safetensors itself."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes under which pickled checkpoints lie."""

_LENGTH = 8
_QUICK_LIMIT = 32 << 20
"""Bytes of the largest header that is decoded in one go. Hostile JSON takes up to ten times its size in memory."""
_DIMS_LIMIT = 64
"""NumPy's limit, too."""
_WORD = 1 << 64
"""Sizes are 64-bit in every reader of the format; a product that reaches this would wrap around in a careless one."""

Dtype = Literal[
    "BOOL",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
]
"""The dtypes of safetensors 0.8, in its spelling."""

BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
"""Bits per element of each dtype."""


# `gc=False`: it holds no references back, and 200,000 of them would make the collector run for longer than the reading.
class Tensor(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One tensor, as its header declares it. `data_offsets` are begin and end within the data of its file, in bytes."""

    dtype: Dtype
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.data_offsets[1] - self.data_offsets[0]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One safetensors file. `tensors` in the order of the header; `data_start` and `size` in bytes of the file."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    data_start: int
    size: int

    def span(self, name: str) -> tuple[int, int]:
        """Return the first byte of a tensor's data in the file, and the first after it."""
        begin, end = self.tensors[name].data_offsets
        return self.data_start + begin, self.data_start + end


class HeaderError(CheckpointError):
    """A safetensors file whose header is wrong. `offset` is the byte of the file at which it is."""

    def __init__(self, path: Path, offset: int, why: str, *, remedy: str = "copy or download the file again") -> None:
        super().__init__(f"{path}: byte {offset}: {why}", remedy=remedy)
        self.path = path
        self.offset = offset
        self.why = why


def read_header(path: Path) -> Shard:
    """Read the header of one safetensors file; none of its data.

    At most 100 MB are read, whatever the file says of itself.

    Raises:
        HeaderError: the file is not a safetensors file, or damaged; with the offset.
        CheckpointError: it cannot be opened, is not a regular file, or is a pickle.

    """
    refuse_pickle(path)
    try:
        # A pipe would block the opening until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path}: is not a regular file", remedy="give a .safetensors file")
            raw = _header_bytes(path, descriptor, found.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}", remedy="check the path and its permissions"
        ) from error
    return parse(raw, path, found.st_size)


def refuse_pickle(path: Path) -> None:
    """Raise `CheckpointError` for a file whose name says that it is a pickle."""
    if path.suffix in PICKLES:
        raise CheckpointError(f"{path}: pickled checkpoints are not opened: a pickle runs code", remedy=_UNPICKLE)


_UNPICKLE = (
    "convert it: torch.load(FILE, weights_only=True, map_location='cpu'), which runs no code, "
    "then safetensors.torch.save_file(TENSORS, 'model.safetensors')"
)

_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "this is a zip archive, as torch.save writes its pickles, not safetensors", _UNPICKLE),
    (b"\x80\x02", "this is a pickle, not safetensors", _UNPICKLE),
    (b"version ", "this is a Git LFS pointer, not the file that it stands for", "fetch the data: git lfs pull"),
    (b"GGUF", "this is a GGUF file, not safetensors", "give the checkpoint that it was converted from"),
)
"""How files begin that are taken for safetensors. Read as a header's length, each exceeds the limit or the file."""


def _header_bytes(path: Path, descriptor: int, size: int) -> bytes:
    first = os.pread(descriptor, _LENGTH, 0)
    if len(first) < _LENGTH:
        raise HeaderError(path, len(first), f"the file ends within the {_LENGTH} bytes that give its header's length")
    (length,) = struct.unpack("<Q", first)
    if length > HEADER_LIMIT or _LENGTH + length > size:
        for signature, why, remedy in _SIGNATURES:
            if first.startswith(signature):
                raise HeaderError(path, 0, why, remedy=remedy)
        if length > HEADER_LIMIT:
            raise HeaderError(path, 0, f"a header of {length} bytes; the format's limit is {HEADER_LIMIT}")
        raise HeaderError(path, 0, f"a header of {length} bytes, but the file ends at byte {size}")
    raw = bytearray()
    while len(raw) < length:
        block = os.pread(descriptor, length - len(raw), _LENGTH + len(raw))
        if not block:
            raise HeaderError(path, _LENGTH + len(raw), "the file became shorter while it was read")
        if len(block) == length:
            return block
        raw += block
    return bytes(raw)


def parse(raw: bytes, path: Path, size: int) -> Shard:
    """Return the shard that a header, without its 8 bytes of length, declares in a file of `size` bytes.

    Raises:
        HeaderError: with the offset in the file.

    """
    data_size = size - _LENGTH - len(raw)
    tensors, metadata = _quick(raw, data_size) or _careful(raw, path, data_size)
    return Shard(path, tensors, metadata, _LENGTH + len(raw), size)


class _Sizes(dict[tuple[str, tuple[int, ...]], int]):
    """Bytes by (dtype, shape); -1 where there is no such size. Checkpoints repeat a few shapes very often."""

    def __missing__(self, key: tuple[str, tuple[int, ...]]) -> int:
        found = _size(*key)
        size = self[key] = -1 if isinstance(found, str) or len(key[1]) > _DIMS_LIMIT else found
        return size


def _size(dtype: str, shape: tuple[int, ...]) -> int | str:
    """Return the bytes that a tensor takes, or why there is no such tensor."""
    bits = BITS[dtype]
    elements = 1
    for extent in shape:
        elements *= extent
        if extent < 0 or extent >= _WORD or elements >= _WORD:
            return f"the product of the shape {shorten(list(shape))} overflows 64 bits"
    if elements * bits >= _WORD:
        return f"the size in bits of {dtype} {shorten(list(shape))} overflows 64 bits"
    if elements * bits % 8:
        return f"{dtype} {shorten(list(shape))} does not end on a whole byte"
    return elements * bits // 8


_TENSORS: msgspec.json.Decoder[dict[str, Tensor]] = msgspec.json.Decoder(dict[str, Tensor])
_STRINGS: msgspec.json.Decoder[dict[str, str]] = msgspec.json.Decoder(dict[str, str])
_METADATA = re.compile(
    rb'\{[ \t\n\r]*"__metadata__"[ \t\n\r]*:[ \t\n\r]*(\{[^{}]*\})[ \t\n\r]*(?:,(?=[ \t\n\r]*")|(?=\}))'
)


def _quick(raw: bytes, data_size: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Decode a header as writers write it, or return None for `_careful` to read, or refuse, it.

    msgspec takes the last of two equal keys. Here that shows in the number of quotation marks, which nothing escapes:
    each of the five strings of a tensor has two, and whatever was overridden had as many.
    """
    # msgspec reads -0 as an integer, safetensors does not.
    if len(raw) > _QUICK_LIMIT or b"\\" in raw or b"-0" in raw or raw[:1] != b"{":
        return None
    metadata: dict[str, str] = {}
    try:
        if match := _METADATA.match(raw):
            metadata = _STRINGS.decode(match[1])
            if match[1].count(b'"') != 4 * len(metadata):
                return None
            raw = b"{" + raw[match.end() :]
        tensors = _TENSORS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if raw.count(b'"') != 10 * len(tensors) or "__metadata__" in tensors:
        return None
    sizes = _Sizes()
    fits = _covers(tensors.values(), sizes, data_size) or _covers(_by_offset(tensors.values()), sizes, data_size)
    return (tensors, metadata) if fits else None


def _by_offset(tensors: Iterable[Tensor]) -> list[Tensor]:
    return sorted(tensors, key=operator.attrgetter("data_offsets"))


def _covers(tensors: Iterable[Tensor], sizes: _Sizes, data_size: int) -> bool:
    """Return whether tensors of a right size follow each other from the first byte of the data to the last."""
    position = 0
    for tensor in tensors:
        begin, end = tensor.data_offsets
        if begin != position or end - begin != sizes[tensor.dtype, tensor.shape]:
            return False
        position = end
    return position == data_size


def _careful(raw: bytes, path: Path, data_size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a header byte by byte. Raises `HeaderError`."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    places: dict[str, int] = {}
    try:
        scanner = Scanner(raw)
        if raw[:1] != b"{":
            scanner.fail("a header begins with '{'")
        for name, at in scanner.members():
            if name == "__metadata__":
                metadata = {key: scanner.string() for key, _ in scanner.members()}
            else:
                tensors[name], places[name] = _tensor(scanner, name, at), at
        scanner.end()
        _require_layout(scanner, tensors, places)
    except JsonError as error:
        raise HeaderError(path, _LENGTH + error.offset, f"in the header: {error.why}") from None
    position = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if position != data_size:
        start = _LENGTH + len(raw)
        what = "the file is truncated" if position > data_size else "bytes of no tensor follow"
        raise HeaderError(
            path,
            start + min(position, data_size),
            f"{what}: the last tensor ends at byte {start + position}, the file at byte {start + data_size}",
        )
    return tensors, metadata


def _tensor(scanner: Scanner, name: str, at: int) -> Tensor:
    """Read what stands behind a tensor's name, which is at `at`. Raises `JsonError`."""
    found: dict[str, Any] = {}
    for key, place in scanner.members():
        match key:
            case "dtype":
                found[key] = scanner.string()
                if found[key] not in BITS:
                    scanner.fail(f"unknown dtype {shorten(found[key])}", place)
            case "shape":
                found[key] = scanner.wholes(_DIMS_LIMIT)
            case "data_offsets":
                found[key] = scanner.wholes(2)
                if len(found[key]) != 2:
                    scanner.fail("data_offsets must be two integers", place)
            case _:
                scanner.fail(f"a tensor has no field {shorten(key)}", place)
    if missing := [field for field in Tensor.__struct_fields__ if field not in found]:
        scanner.fail(f"tensor {shorten(name)}: without {' and '.join(missing)}", at)
    tensor = Tensor(**found)
    size = _size(tensor.dtype, tensor.shape)
    if isinstance(size, str):
        scanner.fail(f"tensor {shorten(name)}: {size}", at)
    if tensor.nbytes != size:
        what = f"{tensor.dtype} {shorten(list(tensor.shape))} takes {size} bytes"
        apart = f"its data_offsets {list(tensor.data_offsets)} are {tensor.nbytes} apart"
        scanner.fail(f"tensor {shorten(name)}: {what}, but {apart}", at)
    return tensor


def _require_layout(scanner: Scanner, tensors: Mapping[str, Tensor], places: Mapping[str, int]) -> None:
    """Raise `JsonError` unless the tensors follow each other without gap or overlap."""
    position, before = 0, ""
    for name in sorted(tensors, key=lambda name: tensors[name].data_offsets):
        begin, end = tensors[name].data_offsets
        if begin != position:
            what = "overlaps with" if begin < position else "leaves a gap after"
            where = shorten(before) if before else "the beginning of the data"
            scanner.fail(
                f"tensor {shorten(name)} {what} {where}: it begins at byte {begin} of the data, not {position}",
                places[name],
            )
        position, before = end, name

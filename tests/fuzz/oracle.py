"""What must hold for any bytes at all. Run by the tests on the corpus and on generated input, and by the fuzzer."""

import json
import os
import tempfile
from pathlib import Path

import safetensors

from harness.checkpoint import header as reader
from harness.checkpoint.header import HEADER_LIMIT, HeaderError, read_header
from harness.checkpoint.locate import _quick_index, explain_index
from harness.checkpoint.strict_json import JsonError, Scanner
from harness.errors import CheckpointError

STRICTER = (
    "is there twice",
    "a tensor has no field",
    "an array of more than 64 integers",
    "a header begins with '{'",
    "'{' expected, found 'n'",
)
"""Why a header is refused that safetensors 0.8 accepts: it takes the last of two equal keys, skips fields that it does
not know, takes any number of dimensions, space before the brace, and `null` for metadata."""

STRICTER_THAN_JSON = ("is there twice", "nested more than", "digits", "surrogate", "not UTF-8")
"""Why a text is refused that `json` accepts."""

# One place for all files: the fuzzer makes a million of them.
_FOLDER = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def _file(name, data):
    path = Path(_FOLDER.name) / f"{os.getpid()}-{name}"
    path.write_bytes(data)
    return path


def header(data):
    """Read `data` as a safetensors file. Return the tensors, or None if it is refused."""
    ours = error = None
    try:
        ours = {name: (t.dtype, t.shape) for name, t in read_header(_file("model.safetensors", data)).tensors.items()}
    except HeaderError as caught:
        error = caught
    assert error is None or (0 <= error.offset <= len(data) and len(str(error)) < 2000), error
    _two_ways(data)
    try:
        theirs = {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(data)}
    except safetensors.SafetensorError:
        theirs = None
    if theirs is None:
        assert ours is None, "accepted, though safetensors refuses it"
    elif ours is None:
        assert any(reason in error.why for reason in STRICTER), f"refused, though safetensors accepts it: {error.why}"
    else:
        assert ours == theirs
    return ours


def _two_ways(data):
    """The quick way declines, or says what the careful way says."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(HEADER_LIMIT, len(data) - 8):
        return
    raw, size = data[8 : 8 + length], len(data) - 8 - length
    quick = reader._quick(raw, size)
    if quick is not None:
        assert quick == reader._careful(raw, Path("x"), size)


def text(data):
    """Read `data` as JSON. Return the value, or None if it is refused."""
    ours = error = None
    try:
        scanner = Scanner(data)
        ours = scanner.value()
        scanner.end()
    except JsonError as caught:
        error = caught
    try:
        theirs = json.loads(data.decode())
    except (ValueError, RecursionError):
        assert error is not None, "accepted, though json refuses it"
        return None
    if error is None:
        assert repr(ours) == repr(theirs)
        return ours
    assert 0 <= error.offset <= len(data), error
    assert any(reason in error.why for reason in STRICTER_THAN_JSON), f"refused, though json accepts it: {error}"
    return None


def index(data):
    """Read `data` as an index. Return the tensors by file, or None if it is refused."""
    quick, careful, error = _quick_index(data), None, None
    try:
        careful = explain_index(_file("index.json", data))
    except CheckpointError as caught:
        error = caught
    # Two files for one tensor: `read` sees that one of them does not have it, or that both have.
    assert quick is None or quick == careful or "is there twice" in str(error), error
    return careful

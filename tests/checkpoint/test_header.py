"""The header reader: what it reads, and every kind of bad file refused with its name and the byte."""

import os
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.checkpoint.header import HEADER_LIMIT, HeaderError, read_header
from harness.errors import CheckpointError
from tests.checkpoint.files import blob, entry, text


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a file and gives its path."""

    def write(content):
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return path

    return write


def test_what_safetensors_writes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(
        {"b": np.zeros((2, 3), np.float32), "a": np.arange(5), "none": np.zeros((0, 7), np.int8)}, path, {"k": "v"}
    )
    shard = read_header(path)
    assert {name: (t.dtype, t.shape) for name, t in shard.tensors.items()} == {
        "b": ("F32", (2, 3)),
        "a": ("I64", (5,)),
        "none": ("I8", (0, 7)),
    }
    assert shard.metadata == {"k": "v"}
    begin, end = shard.span("a")
    assert (np.frombuffer(path.read_bytes()[begin:end], np.int64) == np.arange(5)).all()


@pytest.mark.parametrize(
    "header",
    [
        f'{{ "__metadata__" : {{"a":"{{}}"}} , "x":{text()}}}',
        f'{{"x":{text()},"__metadata__":{{"a":"b"}}}}',
        f'{{"\\u0078":{text()}}}   ',
        f'{{"x":{text(shape="[2, 2]")}\n}}',
    ],
)
def test_unusual_and_right(written, header):
    assert list(read_header(written(blob(header, bytes(4)))).tensors) == ["x"]


def test_tensors_in_another_order_than_their_data(written):
    shard = read_header(written(blob({"b": entry(offsets=(4, 8)), "a": entry()}, bytes(8))))
    assert shard.span("a")[1] == shard.span("b")[0]


# What is wrong: the file; the byte, as a number, counted from the end if negative, or as what stands there; the reason.
BAD = {
    "empty": (b"", 0, "ends within the 8 bytes"),
    "five bytes": (bytes(5), 5, "ends within the 8 bytes"),
    "header beyond the file": (blob("{}", length=3), 0, "ends at byte 10"),
    "header above 100 MB": (blob("{}", length=HEADER_LIMIT + 1), 0, "limit is 100000000"),
    "length of 2^64 - 1": (b"\xff" * 64, 0, "limit"),
    "no header": (blob(""), 8, "begins with '{'"),
    "space in front": (blob(" {}"), 8, "begins with '{'"),
    "byte order mark": (blob("\ufeff{}"), 8, "begins with '{'"),
    "not UTF-8": (blob(b'{"\xff":1}'), 10, "UTF-8"),
    "half a surrogate": (blob(f'{{"\\ud800":{text()}}}', bytes(4)), 9, "surrogate"),
    "cut JSON": (blob('{"a":{"dtype":"U8",'), 8 + 19, "expected, found the end"),
    "text behind": (blob('{} {"a":1}'), b'{"a":1}', "after the end"),
    "an array": (blob("[]"), 8, "begins with '{'"),
    "comma at the end": (blob('{"__metadata__":{},}'), b"}", "expected"),
    "control character": (blob('{"a\n":1}'), b"\n", "control character"),
    "tensor twice": (blob(f'{{"a":{text()},"a":{text()}}}', bytes(4)), b'"a":', "'a' is there twice"),
    "tensor twice, once escaped": (
        blob(f'{{"a":{text()},"\\u0061":{text()}}}', bytes(4)),
        b'"\\u0061',
        "'a' is there twice",
    ),
    "field twice": (
        blob('{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x"),
        b'"dtype"',
        "twice",
    ),
    "metadata twice": (
        blob('{"__metadata__":{},"__metadata__":{}}'),
        b'"__metadata__"',
        "'__metadata__' is there twice",
    ),
    "key of metadata twice": (blob('{"__metadata__":{"a":"b","a":"b"}}'), b'"a"', "'a' is there twice"),
    "metadata not text": (blob('{"__metadata__":{"a":1}}'), b"1", "expected"),
    "unknown dtype": (blob({"a": entry("F7")}, bytes(4)), b'"dtype"', "unknown dtype 'F7'"),
    "unknown field": (blob('{"a":{"strides":[1]}}'), b'"strides"', "no field 'strides'"),
    "missing field": (blob('{"a":{"dtype":"U8","shape":[4]}}', bytes(4)), b'"a"', "without data_offsets"),
    "null": (blob('{"a":null}'), b"null", "'{' expected"),
    "three offsets": (blob(f'{{"a":{text(offsets="[0,4,4]")}}}', bytes(4)), b"4]", "more than 2"),
    "one offset": (blob(f'{{"a":{text(offsets="[4]")}}}', bytes(4)), b'"data_offsets"', "two integers"),
    "negative extent": (blob(f'{{"a":{text(shape="[-4]")}}}', bytes(4)), b"-4", "integer from 0 up"),
    "minus zero": (blob(f'{{"a":{text(shape="[-0]", offsets="[0,0]")}}}'), b"-0", "integer from 0 up"),
    "fraction": (blob(f'{{"a":{text(shape="[4.0]")}}}', bytes(4)), b"4.0", "integer from 0 up"),
    "5000 digits": (blob(f'{{"a":{text(shape="[" + "9" * 5000 + "]")}}}'), b"9" * 5000, "5000 digits"),
    "65 dimensions": (blob({"a": entry(shape=[1] * 65, offsets=(0, 1))}, b"x"), None, "more than 64"),
    "product overflows": (blob({"a": entry(shape=[1 << 32, 1 << 32], offsets=(0, 0))}), b'"a"', "overflows 64 bits"),
    "product overflows to the size": (blob({"a": entry(shape=[(1 << 62) + 1, 4])}, bytes(4)), b'"a"', "overflows"),
    "bits overflow": (blob({"a": entry("I64", shape=[1 << 60], offsets=(0, 0))}), b'"a"', "in bits"),
    "overflow hidden by a zero": (blob({"a": entry(shape=[0, 1 << 70], offsets=(0, 0))}), b'"a"', "overflows"),
    "half a byte": (blob({"a": entry("F4", shape=[3], offsets=(0, 2))}, bytes(2)), b'"a"', "whole byte"),
    "size is not the shape's": (blob({"a": entry(shape=[5])}, bytes(4)), b'"a"', "takes 5 bytes"),
    "offsets backwards": (blob({"a": entry(offsets=(4, 0))}, bytes(4)), b'"a"', "-4 apart"),
    "overlap": (blob({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)), b'"b"', "'b' overlaps with 'a'"),
    "the same data twice": (blob({"a": entry(), "b": entry()}, bytes(4)), b'"b"', "'b' overlaps with 'a'"),
    "gap": (blob({"a": entry(), "b": entry(offsets=(5, 9))}, bytes(9)), b'"b"', "'b' leaves a gap after 'a'"),
    "gap in front": (blob({"a": entry(offsets=(1, 5))}, bytes(5)), b'"a"', "gap after the beginning"),
    "data cut": (blob({"a": entry()}, bytes(3)), -1, "truncated"),
    "out of range": (blob({"a": entry(shape=[1 << 40], offsets=(0, 1 << 40))}, bytes(3)), -1, "truncated"),
    "bytes behind": (blob({"a": entry()}, bytes(5)), -2, "bytes of no tensor follow"),
    "nested": (blob('{"a":' * 100_000), 14, "no field 'a'"),
    "nested arrays": (blob('{"a":' + "[" * 100_000), 8 + 5, "'{' expected"),
    "nested in a shape": (blob('{"a":{"shape":' + "[" * 100_000), 8 + 15, "integer from 0 up"),
    "a shape of a million": (blob('{"a":{"shape":[' + "1," * 1_000_000), None, "more than 64"),
    "zip": (b"PK\x03\x04" + bytes(range(64)), 0, "zip archive"),
    "pickle": (b"\x80\x02}q\x00X\x01\x00\x00\x00", 0, "is a pickle"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 0, "Git LFS"),
    "GGUF": (b"GGUF\x03" + bytes(range(64)), 0, "GGUF"),
}


@pytest.mark.parametrize(("content", "offset", "why"), BAD.values(), ids=BAD)
def test_bad_files(written, content, offset, why):
    path = written(content)
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    assert why in caught.value.why
    assert str(path) in str(caught.value)
    if isinstance(offset, bytes):
        offset = content.rindex(offset)
    elif offset is not None and offset < 0:
        offset += len(content) + 1
    assert offset is None or caught.value.offset == offset
    assert len(str(caught.value)) < 1000


def test_the_message_names_the_byte_where_names_are_not_ascii(written):
    path = written(blob(f'{{"größe":{text()},"größe":{text()}}}', bytes(4)))
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    assert path.read_bytes()[caught.value.offset :].startswith('"größe"'.encode())


def test_the_largest_header_is_read_within_bounds(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", HEADER_LIMIT) + b'{"a":{"shape":[')
        handle.truncate(8 + HEADER_LIMIT)
    with pytest.raises(HeaderError, match="integer from 0 up"):
        read_header(path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_pickles_are_not_opened(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"runs code(.|\n)*weights_only=True"):
        read_header(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(path)


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "model.safetensors")

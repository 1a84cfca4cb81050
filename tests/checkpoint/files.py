"""Writing safetensors files by hand, right and wrong."""

import json
import struct


def blob(header, data=b"", *, length=None):
    """Return a file: `header` as bytes, text or a dict; `length` to say something else than the truth."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def text(dtype="U8", shape="[4]", offsets="[0,4]"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'

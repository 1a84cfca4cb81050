"""Reading checkpoint folders, and refusing broken ones with the file's name."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness import checkpoint
from harness.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_headers_config_and_digest(folder):
    found = checkpoint.read(folder)
    assert found.tensors == {"a": checkpoint.Tensor((2, 3), "F32", "model.safetensors")}
    assert found.config == {"hidden_size": 4}
    assert found.digest == checkpoint.read(folder).digest


@pytest.mark.parametrize("what", ["data", "config"])
def test_digest_changes_with_content(folder, what):
    before = checkpoint.read(folder).digest
    if what == "data":
        save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    else:
        (folder / "config.json").write_text('{"hidden_size": 5}')
    assert checkpoint.read(folder).digest != before


def test_sharded(folder):
    save_file({"b": np.zeros(1, np.float32)}, folder / "two.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(checkpoint.read(folder).tensors) == {"a", "b"}
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"absent files: two\.safetensors"):
        checkpoint.read(folder)


def test_the_same_tensor_twice(folder):
    save_file({"a": np.zeros(1, np.float32)}, folder / "two.safetensors")
    with pytest.raises(CheckpointError, match="also in"):
        checkpoint.read(folder)


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (lambda f: (f / "config.json").unlink(), "no such file"),
        (lambda f: (f / "config.json").write_text("["), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "pickle"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 4), "not a readable safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "not a readable safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    ],
)
def test_broken(folder, break_it, match):
    break_it(folder)
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.read(folder)
    assert str(folder) in str(caught.value)

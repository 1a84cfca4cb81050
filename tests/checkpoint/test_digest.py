"""What a digest tells of a checkpoint that is too large to be read as a whole, and what that reading costs."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.checkpoint import digest as digests
from harness.checkpoint import read as checkpoint
from harness.errors import CheckpointError
from tests.checkpoint.files import blob, entry

ELEMENTS = 200_000
NAMES = ("embed", "layers.0.up", "layers.1.up", "lm_head", "norm")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint of two files of which samples are taken, as of one above 4 GiB."""
    monkeypatch.setattr(digests, "_FULL_LIMIT", 0)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write(folder)
    return folder


def write(folder, change=lambda tensors: None):
    rng = np.random.default_rng(1)
    tensors = {name: rng.integers(0, 2**16, ELEMENTS, np.uint16) for name in NAMES[:-1]}
    tensors["norm"] = rng.integers(0, 2**16, 8, np.uint16)
    change(tensors)
    for number, names in enumerate((NAMES[:1], NAMES[1:])):
        save_file({name: tensors[name] for name in names}, folder / f"model-{number}.safetensors")


def digest(folder):
    return checkpoint.read(folder).digest


def test_it_is_the_same_for_the_same_and_says_that_it_is_of_samples(folder):
    first = digest(folder)
    assert first.startswith("sha256-samples:")
    write(folder)
    assert digest(folder) == first


@pytest.mark.parametrize("share", [1.0, 0.02])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_was_trained_is_seen_even_if_few_of_its_elements_moved(folder, monkeypatch, name, share):
    monkeypatch.setattr(digests, "_SPREAD", 2)
    before = digest(folder)

    def train(tensors):
        moved = np.random.default_rng(2).random(tensors[name].size) < share
        moved[0] = True
        tensors[name] = tensors[name] ^ moved.astype(np.uint16)

    write(folder, train)
    assert digest(folder) != before


def test_a_stretch_of_a_large_tensor_is_seen(folder, monkeypatch):
    monkeypatch.setattr(digests, "_SPREAD", 100)
    before = digest(folder)

    def one_expert(tensors):
        tensors["lm_head"][ELEMENTS // 8 : ELEMENTS // 4] += 1

    write(folder, one_expert)
    assert digest(folder) != before


@pytest.mark.parametrize("place", [0, -1])
def test_the_first_and_the_last_byte_of_the_data_are_seen(folder, place):
    before = digest(folder)
    for name in ("model-0.safetensors", "model-1.safetensors"):
        shard = next(each for each in checkpoint.read(folder).shards if each.path.name == name)
        data = bytearray(shard.path.read_bytes())
        data[shard.data_start if place == 0 else place] ^= 1
        shard.path.write_bytes(data)
        after = digest(folder)
        assert after != before
        before = after


def test_other_names_shapes_and_configs_are_seen(folder):
    seen = {digest(folder)}
    (folder / "config.json").write_text('{"hidden_size": 5}')
    seen.add(digest(folder))
    write(folder, lambda tensors: tensors.update({"norm": tensors["norm"].reshape(2, 4)}))
    seen.add(digest(folder))
    (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")
    seen.add(digest(folder))
    assert len(seen) == 4


def test_more_than_4_gib_are_sampled_and_little_of_them_is_read(tmp_path, monkeypatch):
    size, names = 5 << 30, ("a", "b")
    half = size // 2
    header = json.dumps({name: entry("U8", (half,), (i * half, (i + 1) * half)) for i, name in enumerate(names)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(blob(header))
    start = path.stat().st_size
    os.truncate(path, start + size)  # all zeroes, which take no room
    (tmp_path / "config.json").write_text("{}")
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *words: read.append(words[1]) or pread(*words))
    before = digest(tmp_path)
    assert before.startswith("sha256-samples:")
    assert sum(read) < 32 << 20
    with path.open("r+b") as handle:
        handle.seek(start + half // 2 - 1000)
        handle.write(b"\1" * 2000)
    assert digest(tmp_path) != before


def test_of_too_many_tensors_the_largest_are_sampled(folder, monkeypatch):
    monkeypatch.setattr(digests, "_SPREAD", 2)
    monkeypatch.setattr(digests, "_TENSORS", 3)
    read, pread = [], os.pread
    found = checkpoint.read(folder)
    monkeypatch.setattr(os, "pread", lambda *words: read.append(words[2]) or pread(*words))
    assert found.digest
    assert len(read) == 3 + 2 * 2, "three tensors, and both ends of both files"


@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_a_file_that_became_shorter_is_named(folder, monkeypatch, limit):
    monkeypatch.setattr(digests, "_FULL_LIMIT", limit)
    found = checkpoint.read(folder)
    path = folder / "model-1.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model-1.*became shorter"):
        _ = found.digest


@pytest.mark.parametrize("limit", [0, 1 << 40])
@pytest.mark.parametrize("name", ["config.json", "model-0.safetensors"])
def test_a_file_that_is_gone_is_named(folder, monkeypatch, limit, name):
    monkeypatch.setattr(digests, "_FULL_LIMIT", limit)
    found = checkpoint.read(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        _ = found.digest

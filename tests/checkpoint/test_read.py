"""Reading checkpoints: folders, indices, caches, and what is wrong with them named by file."""

import gc
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.checkpoint import read as checkpoint
from harness.checkpoint.header import Tensor
from harness.checkpoint.locate import INDEX
from harness.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 4}')
    save_file({"a": np.zeros((2, 3), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(folder):
    """Two files and their index."""
    save_file({"b": np.zeros(1, np.float32)}, folder / "two.safetensors")
    write_index(folder, {"a": "model.safetensors", "b": "two.safetensors"})
    return folder


@pytest.fixture
def cache(tmp_path, folder, monkeypatch):
    """A Hugging Face cache that holds `org/name`: links in the snapshot, files in the blobs."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        shutil.move(folder / name, repository / "blobs" / f"{number}")
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return repository


def write_index(folder, weight_map):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / INDEX).write_text(text)


def test_headers_config_and_digest(folder):
    found = checkpoint.read(folder)
    assert found.tensors == {"a": Tensor("F32", (2, 3), (0, 24))}
    assert found.config == {"hidden_size": 4}
    assert found.shard_of("a").path == folder / "model.safetensors"
    assert found.digest == checkpoint.read(folder).digest


@pytest.mark.parametrize("what", ["data", "config"])
def test_digest_changes_with_content(folder, what):
    before = checkpoint.read(folder).digest
    if what == "data":
        save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    else:
        (folder / "config.json").write_text('{"hidden_size": 5}')
    assert checkpoint.read(folder).digest != before


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(folder, enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        checkpoint.read(folder)
        with pytest.raises(CheckpointError):
            checkpoint.read(folder / "nowhere")
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if before else gc.disable)()


def test_one_file(folder):
    assert set(checkpoint.read(folder / "model.safetensors").tensors) == {"a"}
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint.read(folder / "model.safetensors")
    assert checkpoint.read(folder / "model.safetensors", config_optional=True).config == {}


@pytest.mark.parametrize("named", ["", INDEX])
def test_sharded(sharded, named):
    save_file({"old": np.zeros(1, np.float32)}, sharded / "left-over.safetensors")
    found = checkpoint.read(sharded / named)
    assert list(found.tensors) == ["a", "b"]
    assert found.files.unlisted == ("left-over.safetensors",)
    assert found.shard_of("b").path.name == "two.safetensors"


def test_an_index_in_another_spelling(sharded):
    write_index(
        sharded, '{"weight_map": {"\\u0061": "model.safetensors", "b": "two.safetensors"}, "x": [1, {"y": null}]}'
    )
    assert list(checkpoint.read(sharded).tensors) == ["a", "b"]


def test_a_tensor_that_the_index_does_not_name(sharded):
    save_file({"b": np.zeros(1), "c": np.zeros(1)}, sharded / "two.safetensors")
    assert checkpoint.read(sharded).missing_in_index == ("c",)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ({"a": "model.safetensors", "b": "gone.safetensors"}, r"absent files: 'gone\.safetensors'"),
        ({"a": "model.safetensors", "b": "model.safetensors"}, "'b' is in model.safetensors, which does not have it"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "'a' is in two.safetensors, which does not have it"),
        ({"a": "../drafter/model.safetensors"}, "outside of its folder"),
        ({"a": "/etc/passwd"}, "outside of its folder"),
        ({"a": "config.json"}, "not a .safetensors file"),
        ({"a": "pytorch_model.bin"}, "not a .safetensors file"),
        ({"a": ""}, "not a .safetensors file"),
        ({"a": "./model.safetensors"}, "not a .safetensors file"),
        ({"a": 1}, r"byte 37: '\"' expected"),
        ('{"weight_map": {"a": "model.safetensors", "a": "two.safetensors"}}', r"byte 42: the key 'a' is there twice"),
        (
            '{"weight_map": {}, "weight_map": {"a": "model.safetensors"}}',
            r"byte 19: the key 'weight_map' is there twice",
        ),
        (
            '{"metadata": {"a": 1, "a": 2}, "weight_map": {"a": "model.safetensors"}}',
            "byte 22: the key 'a' is there twice",
        ),
        (
            '{"metadata": {"weight_map": {"a": "two.safetensors"}}, "weight_map": {"a": "two.safetensors"}}',
            "does not have",
        ),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a"', "byte 19"),
        ('{"x": ' + "[" * 100_000, "nested more than 64 deep"),
        ('{"weight_map": ' + '{"a":' * 100_000, "expected"),
    ],
)
def test_a_wrong_index(sharded, index, match):
    write_index(sharded, index)
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.read(sharded)
    assert str(sharded / INDEX) in str(caught.value)


@pytest.mark.parametrize("indexed", [True, False])
def test_the_same_tensor_twice(sharded, indexed):
    save_file({"a": np.zeros(1, np.float32), "b": np.zeros(1)}, sharded / "two.safetensors")
    if not indexed:
        (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"'a' is also in model\.safetensors"):
        checkpoint.read(sharded)


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (lambda f: (f / "config.json").unlink(), "no such file"),
        (lambda f: (f / "config.json").write_text("["), "byte 1: cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "config.json").write_text('{"a": {"b": 1, "b": 2}}'), "byte 15: .* 'b' is there twice"),
        (lambda f: (f / "config.json").write_bytes(b'{"\xff": 1}'), "byte 2: .* not UTF-8"),
        (lambda f: (f / "config.json").write_text('{"a":' * 100_000), "nested more than 64 deep"),
        (lambda f: (f / "config.json").write_text(" " * (17 << 20)), "larger than"),
        (lambda f: (f / "model.safetensors").unlink(), "pickle"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"weights_only=True"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 4), "byte 4: the file ends"),
    ],
)
def test_broken(folder, break_it, match):
    break_it(folder)
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.read(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX])
def test_links_out_of_the_folder(tmp_path, sharded, name):
    shutil.move(sharded / name, tmp_path / name)
    (sharded / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="link out of the checkpoint") as caught:
        checkpoint.read(sharded)
    assert str(sharded / name) in str(caught.value)


def test_links_within_the_folder_and_to_the_folder(tmp_path, folder):
    (folder / "model.safetensors").rename(folder / "data")
    (folder / "model.safetensors").symlink_to("data")
    (tmp_path / "link").symlink_to(folder)
    assert set(checkpoint.read(tmp_path / "link").tensors) == {"a"}


def test_the_cache_of_hugging_face(cache, monkeypatch):
    by_folder, by_snapshot = checkpoint.read(cache), checkpoint.read(cache / "snapshots" / "abc123")
    by_name = checkpoint.read("org/name")
    assert set(by_name.tensors) == set(by_folder.tensors) == set(by_snapshot.tensors) == {"a"}
    assert (by_name.files.repository, by_name.files.revision) == ("org/name", "abc123")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.parent / "elsewhere"))
    with pytest.raises(CheckpointError, match=r"no such repository in the cache .*elsewhere"):
        checkpoint.read("org/name")


def test_a_snapshot_that_links_out_of_its_repository(cache, tmp_path):
    link = cache / "snapshots" / "abc123" / "model.safetensors"
    shutil.move(cache / "blobs" / "1", tmp_path / "blob")
    link.unlink()
    link.symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match="link out of the checkpoint"):
        checkpoint.read("org/name")


def test_a_cache_whose_revision_is_not_there(cache):
    (cache / "refs" / "main").write_text("../../../secret")
    with pytest.raises(CheckpointError, match="no snapshot"):
        checkpoint.read("org/name")
    (cache / "refs" / "main").unlink()
    assert checkpoint.read("org/name").files.revision == "abc123"
    (cache / "snapshots" / "def").mkdir()
    with pytest.raises(CheckpointError, match="2 snapshots"):
        checkpoint.read("org/name")


@pytest.mark.parametrize("where", ["nowhere", "org/nowhere", "../nowhere", "", "a\0b", "x" * 5000, "~nobody-at-all/x"])
def test_nothing_there(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        checkpoint.read(where)


def test_a_link_to_itself(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError, match="config"):
        checkpoint.read(folder)

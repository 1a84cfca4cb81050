"""Writing: whole or not at all, bytes as they were, in bounded memory, over nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import harness
from harness.convert import write
from harness.errors import CheckpointError, UsageError
from tests.checkpoint.files import blob, entry
from tests.convert.support import convert, held, write_drafter

INDEX = "model.safetensors.index.json"
REPOSITORY = Path(harness.__file__).parents[1]


@pytest.fixture
def source(tmp_path):
    return write_drafter(tmp_path / "source", "modelopt")


@pytest.fixture
def sharded(source):
    """The drafter in three files with an index, two of them in folders of their own."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    (source / "part").mkdir()
    places = {}
    for number, file in enumerate(["a.safetensors", "part/b.safetensors", "part/c.safetensors"]):
        chosen = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(chosen, source / file, metadata={"format": "pt", "part": file})
        places |= dict.fromkeys(chosen, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (source / INDEX).write_text(json.dumps({"metadata": {"total_size": total, "by": "me"}, "weight_map": places}))
    return source


def left(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "source")


def test_other_readers_take_it_and_metadata_stay(source, tmp_path):
    made = convert(source, tmp_path / "made", "sglang")
    with safe_open(made / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(held(made))
    assert (made.stat().st_mode & 0o777) == (source.stat().st_mode & 0o777)
    assert left(tmp_path) == ["made"]


def test_shards_and_index(sharded, tmp_path):
    made = convert(sharded, tmp_path / "made", "sglang")
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in held(sharded).items()}
    assert held(made) == renamed
    old, new = (json.loads((folder / INDEX).read_text()) for folder in (sharded, made))
    assert new["metadata"] == old["metadata"]
    assert new["weight_map"] == {
        name.replace("layers.0.", "midlayer."): file for name, file in old["weight_map"].items()
    }
    with safe_open(made / "part/b.safetensors", "np") as file:
        assert file.metadata()["part"] == "part/b.safetensors"


def test_a_dropped_tensor_leaves_no_gap(sharded, tmp_path):
    trained = convert(sharded, tmp_path / "trained", "specforge")
    assert "t2d" in json.loads((trained / INDEX).read_text())["weight_map"]
    made = convert(trained, tmp_path / "made", "modelopt", lossy=["t2d"])
    assert held(made) == held(sharded)
    assert json.loads((made / INDEX).read_text())["metadata"]["total_size"] == sum(
        len(data) for _, _, data in held(sharded).values()
    )


def test_small_files_go_along_and_left_overs_do_not(sharded, tmp_path):
    (sharded / "tokenizer.json").write_text("{}")
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    save_file({"old": np.zeros(1)}, sharded / "left-over.safetensors")
    made = convert(sharded, tmp_path / "made", "sglang")
    assert left(made) == ["a.safetensors", "config.json", INDEX, "part", "tokenizer.json"]


def test_a_single_file_brings_its_config_only(source, tmp_path):
    (source / "notes.txt").write_text("mine")
    made = convert(source / "model.safetensors", tmp_path / "made", "sglang")
    assert left(made) == ["config.json", "model.safetensors"]


def test_a_hugging_face_cache(source, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--org--drafter"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (source / "README.md").write_text("card")
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    made = convert(Path("org/drafter"), tmp_path / "made", "sglang")
    assert left(made) == ["README.md", "config.json", "model.safetensors"]
    assert not any(path.is_symlink() for path in made.iterdir())
    for inside in (snapshot / "new", repository / "new", repository / "blobs" / "new"):
        with pytest.raises(UsageError, match="inside of the source"):
            convert(repository, inside, "sglang")


def test_links_between_shards(sharded, tmp_path):
    (sharded / "part" / "b.safetensors").rename(sharded / "store")
    (sharded / "part" / "b.safetensors").symlink_to("../store")
    made = convert(sharded, tmp_path / "made", "sglang")
    assert len(held(made)) == len(held(sharded))
    (sharded / "store").rename(tmp_path / "elsewhere")
    (sharded / "part" / "b.safetensors").unlink()
    (sharded / "part" / "b.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link out of the checkpoint"):
        convert(sharded, tmp_path / "other", "sglang")


def test_nothing_is_overwritten(source, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "link", "source"):
        with pytest.raises(UsageError, match="exists"):
            convert(source, tmp_path / name, "sglang")
    with pytest.raises(UsageError, match="inside of the source"):
        convert(source, source / "made", "sglang")
    (tmp_path / "alias").symlink_to(source)
    with pytest.raises(UsageError, match="inside of the source"):
        convert(source, tmp_path / "alias" / "made", "sglang")
    with pytest.raises(UsageError, match="no such folder"):
        convert(source, tmp_path / "no" / "made", "sglang")
    assert left(source) == ["config.json", "model.safetensors"]


def test_a_destination_made_meanwhile_is_left_alone(source, tmp_path, monkeypatch):
    synced = write._sync_folders

    def meanwhile(folder):
        (tmp_path / "made").mkdir()
        synced(folder)

    monkeypatch.setattr(write, "_sync_folders", meanwhile)
    with pytest.raises(UsageError, match="made by somebody else"):
        convert(source, tmp_path / "made", "sglang")
    assert left(tmp_path) == ["made"]
    assert left(tmp_path / "made") == []


def test_too_little_space_is_seen_beforehand(source, tmp_path, monkeypatch):
    found = os.statvfs(tmp_path)
    size = (source / "model.safetensors").stat().st_size
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, found.f_blocks, size, size, *found[5:])))
    with pytest.raises(write.DiskFullError, match="are to be written"):
        convert(source, tmp_path / "made", "sglang")
    assert left(tmp_path) == []


@pytest.mark.parametrize("call", ["copy_file_range", "pwrite", "fsync"])
def test_a_disk_that_runs_full_half_way(sharded, tmp_path, monkeypatch, call):
    real, calls = getattr(os, call), []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(write.DiskFullError, match="ran full"):
        convert(sharded, tmp_path / "made", "sglang")
    assert left(tmp_path) == []


def test_a_source_that_changes_meanwhile(source, tmp_path, monkeypatch):
    copy = write._copy

    def changed(*arguments):
        copy(*arguments)
        os.utime(source / "model.safetensors", ns=(1, 1))

    monkeypatch.setattr(write, "_copy", changed)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(source, tmp_path / "made", "sglang")
    assert left(tmp_path) == []


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_source_that_becomes_shorter(source, tmp_path, monkeypatch, by_kernel):
    copy = write._copy_data
    if not by_kernel:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)

    def cut(*arguments):
        os.truncate(source / "model.safetensors", 2000)
        copy(*arguments)

    monkeypatch.setattr(write, "_copy_data", cut)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: became shorter"):
        convert(source, tmp_path / "made", "sglang")
    assert left(tmp_path) == []


@pytest.mark.parametrize("index", [{}, {"metadata": None}, {"metadata": [1]}])
def test_an_index_without_sound_metadata(sharded, tmp_path, index):
    places = json.loads((sharded / INDEX).read_text())["weight_map"]
    (sharded / INDEX).write_text(json.dumps({**index, "weight_map": places}))
    made = convert(sharded, tmp_path / "made", "sglang")
    assert json.loads((made / INDEX).read_text())["metadata"].keys() == {"total_size"}


def test_odd_names_and_texts(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"note": "\u00e9 \U0001f642 \n \x7f"}))
    (tmp_path / ".[a]*.draftgate-mine").write_text("not a folder")
    made = convert(source, tmp_path / "[a]*", "sglang")
    assert json.loads((made / "config.json").read_text())["note"] == "\u00e9 \U0001f642 \n \x7f"
    assert left(tmp_path) == [".[a]*.draftgate-mine", "[a]*"]


def test_without_the_kernels_copy(sharded, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    expected = held(convert(sharded, tmp_path / "by-kernel", "sglang"))
    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(write, "_BLOCK", 100)
    assert held(convert(sharded, tmp_path / "by-block", "sglang")) == expected


BLOCKED = """
import sys
from pathlib import Path
from harness.convert import write
from tests.convert.support import convert
copy = write._copy
def blocked(*arguments):
    copy(*arguments)
    print("copied", flush=True)
    sys.stdin.read()
write._copy = blocked
convert(Path(sys.argv[1]), Path(sys.argv[2]), "sglang")
"""


def test_killed_half_way(sharded, tmp_path):
    command = [sys.executable, "-c", BLOCKED, sharded, tmp_path / "made"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"copied\n"
        [temporary] = left(tmp_path)
        assert temporary.startswith(".made.draftgate-")
        with pytest.raises(UsageError, match="another conversion is writing it"):
            convert(sharded, tmp_path / "made", "sglang")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert left(tmp_path) == [temporary]
    made = convert(sharded, tmp_path / "made", "sglang")
    assert left(tmp_path) == ["made"]
    assert len(held(made)) == len(held(sharded))


LIMITED = """
import errno, os, resource, sys
from pathlib import Path
import msgspec, numpy, harness.convert.write  # imports are not what is measured
from tests.convert.support import convert
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
if sys.argv[3] == "blocks":
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")
    os.copy_file_range = refuse
convert(Path(sys.argv[1]), Path(sys.argv[2]), "sglang")
"""


@pytest.mark.parametrize(("how", "size"), [("sparse", 6 << 30), ("blocks", 128 << 20)])
def test_memory_does_not_grow_with_the_file(source, tmp_path, how, size):
    """64 MiB beyond the interpreter: a sparse file of 6 GiB, and 128 MiB of data copied block by block."""
    file = source / "model.safetensors"
    before = held(source)
    offset, header = 0, {}
    for name, (dtype, shape, data) in before.items():
        header[name], offset = entry(dtype, shape, (offset, offset + len(data))), offset + len(data)
    header["embed_tokens.weight"] = entry("U8", (size,), (offset, offset + size))
    file.write_bytes(blob(header, b"".join(data for _, _, data in before.values())))
    with file.open("ab") as handle:
        if how == "sparse":
            handle.truncate(handle.tell() + size - 1)
        else:
            handle.write(b"\1" * (size - 1))
        handle.write(b"\7")
    made = tmp_path / "made"
    subprocess.run([sys.executable, "-c", LIMITED, source, made, how], cwd=REPOSITORY, check=True)
    with (made / "model.safetensors").open("rb") as handle:
        assert handle.seek(-1, os.SEEK_END) + 1 >= size
        assert handle.read() == b"\7"
    if how == "sparse":
        assert (made / "model.safetensors").stat().st_blocks * 512 < 64 << 20

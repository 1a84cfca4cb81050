"""Packages import only from those before them: the order that CONTRIBUTING.md and docs/architecture.md state."""

import ast
from pathlib import Path

import pytest

import harness

ROOT = Path(harness.__file__).parent
ORDER = (
    "servers",
    "probe",
    "canary",
    "measure",
    "metrics",
    "pairs",
    "checkpoint",
    "engines",
    "contracts",
    "convert",
    "gate",
    "load",
    "report",
    "upgrade",
    "baseline",
    "history",
    "parity",
    "diagnose",
)
COMMON = {"errors", "files", "github", "steps", "verdict"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("harness.")}


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package):
    allowed = COMMON | set(ORDER[: ORDER.index(package) + 1]) | {"__version__"}
    wrong = {
        f"{path.relative_to(ROOT)} -> {name}"
        for path in (ROOT / package).rglob("*.py")
        for name in imports(path) - allowed
        if "inject" not in path.parts
    }
    assert not wrong


def test_every_package_has_its_place():
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} == set(ORDER)
    assert {path.stem for path in ROOT.glob("*.py")} == COMMON | {"__init__", "cli"}


@pytest.mark.parametrize("package", ["probe", "contracts"])
def test_what_runs_in_an_engine_imports_nothing_of_the_harness(package):
    files = list((ROOT / package / "inject").rglob("*.py"))
    assert files
    for path in files:
        assert not imports(path), path

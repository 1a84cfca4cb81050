"""The start-up hook that lets vLLM's V2 model runner start on a CPU, with a stand-in for Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness.engines

HOOK = Path(harness.engines.__file__).parent / "triton_cpu"
LOOK = """
import json, sys
import triton.backends as module
print(json.dumps({name: bool(entry.driver.is_active()) for name, entry in module.backends.items()}))
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "triton" / "backends"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import types\n"
        "class Nvidia:\n"
        "    is_active = staticmethod(lambda: True)\n"
        "backends = {'nvidia': types.SimpleNamespace(driver=Nvidia, compiler=None)}\n"
    )
    return tmp_path / "site"


def run(code: str, *path: Path, flag: str | None = "1") -> str:
    environment = {name: value for name, value in os.environ.items() if name != "DRAFTGATE_TRITON_CPU"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if flag is not None:
        environment["DRAFTGATE_TRITON_CPU"] = flag
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_adds_a_cpu_backend_that_is_never_active(fake: Path) -> None:
    assert json.loads(run(LOOK, HOOK, fake)) == {"nvidia": True, "cpu": False}


@pytest.mark.parametrize("flag", [None, "", "0", "true"])
def test_does_nothing_unless_told(fake: Path, flag: str | None) -> None:
    assert json.loads(run(LOOK, HOOK, fake, flag=flag)) == {"nvidia": True}


def test_keeps_a_cpu_backend_that_triton_brings(fake: Path) -> None:
    source = fake / "triton" / "backends" / "__init__.py"
    source.write_text(source.read_text() + "backends['cpu'] = backends['nvidia']\n")
    assert json.loads(run(LOOK, HOOK, fake)) == {"nvidia": True, "cpu": True}


def test_imports_nothing_of_triton_by_itself(fake: Path) -> None:
    assert run("import sys; print('triton' in sys.modules)", HOOK, fake).strip() == "False"


def test_without_triton_the_import_fails_as_it_would(tmp_path: Path) -> None:
    # The environment of these tests may have a Triton, as some builds of torch bring one.
    hide = "import sys\nsys.path = [entry for entry in sys.path if 'site-packages' not in entry]\n"
    code = f"{hide}try:\n    import triton.backends\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    assert run(code, HOOK, tmp_path).strip() == "triton"


def test_triton_without_backends_fails_as_it_would(fake: Path) -> None:
    (fake / "triton" / "backends" / "__init__.py").unlink()
    (fake / "triton" / "backends").rename(fake / "elsewhere")
    # The environment of these tests may have a Triton, as some builds of torch bring one.
    hide = "import sys\nsys.path = [entry for entry in sys.path if 'site-packages' not in entry]\n"
    code = f"{hide}try:\n    import triton.backends\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    assert run(code, HOOK, fake).strip() == "triton.backends"


@pytest.mark.parametrize("flag", [None, "1"])
def test_runs_the_sitecustomize_that_it_hides(fake: Path, tmp_path: Path, flag: str | None) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins\nbuiltins.other_ran = True\n")
    assert run("print(other_ran)", HOOK, other, fake, flag=flag).strip() == "True"


def test_two_copies_on_the_path_add_one_entry_and_end(fake: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "sitecustomize.py").write_text((HOOK / "sitecustomize.py").read_text())
    assert json.loads(run(LOOK, HOOK, second, fake)) == {"nvidia": True, "cpu": False}

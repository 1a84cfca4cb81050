"""Programs run as steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.steps import StepError, run_step


@pytest.fixture
def held():
    reader, writer = os.pipe()
    yield writer
    os.close(reader)
    os.close(writer)


def test_output_is_kept_and_a_failure_shows_its_own_last_lines(tmp_path: Path, held: int) -> None:
    log = tmp_path / "log"
    run_step([sys.executable, "-c", "print('first step')"], log=log, held=held)
    program = "import sys; print(*range(100), sep='\\n'); print('the cause', file=sys.stderr); sys.exit(3)"
    with pytest.raises(StepError, match=r"exit status 3 of: .*python") as caught:
        run_step([sys.executable, "-u", "-c", program], log=log, held=held)
    lines = caught.value.tail.splitlines()
    assert lines[-1].strip() == "the cause"
    assert len(lines) == 20
    assert "first step" not in caught.value.tail
    assert log.read_text().startswith("first step\n0\n1\n")


def test_a_program_that_is_not_there(tmp_path: Path, held: int) -> None:
    with pytest.raises(StepError, match="no-such-program"):
        run_step([str(tmp_path / "no-such-program")], log=tmp_path / "log", held=held)


def test_a_silent_failure_says_so(tmp_path: Path, held: int) -> None:
    with pytest.raises(StepError, match="no output"):
        run_step([sys.executable, "-c", "raise SystemExit(1)"], log=tmp_path / "log", held=held)


def test_what_belongs_to_our_own_python_is_not_inherited(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = "import os; print(sorted(set(os.environ) & {'PYTHONPATH', 'PYTHONDONTWRITEBYTECODE', 'KEPT', 'MINE'}))"
    monkeypatch.setenv("KEPT", "1")
    run_step([sys.executable, "-c", program], log=tmp_path / "log", held=held, env={"MINE": "1"})
    assert (tmp_path / "log").read_text() == "['KEPT', 'MINE']\n"

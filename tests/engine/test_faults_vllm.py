"""Proof that it can fail: one fault at a time on the real vLLM, and the suites go red and name the cause."""

import functools
import shlex

import pytest

from harness.canary import faults
from harness.canary.build import build
from harness.canary.spec import SHIPPED
from tests.engine.regressions import regressed
from tests.engine.support import SPECULATIVE

pytestmark = pytest.mark.engine

LOADED = [
    "d2t", "fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight", "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.v_proj.weight", "norm.weight",
]  # fmt: skip


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return build(SHIPPED["small"], tmp_path_factory.mktemp("canary") / "small")


@pytest.fixture
def judge(judge_pair, vllm_python):
    return functools.partial(judge_pair, vllm_python, "vllm")


def pair(drafter, **expect):
    lines = ['canary = "small"', f'drafter = "{drafter}"', 'engine.vllm = { args = ["--max-model-len", "1024"] }']
    return [*lines, *(f"expect.{key} = {value}" for key, value in expect.items())]


def test_every_loaded_tensor_is_covered_here(small):
    assert sorted(LOADED) == sorted(set(faults.tensor_names(small.drafter)) - set(faults.NOT_LOADED))


@pytest.mark.parametrize("tensor", LOADED)
def test_a_removed_tensor(small, judge, tmp_path, tensor):
    result = judge(*pair(faults.apply("remove-tensor", small.drafter, tmp_path / "drafter", tensor)))
    assert result.status == 1, result.output
    assert result.verdict("acceptance") == "FAIL"
    assert result.verdict("weights") == "FAIL"
    finding = result.finding("weights", "WGT004")
    named = "draft_id_to_target_id" if tensor == "d2t" else tensor.split(".")[-2]
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
    fused["up_proj"] = "gate_up_proj"
    assert fused.get(named, named) in finding["actual"]
    assert finding["remedy"]


@pytest.mark.parametrize(
    ("name", "code", "named"),
    [
        ("half_a_tensor", "WGT003", "fc.weight: 50 % used"),
        (
            "altered_after_load",
            "WGT009",
            "model.norm.weight: while serving: bfloat16 256 to bfloat16 256 of other values",
        ),
    ],
)
def test_an_engine_that_loads_a_part_or_changes_what_it_loaded(
    small, judge_pair, tmp_path, vllm_python, name, code, named
):
    python = regressed(vllm_python, name, tmp_path / "regressed")
    result = judge_pair(python, "vllm", *pair(small.drafter), select="weights")
    assert result.status == 1, result.output
    assert result.verdict("weights") == "FAIL"
    assert named in result.finding("weights", code)["actual"]


def test_swapped_fc_chunks(small, judge, tmp_path):
    result = judge(*pair(faults.apply("swap-fc-chunks", small.drafter, tmp_path / "drafter", "0", "2")))
    assert result.status == 1
    assert (result.verdict("weights"), result.verdict("aux_hidden")) == ("PASS", "PASS")
    assert result.verdict("acceptance") == "FAIL"


def test_auxiliary_ids_off_by_one(small, judge, tmp_path):
    drafter = faults.apply("shift-aux-ids", small.drafter, tmp_path / "drafter", "1")
    result = judge(*pair(drafter, aux_layers="[2, 4, 5]"))
    finding = result.finding("aux_hidden", "AUX004")
    assert "chunk 0: 3" in finding["actual"]
    assert "[2, 4, 5]" in finding["remedy"]
    assert result.verdict("acceptance") == "FAIL"


@pytest.mark.parametrize("fault", ["zero-d2t", "dead", "wrong-vocabulary"])
def test_a_drafter_that_loads_and_is_never_right(small, judge, tmp_path, fault):
    result = judge(*pair(faults.apply(fault, small.drafter, tmp_path / "drafter")))
    assert result.status == 1
    assert (result.verdict("weights"), result.verdict("aux_hidden")) == ("PASS", "PASS")
    (red,) = [item for item in result.suite("acceptance")["findings"] if item["verdict"] == "FAIL"]
    assert red["cause"]
    assert red["actual"]


def test_an_unknown_prefix(small, judge, tmp_path):
    drafter = faults.apply("rename-prefix", small.drafter, tmp_path / "drafter")
    result = judge(*pair(drafter), select="startup or weights or acceptance")
    assert result.status == 1
    assert result.verdict("startup") == "FAIL"
    assert "decoder" in result.finding("weights", "WGT002")["actual"]
    assert result.verdict("acceptance") == "INVALID"


def test_the_speculation_flag_forgotten(small, judge_pair, tmp_path, vllm_python):
    wrapper = tmp_path / "python"
    real = shlex.quote(str(vllm_python))
    wrapper.write_text(
        f'#!/bin/bash\nkept=()\nwhile (( $# )); do\n  if [ "$1" = --speculative-config ]; then shift; '
        f'else kept+=("$1"); fi\n  shift\ndone\nexec {real} "${{kept[@]}}"\n'
    )
    wrapper.chmod(0o755)
    result = judge_pair(wrapper, "vllm", *pair(small.drafter), select="startup or acceptance")
    assert result.status == 1
    assert result.verdict("startup") == "FAIL"
    assert "speculation is not on" in result.output
    assert "--speculative-config" in result.finding("startup", "STA004")["remedy"]
    assert result.verdict("acceptance") == "INVALID"


def test_metrics_unreachable(small, judge):
    lines = ['canary = "small"', 'engine.vllm = { args = ["--max-model-len", "1024", "--disable-log-stats"] }']
    result = judge(*lines, select="startup or acceptance")
    assert result.status == 1
    assert "/metrics" in result.finding("startup", "STA004")["summary"]
    assert result.verdict("acceptance") == "INVALID"


def test_requests_that_are_mixed_up_in_a_step(small, judge_pair, vllm_python, tmp_path):
    python = regressed(vllm_python, "mixed_rows", tmp_path / "regressed")
    result = judge_pair(python, "vllm", *pair(small.drafter), select="acceptance or losslessness")
    assert result.status == 1, result.output
    assert result.verdict("acceptance") == "PASS"
    found = {item["code"]: item["verdict"] for item in result.suite("losslessness")["findings"]}
    assert found == {"LOS000": "PASS", "LOS013": "FAIL"}
    assert "with 4 requests at once" in result.finding("losslessness", "LOS013")["summary"]


def test_a_drafter_slower_than_none(judge, tmp_path):
    canary = build(SHIPPED["heavy"], tmp_path / "heavy")
    drafter = faults.apply("slow", canary.drafter, tmp_path / "drafter")
    result = judge(
        'canary = "heavy"', f'drafter = "{drafter}"', 'expect.throughput_ratio = { "1" = 1.0 }',
        "workload = { count = 4, length = 16, max_tokens = 32, throughput_count = 2, throughput_tokens = 32 }",
        'engine.vllm = { args = ["--max-model-len", "512"] }', select="acceptance or throughput",
    )  # fmt: skip
    assert result.status == 1, result.output
    assert result.verdict("acceptance") == "PASS"
    assert result.verdict("throughput") == "FAIL"
    (red,) = [item for item in result.suite("throughput")["findings"] if item["verdict"] == "FAIL"]
    assert red["cause"]
    assert red["remedy"]


def test_known_issue_v2_ignores_the_layer_ids(judge):
    """vLLM 0.32.0, V2: layers 2, 4, 5 are captured although the drafter's config asks for 1, 3, 6."""
    lines = [
        'canary = "aux-layers"',
        "expect.aux_layers = [1, 3, 6]",
        'engine.vllm = { args = ["--max-model-len", "1024"] }',
    ]
    result = judge(*lines, select=f"{SPECULATIVE} or losslessness", runner="v2")
    assert result.status == 1, result.output
    finding = result.finding("aux_hidden", "AUX005")
    assert "[2, 4, 5] were captured instead of [1, 3, 6]" in finding["summary"]
    assert "VLLM-V2-AUX-IDS" in finding["known_issue"]
    assert "eagle_config.layer_ids" in finding["cause"]
    assert result.verdict("acceptance") == "FAIL"
    assert result.verdict("losslessness") == "PASS"

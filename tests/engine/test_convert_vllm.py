"""Converted canaries on the real vLLM, both model runners: accepted to the last count, from every dialect."""

import dataclasses

import pytest

from harness.canary.build import build
from harness.canary.spec import SHIPPED
from harness.checkpoint.read import read
from harness.convert import plan, write
from tests.engine.support import judge_exactly

pytestmark = pytest.mark.engine

CASES = [
    # As it is, model runner V2 of 0.32.0 does not see these ids (known issue VLLM-V2-AUX-IDS).
    ("v2", "vllm", {"dialect": "specforge", "aux_layers": (1, 3, 6), "aux_ids": "nested"}),
    ("v1", "vllm", {"dialect": "speculators", "norm_before_residual": True}),
    ("v1", "vllm", {"dialect": "yuhuili", "attention_bias": True}),
    (
        "v1",
        "speculators",
        {"dialect": "modelopt", "aux_layers": (1, 3, 6), "aux_ids": "nested", "norm_before_fc": True},
    ),
    ("v1", "specforge", {"dialect": "angelslim", "fc_norm": True, "norm_output": True}),
]


@pytest.mark.parametrize(("runner", "to", "changes"), CASES, ids=str)
def test_a_converted_canary_is_exact(vllm_python, tmp_path, runner, to, changes):
    canary = build(dataclasses.replace(SHIPPED["small-wrong"], **changes), tmp_path / "pair")
    request = plan.Request(to, aux_ids_are="inputs", target=read(canary.target))
    made = plan.make(read(canary.drafter), request)
    converted = write.write(made, canary.drafter, tmp_path / "converted")
    judge_exactly("vllm", vllm_python, runner, canary, converted, tmp_path)

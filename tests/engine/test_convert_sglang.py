"""Converted canaries on the real SGLang: accepted to the last count, from every dialect."""

import dataclasses

import pytest

from harness.canary.build import build
from harness.canary.spec import SHIPPED
from harness.checkpoint.read import read
from harness.convert import plan, write
from tests.engine.support import judge_exactly

pytestmark = pytest.mark.engine

SOURCES = [
    # SGLang 0.5.23 reads none of it as it is: another class, nested config, ids at the top level that count inputs.
    {"dialect": "speculators", "aux_layers": (1, 3, 6), "aux_ids": "top-level", "norm_before_fc": True},
    {"dialect": "modelopt", "aux_layers": (1, 3, 6), "aux_ids": "nested"},
    {"dialect": "yuhuili", "fc_norm": True, "norm_output": True},
    {"dialect": "angelslim", "full_draft_vocab": True},
]


@pytest.mark.parametrize("changes", SOURCES, ids=lambda changes: changes["dialect"])
def test_a_converted_canary_is_exact(sglang_python, tmp_path, changes):
    canary = build(dataclasses.replace(SHIPPED["small-wrong"], **changes), tmp_path / "pair")
    request = plan.Request("sglang", aux_ids_are="inputs", target=read(canary.target))
    made = plan.make(read(canary.drafter), request)
    converted = write.write(made, canary.drafter, tmp_path / "converted")
    judge_exactly("sglang", sglang_python, "sync", canary, converted, tmp_path)

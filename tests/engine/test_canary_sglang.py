"""Canaries on the real SGLang: outputs equal the oracle's token for token, counts to the last one."""

import dataclasses

import pytest

from harness.canary.build import build
from harness.canary.spec import SHIPPED
from tests.engine.support import judge_exactly

pytestmark = pytest.mark.engine

EXACT = [
    ("small", {}, 1),
    ("small", {"dtype": "float32"}, 8),
    ("small-wrong", {}, 8),
    ("small-wrong", {"dtype": "float32", "hidden": 128}, 3),
    ("aux-layers-outputs", {}, 4),
    ("wide-1024", {"wrong_fraction": 0.1}, 5),
    ("wide-2048", {"wrong_fraction": 0.1, "dtype": "float32"}, 6),
    ("kimi-shape", {"wrong_fraction": 0.1}, 7),
    ("kimi-shape", {"wrong_fraction": 0.1, "dtype": "float32"}, 2),
    ("small-wrong", {"fc_norm": True, "norm_output": True}, 4),
    ("small-wrong", {"dialect": "modelopt", "norm_before_fc": True}, 4),
    ("small-wrong", {"full_draft_vocab": True}, 4),
]


@pytest.mark.parametrize(("name", "changes", "k"), EXACT, ids=str)
def test_outputs_and_counts_are_the_oracles(sglang_python, tmp_path, name, changes, k):
    spec = dataclasses.replace(SHIPPED[name], **changes)
    canary = build(spec, tmp_path / "pair")
    judgement = judge_exactly("sglang", sglang_python, "sync", canary, canary.drafter, tmp_path, k=k)
    assert "spec_verify_calls_total agrees" in judgement.findings[0].actual

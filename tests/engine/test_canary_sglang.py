"""Canaries on the real SGLang: outputs equal the oracle's token for token, counts to the last one."""

import dataclasses

import pytest

from harness.canary.build import build
from harness.canary.spec import SHIPPED
from harness.engines.base import Launch, identify
from harness.engines.sglang import DISTRIBUTIONS, SglangAdapter
from harness.measure import acceptance
from harness.measure.endpoint import Prompt
from harness.servers.server import start
from harness.verdict import Verdict

pytestmark = pytest.mark.engine

MAX_TOKENS = 60
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
    ("small-wrong", {"full_draft_vocab": True, "own_embed_tokens": True}, 4),
]


@pytest.mark.parametrize(("name", "changes", "k"), EXACT, ids=str)
def test_outputs_and_counts_are_the_oracles(sglang_python, tmp_path, name, changes, k):
    spec = dataclasses.replace(SHIPPED[name], **changes)
    canary = build(spec, tmp_path / "pair")
    adapter, identity = SglangAdapter(), identify("sglang", DISTRIBUTIONS, sglang_python)
    launch = Launch(
        "exact", canary.target, canary.drafter, "eagle3", k, spec.dtype, "sync", "cpu", tokenizer=False,
        version=identity.version,
    )  # fmt: skip
    drawn = [*canary.oracle.prompts(3, 12, seed=1), *canary.oracle.prompts(1, 450, seed=2)]
    prompts = [Prompt(f"p{number}", token_ids=tuple(ids)) for number, ids in enumerate(drawn)]
    with start(adapter.spec(identity, launch), tmp_path, lambda url: adapter.ready(launch, url)) as server:
        run = acceptance.measure(adapter.endpoint(launch, server.base_url), prompts, MAX_TOKENS, k)
    assert [list(each.token_ids) for each in run.prompts] == [
        canary.oracle.continuation(prompt, MAX_TOKENS) for prompt in drawn
    ]
    oracle = {prompt.name: canary.oracle.acceptance(prompt.token_ids, MAX_TOKENS, k) for prompt in prompts}
    judgement = acceptance.judge_exact(run, oracle)
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    assert "spec_verify_calls_total agrees" in judgement.findings[0].actual

"""Canaries on the real vLLM: outputs equal the oracle's token for token, counters to the last count.

What a broken drafter does to the counts, and to the suites, is in test_faults.py.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from harness.canary.build import build
from harness.canary.dialects import DIALECTS
from harness.canary.oracle import Acceptance
from harness.canary.spec import SHIPPED

pytestmark = pytest.mark.engine

MAX_TOKENS = 100


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a function that builds (once) a shipped pair with some fields changed."""
    made = {}

    def make(name, **changes):
        spec = dataclasses.replace(SHIPPED[name], **changes)
        if spec.fingerprint not in made:
            made[spec.fingerprint] = build(spec, tmp_path_factory.mktemp(name) / "pair")
        return made[spec.fingerprint]

    return make


@pytest.fixture
def serve(vllm_python, tmp_path):
    """Return a function that generates with one engine and returns (outputs, counts)."""

    def run(canary, k, prompts, max_tokens=MAX_TOKENS):
        result = tmp_path / "result.json"
        command = [vllm_python, Path(__file__).with_name("drive_vllm.py")]
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # it doubles the engine's import time
        done = subprocess.run(
            [*map(str, [*command, canary.target, canary.drafter, k, max_tokens, 1, result])],
            input=json.dumps(prompts),
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found = json.loads(result.read_text())
        counters = found["counters"]
        counts = Acceptance(
            counters["num_drafts"],
            counters["num_draft_tokens"],
            counters["num_accepted_tokens"],
            tuple(counters["num_accepted_tokens_per_pos"]),
        )
        return found["outputs"], counts

    return run


def prompts_of(oracle):
    """Return prompts of 1, 2, 12 and 450 tokens."""
    return [[5], [9, 100], *oracle.prompts(4, 12, seed=1), *oracle.prompts(2, 450, seed=2)]


EXACT = [
    ("small", {}, 1),
    ("small", {"dtype": "float32"}, 8),
    ("small-wrong", {}, 4),
    ("small-wrong", {"dtype": "float32", "hidden": 128}, 8),
    ("aux-layers", {}, 4),
    ("wide-1024", {"wrong_fraction": 0.1}, 8),
    ("wide-1024", {"wrong_fraction": 0.1, "dtype": "float32"}, 8),
    ("wide-2048", {"wrong_fraction": 0.1}, 4),
    ("wide-2048", {"wrong_fraction": 0.1, "dtype": "float32"}, 8),
]


@pytest.mark.parametrize(("name", "changes", "k"), EXACT, ids=str)
def test_outputs_and_counts_are_the_oracles(pair, serve, name, changes, k):
    canary = pair(name, **changes)
    prompts = prompts_of(canary.oracle)
    outputs, counts = serve(canary, k, prompts)
    assert outputs == [canary.oracle.continuation(prompt, MAX_TOKENS) for prompt in prompts]
    assert counts == canary.oracle.total(prompts, MAX_TOKENS, k)


@pytest.mark.parametrize(("dtype", "k"), [("bfloat16", 8), ("float32", 4)])
def test_the_shape_of_kimi_is_exact(pair, serve, dtype, k):
    canary = pair("kimi-shape", dtype=dtype, wrong_fraction=0.1)
    prompts = [*canary.oracle.prompts(2, 12, seed=1), *canary.oracle.prompts(1, 450, seed=2)]
    outputs, counts = serve(canary, k, prompts, max_tokens=60)
    assert outputs == [canary.oracle.continuation(prompt, 60) for prompt in prompts]
    assert counts == canary.oracle.total(prompts, 60, k)


def test_hundreds_of_tokens_stay_exact(pair, serve):
    canary = pair("small-wrong", dtype="float32")
    prompts = canary.oracle.prompts(2, 20, seed=5)
    outputs, counts = serve(canary, 8, prompts, max_tokens=700)
    assert outputs == [canary.oracle.continuation(prompt, 700) for prompt in prompts]
    assert counts == canary.oracle.total(prompts, 700, 8)


OPTIONS = {
    "yuhuili": {"attention_bias": True},
    "specforge": {"fc_norm": True, "norm_output": True},
    "modelopt": {"norm_before_fc": True, "aux_ids": "nested", "aux_layers": (1, 3, 6)},
    "angelslim": {"full_draft_vocab": True, "own_embed_tokens": True},
    "speculators": {"norm_before_residual": True, "aux_ids": "top-level", "own_embed_tokens": True},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_with_its_options_is_exact(pair, serve, dialect):
    canary = pair("small-wrong", dialect=dialect, **OPTIONS[dialect])
    prompts = prompts_of(canary.oracle)
    outputs, counts = serve(canary, 4, prompts)
    assert outputs == [canary.oracle.continuation(prompt, MAX_TOKENS) for prompt in prompts]
    assert counts == canary.oracle.total(prompts, MAX_TOKENS, 4)

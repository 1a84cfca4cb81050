"""The PyTorch forward agrees with the integer arithmetic, at every width, type and K, to the last count."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from harness.canary.layout import DrafterLayout, head_phase
from harness.canary.reference import Drafter, Scorer
from harness.errors import CheckpointError, EvidenceError

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts_for(oracle, *, long):
    return [[5], [9, 100], *oracle.prompts(3, 16, seed=1), *oracle.prompts(1, long, seed=2)]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("hidden", [128, 256])
def test_counts_equal_the_oracles(make_canary, hidden, dtype, k):
    canary = make_canary(hidden=hidden, dtype=dtype, wrong_fraction=0.25)
    prompts = prompts_for(canary.oracle, long=450)
    assert Scorer(canary, prompts, 120, k).score(canary.drafter) == canary.oracle.total(prompts, 120, k)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("hidden", "layers"), [(1024, 24), (2048, 8), (7168, 8)])
def test_counts_equal_the_oracles_when_wide(make_canary, hidden, layers, dtype):
    canary = make_canary(hidden=hidden, layers=layers, heads=2, dtype=dtype, wrong_fraction=0.1)
    prompts = canary.oracle.prompts(1, 30, seed=1)
    assert Scorer(canary, prompts, 40, 8).score(canary.drafter) == canary.oracle.total(prompts, 40, 8)


def test_a_generation_of_hundreds_of_tokens_stays_exact(make_canary):
    canary = make_canary(dtype="float32", wrong_fraction=0.1)
    prompts = canary.oracle.prompts(1, 20, seed=5)
    assert Scorer(canary, prompts, 700, 8).score(canary.drafter) == canary.oracle.total(prompts, 700, 8)


@pytest.mark.parametrize("option", [None, "norm_before_residual", "norm_output"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_state_that_is_fed_back_does_not_drift(make_canary, dtype, option):
    """Through 8 steps on its own output the state is what the arithmetic says: exactly in bfloat16, to 1e-5 in float32.

    Only the code and the class change from step to step; the constants are those that `fc` gave.
    """
    canary = make_canary(dtype=dtype, **({option: True} if option else {}))
    prompt = canary.oracle.prompts(1, 24, seed=3)[0]
    scorer = Scorer(canary, [prompt], 16, 8)
    drafter = Drafter(canary.drafter, scorer.target)
    length, tokens, inputs = scorer._runs[0]
    at = DrafterLayout.of(canary.spec)
    classes = [canary.oracle.class_of(token) for token in tokens]
    expected = drafter._combine([inputs[layer] for layer in canary.spec.aux])[length - 1 :].double()
    scale = expected[0, at.out[-1]].item()

    states = []
    step = drafter._step
    drafter._step = lambda *args: states.append(step(*args)) or states[-1]
    drafter.drafts(tokens, inputs, 8, first=length - 1)
    for index, (_, state) in enumerate(states):
        for row, found in enumerate(state[-len(expected) :].double()):
            now = length + row + index
            if now + 1 < len(tokens):
                expected[row, [*at.prev, *at.out]] = 0.0
                expected[row, at.prev[classes[now] % 8]] = 3.0
                expected[row, at.out[classes[now + 1]]] = scale
                assert (found - expected[row]).abs().max() <= (1e-5 if dtype == "float32" else 1e-9)


def test_a_target_that_says_something_else_is_evidence_of_a_fault(make_canary, tmp_path):
    canary = make_canary()
    broken = tmp_path / "pair"
    (broken / "target").mkdir(parents=True)
    for file in ("oracle.json", "target/config.json"):
        (broken / file).write_bytes((canary.folder / file).read_bytes())
    tensors = load_file(canary.target / "model.safetensors")
    tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 1, axis=0)
    save_file(tensors, broken / "target" / "model.safetensors")
    from harness.canary.build import load

    with pytest.raises(EvidenceError, match="not the oracle's"):
        Scorer(load(broken), [[1, 2, 3]], 8, 4)


def test_a_tensor_that_vllm_refuses_is_refused(make_canary, tmp_path):
    canary = make_canary()
    scorer = Scorer(canary, [[1, 2, 3]], 8, 4)
    from harness.canary.faults import apply

    with pytest.raises(CheckpointError, match="decoder"):
        scorer.score(apply("rename-prefix", canary.drafter, tmp_path / "renamed"))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_attention_is_sharp_at_every_distance_even_in_rounded_arithmetic(distance, head_dim):
    """Scores with everything rounded to bfloat16, at query positions up to 4096: the peak beats the rest by 100."""
    pairs = head_dim // 2
    speed = 10000.0 ** (-np.arange(pairs) / pairs)

    def turned(vector, positions):
        angle = torch.tensor(positions[:, None] * speed[None])
        cos, sin = (f(angle).bfloat16().float() for f in (torch.cos, torch.sin))
        low, high = torch.tensor(vector).bfloat16().float().split(pairs)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).bfloat16().float()

    positions = np.arange(4096)
    keys = turned(head_phase(0, head_dim), positions)
    for position in (distance, 17, 255, 1023, 2047, 4095):
        query = turned(head_phase(distance, head_dim), np.array([position]))[0]
        scores = keys[: position + 1] @ query / head_dim**0.5
        peak = scores[position - distance].item()
        scores[position - distance] = -torch.inf
        assert position == 0 or peak - scores.max().item() > 100

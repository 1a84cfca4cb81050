"""Whatever single thing a drafter lacks, or is fed wrongly, its acceptance is gone."""

import pytest

from harness.canary.faults import NOT_LOADED, apply, tensor_names
from harness.canary.reference import Scorer

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS, K = 60, 4
QUICK = {"hidden": 128, "dtype": "float32"}
VARIANTS = {
    "plain": {},
    "narrow": QUICK,
    "wide": {"hidden": 1024, "heads": 2, "dtype": "float32"},
    "own-embeddings": QUICK | {"own_embed_tokens": True},
    "full-vocabulary": QUICK | {"full_draft_vocab": True},
    "fc-norm": QUICK | {"fc_norm": True},
    "norm-before-fc": QUICK | {"norm_before_fc": True},
    "norm-before-residual": QUICK | {"norm_before_residual": True},
    "norm-output": QUICK | {"norm_output": True},
    "attention-bias": QUICK | {"attention_bias": True},
    "everything": {
        "hidden": 128,
        "own_embed_tokens": True,
        "fc_norm": True,
        "norm_before_residual": True,
        "norm_output": True,
        "attention_bias": True,
    },
}


@pytest.fixture(scope="module")
def score(make_canary):
    """Return a function: the accepted draft tokens of a drafter's folder, and of the perfect one."""
    scorers = {}

    def run(canary, drafter=None, layers=None):
        if canary.folder not in scorers:
            scorers[canary.folder] = Scorer(canary, canary.oracle.prompts(3, 24, seed=1), MAX_TOKENS, K)
        return scorers[canary.folder].score(drafter or canary.drafter, layers).accepted

    return run


@pytest.fixture(scope="module")
def perfect(make_canary):
    """Return what the oracle counts, over the prompts of `score`."""
    return lambda canary: canary.oracle.total(canary.oracle.prompts(3, 24, seed=1), MAX_TOKENS, K).accepted


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_option_is_exact(make_canary, score, perfect, variant):
    canary = make_canary(**VARIANTS[variant])
    assert score(canary) == perfect(canary) == 3 * 12 * K


@pytest.mark.parametrize("fault", ["remove-tensor", "zero-tensor", "default-tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_single_tensor_is_needed(make_canary, score, perfect, tmp_path, variant, fault):
    canary = make_canary(**VARIANTS[variant])
    left = {}
    for name in tensor_names(canary.drafter):
        left[name] = score(canary, apply(fault, canary.drafter, tmp_path / name, name, seed=3))
    exempt = {name: left.pop(name) for name in NOT_LOADED if name in left}
    assert max(left.values()) < perfect(canary) / 4, left
    assert all(accepted == perfect(canary) for accepted in exempt.values()), "what engines skip must change nothing"
    optional = {
        "fc_norm.0.weight": "fc_norm",
        "input_norm.weight": "norm_before_fc",
        "embed_tokens.weight": "own_embed_tokens",
    }
    for name, option in optional.items():
        assert (name in left) == getattr(canary.spec, option)
    assert ("d2t" in left) != canary.spec.full_draft_vocab
    assert len(left) >= 13


@pytest.mark.parametrize("seed", range(5))
def test_untrained_matrices_of_any_seed_are_not_lucky(make_canary, score, perfect, tmp_path, seed):
    canary = make_canary()
    names = [name for name in tensor_names(canary.drafter) if "norm" not in name and name not in {"d2t", "t2d"}]
    left = {
        name: score(canary, apply("default-tensor", canary.drafter, tmp_path / name, name, seed=seed)) for name in names
    }
    assert max(left.values()) < perfect(canary) / 4, left


FEEDS = {
    "one id too high": [(3, 4, 5), (2, 5, 6), (2, 3, 5), (2, 4, 6), (3, 5, 6)],
    "one id too low": [(1, 4, 5), (2, 3, 5), (1, 3, 5), (1, 3, 4)],
    "other layers": [(1, 3, 6), (0, 1, 2), (6, 7, 8)],
}


@pytest.mark.parametrize("variant", ["plain", "narrow", "fc-norm", "norm-before-fc", "attention-bias"])
@pytest.mark.parametrize("feed", FEEDS)
def test_other_layers_than_its_own_leave_nothing(make_canary, score, variant, feed):
    canary = make_canary(**VARIANTS[variant])
    assert canary.spec.aux == (2, 4, 5)
    assert score(canary, layers=(2, 4, 5)) > 0
    assert {layers: score(canary, layers=layers) for layers in FEEDS[feed]} == dict.fromkeys(FEEDS[feed], 0)


@pytest.mark.parametrize("variant", ["plain", "narrow", "wide", "fc-norm", "norm-before-fc", "norm-output"])
def test_a_missing_or_swapped_chunk_leaves_nothing(make_canary, score, tmp_path, variant):
    canary = make_canary(**VARIANTS[variant])
    left = {}
    for pair in ("01", "02", "12"):
        left[pair] = score(canary, apply("swap-fc-chunks", canary.drafter, tmp_path / pair, *pair))
    for chunk in "012":
        left[chunk] = score(canary, apply("drop-fc-chunk", canary.drafter, tmp_path / chunk, chunk))
    assert left == dict.fromkeys(left, 0)


@pytest.mark.parametrize("variant", ["plain", "wide"])
def test_every_layers_input_is_unlike_every_other(make_canary, score, variant):
    """By value, at every position: at least a sixteenth of the whole vector's energy differs."""
    canary = make_canary(**VARIANTS[variant])
    scorer = Scorer(canary, canary.oracle.prompts(1, 24, seed=1), 20, 1)
    inputs = [state.double() for state in scorer._runs[0][2]]
    assert len(inputs) == canary.spec.layers + 1
    for i, one in enumerate(inputs):
        assert (one.square().mean(-1) - 1).abs().max() < 2e-5, "every layer's input has mean square 1"
        for other in inputs[:i]:
            assert ((one - other).square().mean(-1)).min() >= 1 / 16


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("shift-aux-ids", ()),
        ("shift-aux-ids", ("-1",)),
        ("zero-d2t", ()),
        ("wrong-vocabulary", ()),
    ],
)
@pytest.mark.parametrize("aux_ids", ["none", "nested", "top-level"])
def test_the_other_faults_leave_nothing(make_canary, score, tmp_path, fault, arguments, aux_ids):
    canary = make_canary(aux_ids=aux_ids)
    assert score(canary, apply(fault, canary.drafter, tmp_path / "broken", *arguments)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_dead_drafter_is_right_by_chance_at_most(make_canary, score, perfect, tmp_path, seed):
    canary = make_canary()
    dead = apply("dead", canary.drafter, tmp_path / "dead", seed=seed)
    assert score(canary, dead) < perfect(canary) / 8


def test_a_full_vocabulary_can_be_wrong_too(make_canary, score, tmp_path):
    canary = make_canary(full_draft_vocab=True)
    assert score(canary, apply("wrong-vocabulary", canary.drafter, tmp_path / "broken")) == 0


def test_a_slow_drafter_is_right_and_large(make_canary, score, perfect, tmp_path):
    from safetensors.numpy import load_file

    canary = make_canary(hidden=128)
    slow = apply("slow", canary.drafter, tmp_path / "slow")
    assert score(canary, slow) == perfect(canary)
    target, drafter = (
        sum(tensor.size for tensor in load_file(folder / "model.safetensors").values())
        for folder in (canary.target, slow)
    )
    assert 2 * target < drafter < 3 * target

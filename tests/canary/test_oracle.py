"""The arithmetic, checked against a brute-force reading of its definition."""

import dataclasses
import json

import pytest

from harness.canary.oracle import Acceptance, Oracle, _shortest_cycle, make_oracle
from harness.canary.spec import CODES, SHIPPED, CanarySpec
from harness.errors import CheckpointError, UsageError

SMALL = make_oracle(SHIPPED["small"])
WRONG = make_oracle(SHIPPED["small-wrong"])


def test_a_continuation_by_hand():
    # classes: 5 -> 5, 40 -> 8, canonical tokens are their own class
    sigma, canonical = SMALL.sigma, SMALL.canonical
    assert 5 not in canonical
    assert 40 not in canonical
    first = sigma[(8 + 5) % 32]  # two tokens: the one "two back" is the first
    second = sigma[(first + 5) % 32]  # 5 mod 8
    third = sigma[(second + 8 % 8) % 32]
    assert SMALL.continuation([5, 40], 3) == [canonical[first], canonical[second], canonical[third]]
    assert SMALL.class_of(canonical[first]) == first


def test_a_single_token_has_itself_as_history():
    assert SMALL.continuation([5], 1) == [SMALL.canonical[SMALL.sigma[(5 + 5) % 32]]]


def test_another_code_never_gives_the_same_class():
    for a in range(32):
        assert len({SMALL.next_class(a, code) for code in range(CODES)}) == CODES


def test_every_prompt_lies_on_a_long_cycle():
    assert _shortest_cycle(SMALL.sigma) >= 64
    assert _shortest_cycle(list(range(32))) < 64


def test_canonical_tokens_leave_no_zero_in_d2t():
    assert all(token > a + 1 for a, token in enumerate(SMALL.canonical))
    assert list(SMALL.canonical) == sorted(set(SMALL.canonical))
    assert SMALL.none_token not in SMALL.canonical


@pytest.mark.parametrize("spec", SHIPPED.values(), ids=SHIPPED)
def test_no_shipped_target_ever_says_its_bos_or_eos(spec):
    assert not {spec.vocab - 2, spec.vocab - 1} & set(make_oracle(spec).canonical)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_the_wrong_share_is_exact_and_every_wrong_entry_is_wrong(fraction):
    oracle = make_oracle(CanarySpec("x", wrong_fraction=fraction))
    pairs = [(a, c) for a in range(32) for c in range(CODES)]
    assert len(oracle.wrong) == fraction * len(pairs)
    assert {pair for pair in pairs if oracle.drafted_class(*pair) != oracle.next_class(*pair)} == oracle.wrong


def brute_force(oracle, prompt, max_tokens, k):
    """Draft token by token from the drafter's own drafts and verify against the continuation."""
    truth = list(prompt) + oracle.continuation(prompt, max_tokens + k + 1)
    known, counts = len(prompt) + 1, []
    while known < len(prompt) + max_tokens:
        guess = truth[:known]
        for _ in range(k):
            last, two_back = (oracle.class_of(guess[i]) for i in (-1, max(len(guess) - 3, 0)))
            guess.append(oracle.canonical[oracle.drafted_class(last, two_back % CODES)])
        accepted = 0
        while accepted < k and guess[known + accepted] == truth[known + accepted]:
            accepted += 1
        counts.append(accepted)
        known += accepted + 1
    return Acceptance(len(counts), k * len(counts), sum(counts), tuple(sum(c > i for c in counts) for i in range(k)))


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("oracle", [SMALL, WRONG], ids=["perfect", "wrong"])
def test_acceptance_equals_drafting_token_by_token(oracle, k):
    for prompt in [[5], [9, 100], *oracle.prompts(5, 17, seed=k)]:
        assert oracle.acceptance(prompt, 80, k) == brute_force(oracle, prompt, 80, k)


def test_total_is_the_sum():
    prompts = WRONG.prompts(3, 9, seed=1)
    one, two, three = (WRONG.acceptance(prompt, 50, 4) for prompt in prompts)
    assert WRONG.total(prompts, 50, 4) == one + two + three
    assert one.accept_length == 1 + one.accepted / one.drafts
    with pytest.raises(UsageError, match="cannot be added"):
        one + WRONG.acceptance(prompts[0], 50, 3)


def test_prompts_are_reproducible_and_in_the_vocabulary():
    assert SMALL.prompts(4, 10, seed=3) == SMALL.prompts(4, 10, seed=3)
    assert SMALL.prompts(4, 10, seed=3) != SMALL.prompts(4, 10, seed=4)
    assert all(0 <= token < 512 for prompt in SMALL.prompts(4, 10, seed=3) for token in prompt)


def test_it_reads_what_it_wrote(tmp_path):
    (tmp_path / "oracle.json").write_text(json.dumps(WRONG.as_json()))
    assert Oracle.load(tmp_path) == Oracle.load(tmp_path / "oracle.json") == WRONG


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"spec": {"name": "x", "aux_layers": [1, 2, 3], "unknown": 1}}'])
def test_a_damaged_oracle_is_named(tmp_path, text):
    (tmp_path / "oracle.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"oracle\.json"):
        Oracle.load(tmp_path)


def test_bad_prompts_are_refused():
    with pytest.raises(UsageError, match="empty prompt"):
        SMALL.continuation([], 1)
    with pytest.raises(UsageError, match="token 512"):
        SMALL.continuation([512], 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"classes": 20}, "multiple"),
        ({"classes": 8}, "from 16 up"),
        ({"head_dim": 16}, "head_dim"),
        ({"kv_heads": 1}, "kv_heads"),
        ({"heads": 3}, "multiple of kv_heads"),
        ({"vocab": 100}, "vocab"),
        ({"aux_layers": (0, 2, 4), "aux_ids": "nested"}, "must lie"),
        ({"aux_layers": (1, 2, 8), "aux_ids": "nested"}, "must lie"),
        ({"aux_layers": (2, 2, 4), "aux_ids": "nested"}, "rising"),
        ({"aux_layers": (1, 3, 6)}, "aux_ids"),
        ({"layers": 6, "aux_layers": None}, "rising"),
        ({"wrong_fraction": 1.5}, "wrong_fraction"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(changes, why):
    with pytest.raises(UsageError, match=why):
        dataclasses.replace(SHIPPED["small"], **changes)


def test_specs_survive_json_and_their_fingerprints_differ():
    for spec in SHIPPED.values():
        assert CanarySpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec
    assert len({spec.fingerprint for spec in SHIPPED.values()}) == len(SHIPPED)

"""What reaches the drafter: each wrong width, bypass and layer is red and named."""

import dataclasses

import pytest

from harness.gate import aux_hidden
from harness.probe.facts import Absent
from harness.verdict import Verdict
from tests.gate.evidence import capture, evidence, proposal, serving

WANT = aux_hidden.Expected(768, (2, 4, 5), "the pair", "the pair")


def judge(*servings, want=WANT):
    return aux_hidden.judge(evidence(servings=servings), want)


def red(judgement):
    return {finding.code: finding for finding in judgement.findings if finding.verdict is not Verdict.PASS}


def test_healthy():
    assert judge(serving([proposal(), proposal()])).verdict is Verdict.PASS


def test_one_hidden_state_instead_of_three():
    want = aux_hidden.Expected(21504, (2, 30, 58), "the pair", "the pair")
    found = red(judge(serving([proposal(7168, (), ((60,),))]), want=want))
    assert found["AUX002"].summary == "7168 arrives, 21504 expected"
    assert "one hidden state" in found["AUX002"].cause
    assert "bypassed" in found["AUX003"].summary
    assert found["AUX004"].verdict is Verdict.FAIL


def test_bypassed_once_in_many():
    assert red(judge(serving([proposal(), proposal(projections=())])))["AUX003"].verdict is Verdict.FAIL


def test_one_narrow_proposal_in_many():
    assert "AUX002" in red(judge(serving([proposal(), proposal(width=256)])))


@pytest.mark.parametrize(
    "layers", [((3,), (5,), (6,)), ((1,), (3,), (4,)), ((4,), (2,), (5,)), ((2,), (4,)), ((2,), (4,), ())]
)
def test_other_layers(layers):
    found = red(judge(serving([proposal(layers=layers)])))
    assert list(found) == ["AUX004"]
    assert found["AUX004"].verdict is Verdict.FAIL
    assert "chunk 0" in found["AUX004"].actual


def test_defaults_instead_of_what_the_config_asks():
    want = dataclasses.replace(WANT, layers=(1, 3, 6))
    finding = red(judge(serving([proposal()]), want=want))["AUX005"]
    assert "[2, 4, 5]" in finding.summary
    assert "[1, 3, 6]" in finding.summary
    assert finding.verdict is Verdict.FAIL


def test_keys_that_the_engine_looked_for_are_named():
    want = dataclasses.replace(WANT, layers=(1, 3, 6))
    absent = (Absent("eagle_config.layer_ids", ("engine",)), Absent("rope_scaling", ("engine",)))
    seen = evidence(servings=(serving([proposal()]),), absent=absent)
    cause = red(aux_hidden.judge(seen, want))["AUX005"].cause
    assert "eagle_config.layer_ids" in cause
    assert "rope" not in cause


def test_states_that_equal_nothing():
    assert "equal no target layer" in red(judge(serving([proposal(layers=((), (), ()))])))["AUX004"].summary


def test_ambiguous_but_including_the_right_one():
    assert judge(serving([proposal(layers=((1, 2), (4,), (5,)))])).verdict is Verdict.PASS


def test_one_wrong_proposal_after_a_right_one():
    assert "AUX004" in red(judge(serving([proposal(), proposal(layers=((3,), (4,), (5,)))])))


def test_nothing_seen():
    assert red(judge())["AUX001"].verdict is Verdict.INVALID
    assert red(judge(serving([])))["AUX001"].verdict is Verdict.INVALID


def test_a_silent_rank_is_invalid_although_another_is_fine():
    assert judge(serving([proposal()]), serving([])).verdict is Verdict.INVALID


def test_layers_not_identified():
    blind = dataclasses.replace(proposal(), captures=())
    assert red(judge(serving([blind], unobserved=("compiled",))))["AUX006"].verdict is Verdict.INVALID


def test_no_projection_found():
    assert red(judge(serving([proposal()], projection=None)))["AUX003"].verdict is Verdict.INVALID


def test_the_projection_sees_another_width():
    assert red(judge(serving([proposal(projections=(256,))])))["AUX003"].verdict is Verdict.FAIL


def test_equal_within_rounding_is_said():
    rounded = dataclasses.replace(
        proposal(), captures=tuple(capture(i, layer, exact=False) for i, layer in enumerate((2, 4, 5)))
    )
    judgement = judge(serving([rounded]))
    assert judgement.verdict is Verdict.PASS
    assert "within rounding" in judgement.as_text()


@pytest.mark.parametrize(
    ("config", "pair", "layers"),
    [
        ({}, None, (2, 30, 57)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, None, (1, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, None, (1, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, (2, 6, 10), (2, 6, 10)),
        ({"eagle_config": None}, None, (2, 30, 57)),
    ],
)
def test_expected_layers(config, pair, layers):
    want = aux_hidden.expected(
        drafter_config=config, target_hidden=7168, target_layers=60, pair_width=None, pair_layers=pair
    )
    assert want.layers == layers
    assert want.width == 21504

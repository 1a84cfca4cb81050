"""What reaches the drafter: each wrong width, bypass and layer is red and named."""

import dataclasses

import pytest

from harness.gate import aux_hidden
from harness.probe.facts import Absent, Stray
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
    assert found["AUX002"].summary == "7168 arrives, 21504 expected, projection bypassed"
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


@pytest.mark.parametrize(
    ("engine", "requested", "captured", "ids"),
    [
        # the drafter's ids were written as inputs, for an engine that adds 1
        ("sglang", (1, 3, 6), ((2,), (4,), (7,)), "[0, 2, 5]"),
        # and as outputs, for one that takes them as they are
        ("vllm", (0, 2, 5), ((0,), (2,), (5,)), "[1, 3, 6]"),
        # this target of SGLang takes them as they are (deepseek_v2.py, unless the first is 1)
        ("sglang", (0, 2, 5), ((0,), (2,), (5,)), "[1, 3, 6]"),
        # the stream does not change between two layers, so a chunk equals both
        ("sglang", (1, 3, 6), ((1, 2), (3, 4), (7,)), "[0, 2, 5]"),
        # the captures follow from no ids: the engine's habit
        ("sglang", None, ((3,), (4,), (7,)), "[0, 2, 5]"),
    ],
)
def test_the_ids_to_write_are_those_that_this_engine_turns_into_the_wanted_layers(engine, requested, captured, ids):
    want = dataclasses.replace(WANT, layers=(1, 3, 6))
    served = serving([proposal(layers=captured)], requested=requested)
    seen = dataclasses.replace(evidence(servings=(served,)), engine=engine)
    finding = red(aux_hidden.judge(seen, want))["AUX004"]
    assert finding.verdict is Verdict.FAIL
    assert f"for {engine}, write the ids {ids}" in finding.remedy


def test_the_ids_to_write_where_the_engine_ignored_them():
    want = dataclasses.replace(WANT, layers=(1, 3, 6))
    seen = dataclasses.replace(evidence(servings=(serving([proposal()], requested=None),)), engine="sglang")
    assert "write the ids [0, 2, 5]" in red(aux_hidden.judge(seen, want))["AUX005"].remedy


def test_an_engine_that_adds_one_cannot_capture_the_embeddings():
    want = dataclasses.replace(WANT, layers=(0, 3, 6))
    served = serving([proposal(layers=((1,), (4,), (7,)))], requested=(0, 3, 6))
    seen = dataclasses.replace(evidence(servings=(served,)), engine="sglang")
    assert "cannot be asked for" in red(aux_hidden.judge(seen, want))["AUX004"].remedy


def test_ids_with_two_readings_and_no_word_from_the_pair_are_undecided():
    want = dataclasses.replace(WANT, layers=(1, 3, 6), one_reading=True)
    finding = red(judge(serving([proposal(layers=((2,), (4,), (7,)))]), want=want))["AUX007"]
    assert finding.verdict is Verdict.INVALID
    assert "expect.aux_layers" in finding.remedy
    assert "AUX004" in red(judge(serving([proposal(layers=((2,), (4,), (6,)))]), want=want))


def test_keys_that_the_engine_looked_for_are_named():
    want = dataclasses.replace(WANT, layers=(1, 3, 6))
    absent = (Absent("eagle_config.layer_ids", ("engine",)), Absent("rope_scaling", ("engine",)))
    seen = evidence(servings=(serving([proposal()]),), absent=absent)
    cause = red(aux_hidden.judge(seen, want))["AUX005"].cause
    assert "eagle_config.layer_ids" in cause
    assert "rope" not in cause


def test_states_that_equal_nothing():
    judgement = judge(serving([proposal(layers=((), (), ()))]))
    assert "equal no target layer" in red(judgement)["AUX004"].summary
    assert not any(finding.code == "AUX008" for finding in judgement.findings), "whose they are is not known"


def test_ambiguous_but_including_the_right_one():
    assert judge(serving([proposal(layers=((1, 2), (4,), (5,)))])).verdict is Verdict.PASS


def test_one_wrong_proposal_after_a_right_one():
    assert "AUX004" in red(judge(serving([proposal(), proposal(layers=((3,), (4,), (5,)))])))


def test_nothing_seen():
    assert red(judge())["AUX001"].verdict is Verdict.INVALID
    assert red(judge(serving([])))["AUX001"].verdict is Verdict.INVALID


def test_a_silent_rank_is_invalid_although_another_is_fine():
    assert judge(serving([proposal()]), serving([])).verdict is Verdict.INVALID


@pytest.mark.parametrize("others", [[], [proposal()], [proposal(), proposal()]])
def test_layers_not_identified_in_one_proposal(others):
    blind = dataclasses.replace(proposal(), captures=())
    judgement = judge(serving([*others, blind], unobserved=("compiled",)))
    assert judgement.verdict is Verdict.INVALID
    finding = red(judgement)["AUX006"]
    assert "compiled" in finding.actual
    assert finding.remedy


def test_prompts_alone_are_no_proof_of_decoding():
    judgement = judge(serving([proposal(decode=False), proposal(decode=False)]))
    assert judgement.verdict is Verdict.INVALID
    assert "decode" in red(judgement)["AUX006"].summary
    assert judge(serving([proposal(decode=False), proposal()])).verdict is Verdict.PASS


def test_a_decode_that_was_not_identified_is_no_proof_either():
    blind = dataclasses.replace(proposal(), captures=())
    found = judge(serving([proposal(decode=False), blind])).findings
    assert sum(finding.code == "AUX006" for finding in found) == 2


def test_a_drafter_that_was_not_seen_to_run_is_not_called_bypassed():
    judgement = judge(serving([proposal(), proposal(projections=(), entered=0)]))
    assert judgement.verdict is Verdict.INVALID
    assert "could not be seen in 1 of 2" in red(judgement)["AUX003"].summary


def test_states_of_another_token():
    strays = [Stray(0, (0,), ((4,), (4,), (4,))), Stray(1, (1,), ((0,), (1,), ())), Stray(2, (), ((2, 3), (), (0,)))]
    judgement = judge(serving([proposal(), proposal(strays=strays)]))
    assert judgement.verdict is Verdict.FAIL
    (finding,) = red(judgement).values()
    assert finding.code == "AUX008"
    assert "another token" in finding.summary
    assert "3 of 10 rows" in finding.summary
    assert "proposal 2 of 2, row 0: chunk 0 holds row 4" in finding.actual
    assert "row 1: chunk 0 holds row 0, chunk 1 holds row 1, chunk 2 holds no row of this pass" in finding.actual
    assert "instead of row 1" in finding.actual
    assert "chunk 0 holds row 2 or 3" in finding.actual
    assert finding.cause
    assert finding.remedy


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
    assert want.one_reading == (pair is None and bool(config.get("eagle_config") or "eagle_aux" in str(config)))

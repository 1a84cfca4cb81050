"""A fault in what an engine hands over is named for what it is, and where it is; agreement is not."""

import dataclasses

import numpy as np
import pytest

from harness.errors import EvidenceError
from harness.parity.capture import Asked
from harness.parity.compare import ROOM, UNIT, between, measure
from harness.parity.judge import judge_between, judge_tokens
from harness.parity.reference import Forward
from harness.verdict import Verdict
from tests.parity.world import AUX, HIDDEN, LAYERS, PROMPTS, WANT, engine, forwards, judged, one_reading, red


@pytest.fixture(scope="module")
def truth():
    return forwards()


def test_what_the_reference_rounds_to_agrees(truth):
    measured, findings = judged(engine(truth), truth)
    assert {finding.code: str(finding.verdict) for finding in findings} == {"PAR002": "PASS", "PAR003": "PASS"}
    assert [slot.nearest for slot in measured.slots] == list(AUX)
    assert all((slot.error <= slot.limit).all() and slot.limit.max() < slot.apart / 2 for slot in measured.slots)
    assert "12 rows of prompts, 7 of generated tokens" in findings[1].actual


@pytest.mark.parametrize("layers", [(2, 5, 5), (2, 4, 6), (1, 3, 4), (0, 4, 5)])
def test_a_shifted_layer_is_named_and_so_are_the_ids_to_write(truth, layers):
    _, findings = judged(engine(truth, layers), truth)
    found = red(findings)
    assert set(found) == {"PAR002"}
    for index, (layer, wanted) in enumerate(zip(layers, AUX, strict=True)):
        said = f"slot {index} of sglang 1.0 is layer {layer} of the reference, not {wanted}"
        assert (said in found["PAR002"].summary) == (layer != wanted)


def test_the_remedy_is_by_what_the_engine_added_to_the_ids_it_asked_for(truth):
    _, findings = judged(engine(truth, (3, 5, 6)), truth, requested=AUX)
    assert "write the ids [1, 3, 4]" in red(findings)["PAR002"].remedy
    _, findings = judged(engine(truth, (1, 3, 4)), truth, name="vllm", requested=(1, 3, 4))
    assert "write the ids [2, 4, 5]" in red(findings)["PAR002"].remedy


def test_swapped_slots_are_both_named(truth):
    _, findings = judged(engine(truth, (4, 2, 5)), truth)
    summary = red(findings)["PAR002"].summary
    assert "slot 0 of sglang 1.0 is layer 4 of the reference, not 2" in summary
    assert "slot 1 of sglang 1.0 is layer 2 of the reference, not 4" in summary
    assert "slot 2" not in summary


@pytest.mark.parametrize(
    ("layer", "name"), [(LAYERS, "the last layer's output"), (LAYERS + 1, "the final normed state")]
)
def test_what_is_no_layers_input_is_named(truth, layer, name):
    _, findings = judged(engine(truth, (2, 4, layer)), truth)
    assert f"slot 2 of sglang 1.0 is {name} of the reference, not 5" in red(findings)["PAR002"].summary


def test_ids_with_two_readings_are_not_called_wrong(truth):
    _, findings = judged(engine(truth, (3, 5, 6)), truth, want=one_reading())
    assert red(findings)["PAR008"].verdict is Verdict.INVALID
    assert "expect.aux_layers" in red(findings)["PAR008"].remedy
    _, findings = judged(engine(truth, (3, 5, 7)), truth, want=one_reading())
    assert red(findings)["PAR002"].verdict is Verdict.FAIL


def test_scaled_values_are_off_by_scale(truth):
    _, findings = judged(engine(truth, change=lambda features, _: features * 1.1), truth)
    found = red(findings)["PAR003"]
    assert "1.1 times" in found.cause
    assert "off beyond bfloat16 in 19 of 19 rows" in found.summary


def at(prompt, position, slot, value):
    def change(features, name):
        if name == prompt:
            features[position, slot * HIDDEN : (slot + 1) * HIDDEN] = value(
                features[position, slot * HIDDEN :][:HIDDEN]
            )
        return features

    return change


def test_one_bad_position_is_found_and_named(truth):
    measured, findings = judged(engine(truth, change=at("p01", 7, 1, lambda row: row[::-1])), truth)
    (found,) = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    assert "slot 1 of sglang 1.0 is layer 4, off beyond bfloat16 in 1 of 19 rows" in found.summary
    assert "p01 position 7 (token 37, generated)" in found.actual
    assert f"relative error {measured.slots[1].error.max():.3g}" in found.actual
    assert "single rows are wrong" in found.cause


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(truth, value):
    _, findings = judged(engine(truth, change=at("p00", 3, 2, lambda row: row * value)), truth)
    found = red(findings)["PAR003"]
    assert "not finite in 1 of 19 rows" in found.summary
    assert "p00 position 3 (token 13, prompt)" in found.actual


def test_all_values_that_are_not_finite(truth):
    _, findings = judged(engine(truth, change=lambda features, _: features * np.nan), truth)
    assert "not finite in 19 of 19 rows" in red(findings)["PAR003"].summary


def test_states_from_elsewhere_are_no_state_of_the_reference(truth):
    _, findings = judged(engine(forwards(seed=1)), truth)
    assert all(finding.verdict is Verdict.FAIL for finding in findings if finding.code == "PAR003")
    assert "is no state of the reference" in " ".join(finding.summary for finding in findings)
    assert "PAR002" not in {finding.code for finding in findings}, "nothing says that the layers are right"


def test_zeros_agree_with_nothing(truth):
    _, findings = judged(engine(truth, change=lambda features, _: features * 0), truth)
    assert red(findings)["PAR003"].verdict is Verdict.FAIL


def test_one_state_instead_of_three(truth):
    _, findings = judged(engine(truth, (LAYERS + 1,)), truth)
    assert red(findings)["PAR006"].summary == "sglang 1.0 hands over 1 states a token, 3 are expected"
    assert "slot 0: the final normed state" in red(findings)["PAR006"].actual


def test_the_tolerance_is_the_reference_s_own_rounding(truth):
    exact = {ids: Forward(found.wide, found.wide) for ids, found in truth.items()}
    measured = measure(engine(truth), exact, AUX, "bfloat16")
    assert {limit for slot in measured.slots for limit in slot.limit} == {ROOM * UNIT["bfloat16"]}
    coarse = {ids: Forward(found.wide * 1.01, found.wide) for ids, found in truth.items()}
    for found in coarse.values():
        found.own[:, 3] *= 1.05  # one row in which the reference itself loses more
    for slot in measure(engine(truth), coarse, AUX, "bfloat16").slots:
        assert slot.tolerance[slot.judged] == pytest.approx(ROOM * 0.01, rel=1e-3)
        assert slot.limit[[2, 3, 4]] == pytest.approx([ROOM * 0.01, ROOM * 0.0605, ROOM * 0.01], rel=1e-3)


def test_a_reference_too_coarse_to_tell_layers_apart_decides_nothing(truth):
    rng = np.random.default_rng(3)
    coarse = {
        ids: Forward(found.wide + rng.normal(size=found.wide.shape) * 2, found.wide) for ids, found in truth.items()
    }
    _, findings = judged(engine(truth), coarse)
    assert {finding.verdict for finding in findings if finding.code == "PAR007"} == {Verdict.INVALID}


def test_nothing_to_compare_is_no_agreement(truth):
    with pytest.raises(EvidenceError, match="no row"):
        measure((), truth, AUX, "bfloat16")
    with pytest.raises(EvidenceError, match="no states of prompt p01"):
        measure(engine(truth), {PROMPTS["p00"][1]: truth[PROMPTS["p00"][1]]}, AUX, "bfloat16")
    narrow = [dataclasses.replace(rows, features=rows.features[:, :-1]) for rows in engine(truth)]
    with pytest.raises(EvidenceError, match=r"\[95\] wide"):
        measure(narrow, truth, AUX, "bfloat16")


def test_prompts_that_are_tokenised_differently_are_not_compared():
    asked = [Asked("p00", (1, 2, 3), (4,)), Asked("p01", (0, 5, 6), (7,))]
    assert judge_tokens(asked, {}, "vllm") == []
    (same,) = judge_tokens(asked, {"p00": (1, 2, 3), "p01": (0, 5, 6)}, "vllm")
    assert same.verdict is Verdict.PASS
    for theirs, place in (((5, 6), 0), ((0, 5), 2), ((0, 5, 6, 7), 3)):
        (found,) = judge_tokens(asked, {"p00": (1, 2, 3), "p01": theirs}, "vllm")
        assert (found.code, found.verdict) == ("PAR004", Verdict.INVALID)
        assert f"prompt p01 differently, from token {place} on" in found.summary


def against(truth, first, second):
    one, two = (measure(rows, truth, WANT.layers, "bfloat16") for rows in (first, second))
    (found,) = judge_between(("vllm 1", "sglang 1"), (one, two), between(first, second, HIDDEN))
    return found


def test_two_engines_that_agree(truth):
    found = against(truth, engine(truth), engine(truth))
    assert (found.code, found.verdict, found.n) == ("PAR005", Verdict.PASS, 57)


def test_two_engines_that_capture_different_layers(truth):
    found = against(truth, engine(truth), engine(truth, (3, 5, 6)))
    assert found.verdict is Verdict.FAIL
    assert found.summary == "slot 0 is layer 2 on vllm 1 and layer 3 on sglang 1 (and 2 more slots)"


def test_two_engines_that_differ_at_one_position(truth):
    found = against(truth, engine(truth), engine(truth, change=at("p00", 6, 0, lambda row: -row)))
    assert found.verdict is Verdict.FAIL
    assert "slot 0, p00 position 6" in found.actual


def test_rows_after_outputs_part_are_not_laid_side_by_side(truth):
    first = engine(truth)
    _, ids = PROMPTS["p00"]
    parted = dataclasses.replace(first[0], token_ids=(*ids[:8], 99, 98))
    rows, _ = between(first, (parted,), HIDDEN)
    assert [row.position for row in rows] == list(range(8))
    with pytest.raises(EvidenceError, match="no row"):
        between(first, (dataclasses.replace(parted, token_ids=(99, *ids[1:])),), HIDDEN)
    with pytest.raises(EvidenceError, match="96 values a row, the other 64"):
        between(first, engine(truth, (2, 4)), HIDDEN)

"""The states that the real SGLang feeds a drafter, against a plain forward of the target, and against vLLM's."""

import pytest

from tests.engine.support import states

pytestmark = pytest.mark.engine


def test_a_canary_agrees_with_the_reference_and_with_the_other_engine(compare_states, sglang_python, vllm_python):
    result = compare_states({"sglang": sglang_python, "vllm": vllm_python}, 'canary = "small"', "k = 4")
    assert result.status == 0, result.output
    first, second = result.record["cases"]
    (between,) = [found for found in second["judgements"][0]["findings"] if found["code"] == "PAR005"]
    assert "feed the drafter the same states" in between["summary"]
    for number, case in enumerate((first, second)):
        numbers = states(result.record, number)
        assert [slot["nearest"] for slot in numbers["slots"]] == [2, 4, 5], case["id"]
        assert max(max(slot["error"]) for slot in numbers["slots"]) < 1e-6
        assert sum(row[3] for row in numbers["rows"]) > 20, "rows of generated tokens"


def test_ids_of_the_other_engine_s_meaning_show_as_a_shift(compare_states, sglang_python):
    result = compare_states(
        {"sglang": sglang_python}, 'canary = "aux-layers"', "k = 4", "expect = { aux_layers = [1, 3, 6] }"
    )
    assert result.status == 1, result.output
    found = result.finding("parity", "PAR002")
    for slot, (layer, wanted) in enumerate(((2, 1), (4, 3), (7, 6))):
        assert f"slot {slot} of sglang " in found["summary"]
        assert f"is layer {layer} of the reference, not {wanted}" in found["summary"]
    assert "write the ids [0, 2, 5]" in found["remedy"]

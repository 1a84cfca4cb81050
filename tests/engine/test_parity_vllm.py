"""The states that the real vLLM feeds a drafter, against a plain forward of the target."""

import pytest

from tests.engine.support import states

pytestmark = pytest.mark.engine


def test_a_canary_agrees_bit_for_bit(compare_states, vllm_python):
    """Every value of a canary is exact in bfloat16, and its rounding in float32 is below bfloat16's."""
    result = compare_states({"vllm": vllm_python}, 'canary = "small-wrong"', "k = 4")
    assert result.status == 0, result.output
    assert [finding["code"] for finding in result.suite("parity")["findings"]] == ["PAR002", "PAR003"]
    numbers = states(result.record)
    assert [slot["nearest"] for slot in numbers["slots"]] == [2, 4, 5]
    assert max(max(slot["error"]) for slot in numbers["slots"]) < 1e-6
    assert sum(row[3] for row in numbers["rows"]) > 20, "rows of generated tokens, refused drafts left out"


def test_ids_of_the_other_engine_s_meaning_show_as_a_shift(compare_states, vllm_python):
    result = compare_states(
        {"vllm": vllm_python}, 'canary = "aux-layers-outputs"', "k = 4", "expect = { aux_layers = [1, 3, 6] }"
    )
    assert result.status == 1, result.output
    found = result.finding("parity", "PAR002")
    for slot, (layer, wanted) in enumerate(((0, 1), (2, 3), (5, 6))):
        assert f"slot {slot} of vllm " in found["summary"]
        assert f"is layer {layer} of the reference, not {wanted}" in found["summary"]
    assert "write the ids [1, 3, 6]" in found["remedy"]

"""Asking a contract: every key is matched to what was tried, and nothing is made up for what was not."""

import dataclasses

import pytest

from harness.contracts import model
from harness.contracts.model import Condition, ConfigKey, Contract, KeyRow, Parameter
from harness.contracts.trials import LAYER_NAMES, NATIVE, TOP_NAMES, UNKNOWN
from harness.errors import EvidenceError

LAYER, TOP = tuple(sorted(LAYER_NAMES)), tuple(sorted(TOP_NAMES))
USED = ("hidden_norm.weight",)
REST = tuple(name for name in LAYER if name not in USED)


def rows(prefix, *, used):
    if not used:
        return [KeyRow(prefix, "layer", "dropped", LAYER)]
    return [KeyRow(prefix, "layer", "dropped", REST), KeyRow(prefix, "layer", "used", USED)]


@pytest.fixture
def contract():
    bias = "self_attn.q_proj.bias"
    return Contract(
        engine="sglang",
        version="9.9.9",
        asked={"layer": LAYER, "top": TOP},
        model_class="sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3",
        architectures={},
        aux={},
        dialects={},
        files={},
        made_with={"python": "3.11"},
        parameters=(Parameter("model.midlayer.hidden_norm.weight", ("hidden",), ((f"{NATIVE}hidden_norm.weight",),)),),
        keys=(
            *rows(NATIVE, used=True),
            *rows("model.midlayer.", used=True),
            *rows("layers.0.", used=False),
            *rows("layers.1.", used=False),
            *(row for prefix in UNKNOWN["layer"] for row in rows(prefix, used=False)),
            *(KeyRow(prefix, "top", "dropped", TOP) for prefix in ("", "model.", *UNKNOWN["top"])),
        ),
        conditions=(
            Condition(
                "attention_bias=true",
                adds=(Parameter("model.midlayer.bias", ("q",), ((NATIVE + bias,),)),),
                keys=(KeyRow(NATIVE, "layer", "used", (bias,)),),
            ),
            Condition("num_hidden_layers=2", keys=(KeyRow("layers.1.", "layer", "used", USED),)),
            Condition('draft_vocab_size="absent"', error="AttributeError"),
            Condition("eagle_config.eagle_aux_hidden_state_layer_ids=[1,3,5,6]"),
        ),
        config=(ConfigKey("fc_norm", ("a.b",), ()),),
    )


def ask(contract, key, **config):
    return contract.fate(key, contract.holding({"draft_vocab_size": 192, **config}))


def test_a_known_prefix(contract):
    assert ask(contract, "midlayer.hidden_norm.weight").into == ("model.midlayer.hidden_norm.weight",)
    assert ask(contract, "layers.0.hidden_norm.weight").fate == "dropped"


def test_a_prefix_that_was_never_tried_fares_as_those_that_nobody_knows(contract):
    assert ask(contract, "speculator.block.hidden_norm.weight").fate == "dropped"
    kept = [row for row in contract.keys if row.prefix != "decoder."]
    torn = dataclasses.replace(contract, keys=(*kept, *rows("decoder.", used=True)))
    assert ask(torn, "speculator.block.hidden_norm.weight").fate == "unknown"


def test_a_condition_holds_under_every_prefix_that_fares_as_the_native_one(contract):
    for prefix in (NATIVE, "model.midlayer."):
        assert ask(contract, f"{prefix}self_attn.q_proj.bias").fate == "dropped"
        assert ask(contract, f"{prefix}self_attn.q_proj.bias", attention_bias=True).fate == "used"
    assert ask(contract, "layers.0.self_attn.q_proj.bias", attention_bias=True).fate == "dropped"


def test_later_layers_fare_as_the_second(contract):
    assert ask(contract, "layers.3.hidden_norm.weight").fate == "dropped"
    assert ask(contract, "layers.3.hidden_norm.weight", num_hidden_layers=4).fate == "used"


def test_names_never_heard_of(contract):
    assert ask(contract, "midlayer.mystery.weight").fate == "dropped"
    assert ask(contract, "mystery").fate == "dropped"
    assert ask(dataclasses.replace(contract, keys=()), "fc.weight").fate == "unknown"


@pytest.mark.parametrize(
    ("config", "held"),
    [
        ({"draft_vocab_size": 1}, set()),
        ({}, {'draft_vocab_size="absent"'}),
        ({"draft_vocab_size": 1, "attention_bias": True}, {"attention_bias=true"}),
        ({"draft_vocab_size": 1, "attention_bias": 1}, set()),
        ({"draft_vocab_size": 1, "num_hidden_layers": 7}, {"num_hidden_layers=2"}),
        # How the release counts hidden states is asked otherwise.
        ({"draft_vocab_size": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}, set()),
        ({"draft_vocab_size": 1, "eagle_config": None}, set()),
    ],
)
def test_which_conditions_a_config_fulfils(contract, config, held):
    assert {condition.when for condition in contract.holding(config)} == held


def test_how_many_hidden_states(contract):
    """By the places that the release was seen to count by, and by no other."""
    nested, top = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}, "num_aux_hidden_states"
    assert contract.hidden_states({}) == 3
    assert contract.hidden_states(nested) == 4
    assert contract.hidden_states({**nested, top: 5}) == 4, "it was not tried"
    for effect, counted in ({}, 5), ({"adds": contract.parameters}, 4):
        tried = dataclasses.replace(contract, conditions=(*contract.conditions, Condition(f"{top}=4", **effect)))
        assert tried.hidden_states({**nested, top: 5}) == counted


def test_a_file_says_what_the_contract_says(contract, tmp_path):
    file = tmp_path / "sglang-9.9.9.json"
    file.write_text(model.render(contract))
    assert model.load(file) == contract
    assert model.render(model.load(file)) == file.read_text()
    assert '"fate": "dropped", "names": ["*"]' in file.read_text()
    assert model.versions("sglang", tmp_path) == ["9.9.9"]
    assert model.shipped("sglang", "9.9.8", tmp_path) is None


def test_how_it_was_made_is_no_part_of_what_it_says(contract):
    assert contract.same_as(dataclasses.replace(contract, made_with={}))
    assert not contract.same_as(dataclasses.replace(contract, keys=contract.keys[:-1]))


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 99}', '{"schema": 1, "engine": "sglang"}', "[]"])
def test_a_damaged_file_is_told(text, tmp_path):
    file = tmp_path / "sglang-1.json"
    file.write_text(text)
    with pytest.raises(EvidenceError, match=r"sglang-1\.json"):
        model.load(file)

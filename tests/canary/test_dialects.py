"""One drafter in five trainers' dialects: other names, other configs, the same acceptance."""

import dataclasses
import json

import pytest

from harness.canary.dialects import DIALECTS, read_drafter_config
from harness.canary.faults import tensor_names
from harness.canary.reference import Scorer
from harness.canary.spec import SHIPPED
from harness.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"hidden": 128, "dtype": "float32"}
OPTIONS = [
    {},
    {"own_embed_tokens": True},
    {"full_draft_vocab": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"attention_bias": True},
    {"aux_ids": "top-level", "aux_layers": (1, 3, 6)},
    {"aux_ids": "nested", "aux_layers": (1, 3, 6)},
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: "-".join(map(str, option.values())) or "plain")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_acceptance_in_every_dialect(make_canary, dialect, option):
    canary = make_canary(dialect=dialect, wrong_fraction=0.25, **QUICK, **option)
    prompts = canary.oracle.prompts(2, 16, seed=1)
    assert Scorer(canary, prompts, 40, 4).score(canary.drafter) == canary.oracle.total(prompts, 40, 4)


def test_the_weights_are_the_same_under_other_names(make_canary):
    from safetensors.numpy import load_file

    plain = load_file(make_canary(**QUICK).drafter / "model.safetensors")
    for dialect, rules in DIALECTS.items():
        other = load_file(make_canary(dialect=dialect, **QUICK).drafter / "model.safetensors")
        assert ("t2d" in other) == rules.t2d
        for name, tensor in other.items():
            assert (tensor == plain[name.replace(rules.layer_prefix, "midlayer.")]).all(), name


def test_names_and_places(make_canary):
    def of(dialect, **option):
        canary = make_canary(dialect=dialect, **QUICK, **option)
        return json.loads((canary.drafter / "config.json").read_text()), tensor_names(canary.drafter)

    config, names = of("yuhuili")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "midlayer.hidden_norm.weight" in names
    assert "eagle_config" not in config

    config, names = of("modelopt", aux_ids="nested", norm_before_fc=True)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["norm_before_fc"] is True
    assert "layers.0.hidden_norm.weight" in names
    assert "t2d" not in names

    config, names = of("specforge", aux_ids="nested", aux_ids_are="outputs", norm_output=True)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["norm_output"] is True

    config, names = of("speculators", aux_ids="top-level")
    assert config["transformer_layer_config"]["hidden_size"] == 128
    assert "hidden_size" not in config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == 33

    config, names = of("angelslim", full_draft_vocab=True, own_embed_tokens=True)
    assert config["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert config["draft_vocab_size"] == 512
    assert not {"d2t", "t2d"} & set(names)
    assert "embed_tokens.weight" in names


def test_ids_written_as_outputs_are_other_layers_to_an_engine_that_takes_inputs(make_canary):
    canary = make_canary(aux_ids="nested", aux_ids_are="outputs", **QUICK)
    scorer = Scorer(canary, canary.oracle.prompts(2, 16, seed=1), 40, 4)
    assert scorer.score(canary.drafter).accepted == 0
    assert scorer.score(canary.drafter, layers=canary.spec.aux).accepted == 2 * 8 * 4


def test_the_shipped_aux_layers_pair_names_its_layers_as_inputs(make_canary):
    spec = SHIPPED["aux-layers"]
    canary = make_canary(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})
    assert read_drafter_config(canary.drafter).aux_layers == (1, 3, 6)


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_an_unreadable_config_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_drafter_config(tmp_path)

"""What kind of model it is: every dialect of the canaries, every method, and configs that contradict the tensors."""

import dataclasses
import json

import pytest

from harness.canary.build import build
from harness.canary.dialects import DIALECTS
from harness.canary.spec import SHIPPED
from harness.checkpoint import read as checkpoint
from harness.checkpoint.recognise import METHODS, recognise
from tests.checkpoint.files import blob

EAGLE3 = {
    "d2t": [8],
    "fc.weight": [16, 48],
    "layers.0.hidden_norm.weight": [16],
    "layers.0.self_attn.q_proj.weight": [16, 32],
    "lm_head.weight": [8, 16],
    "norm.weight": [16],
}
TARGET = {
    "model.embed_tokens.weight": [32, 16],
    "lm_head.weight": [32, 16],
    **{f"model.layers.{layer}.input_layernorm.weight": [16] for layer in range(12)},
    **{f"model.layers.{layer}.self_attn.q_proj.weight": [16, 16] for layer in range(12)},
}
NEXTN = {
    "eh_proj.weight": [16, 32],
    "enorm.weight": [16],
    "hnorm.weight": [16],
    "input_layernorm.weight": [16],
    "self_attn.q_proj.weight": [16, 16],
}


def under(prefix, tensors):
    return {f"{prefix}{name}": shape for name, shape in tensors.items()}


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a checkpoint of these shapes (bytes, all zero) and recognises it."""

    def write(tensors, config):
        header, position = {}, 0
        for name, shape in tensors.items():
            size = 1
            for extent in shape:
                size *= extent
            header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [position, position + size]}
            position += size
        (tmp_path / "model.safetensors").write_bytes(blob(header, bytes(position)))
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        found, findings = recognise(checkpoint.read(tmp_path, config_optional=True))
        return found, [finding.code for finding in findings]

    return write


@pytest.mark.parametrize("aux", ["none", "top-level", "nested"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_canary(tmp_path, dialect, aux):
    spec = dataclasses.replace(SHIPPED["small"], dialect=dialect, aux_ids=aux)
    canary = build(spec, tmp_path / "pair")
    found, findings = recognise(checkpoint.read(canary.drafter))
    assert (found.method, found.dialect, found.layer) == ("eagle3", dialect, DIALECTS[dialect].layer_prefix)
    assert (found.aux_count, found.target_hidden, found.vocab) == (3, spec.hidden, spec.vocab)
    assert found.draft_vocab == 33
    assert [aux.ids for aux in found.aux_layers] == ([] if aux == "none" else [spec.aux])
    assert findings == ()
    found, findings = recognise(checkpoint.read(canary.target))
    assert (found.method, found.dialect, found.draft_vocab, findings) == ("model", "", None, ())


BODY = {"hidden_size": 16, "vocab_size": 32}
METHOD_CASES = {
    "eagle": ({"fc.weight": [16, 32], "layers.0.self_attn.q_proj.weight": [16, 16]}, {}, "eagle"),
    "eagle of speculators": (
        {"fusion_fc.weight": [16, 32], "transformer.self_attn.q_proj.weight": [16, 16]},
        {"speculators_model_type": "eagle"},
        "eagle",
    ),
    "eagle by config alone": ({"odd": [1]}, {"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
    "eagle3": (EAGLE3, {}, "eagle3"),
    "eagle3 under a wrapper": (under("draft_model.", EAGLE3), {}, "eagle3"),
    "eagle3 under an unknown prefix": (
        {name.replace("layers.0.", "odd."): shape for name, shape in EAGLE3.items()},
        {"architectures": ["LlamaForCausalLMEagle3"]},
        "eagle3",
    ),
    "p-eagle": ({**EAGLE3, "mask_hidden": [1, 1, 48]}, {"architectures": ["PEagleDraftModel"]}, "p-eagle"),
    "nextn alone": (under("model.layers.0.", NEXTN), {"architectures": ["DeepseekV3ForCausalLMNextN"]}, "mtp"),
    "nextn in a target": ({**TARGET, **under("model.layers.12.", NEXTN)}, {}, "model"),
    "qwen3-next": (
        {"mtp.fc.weight": [16, 32], "mtp.layers.0.input_layernorm.weight": [16], "mtp.pre_fc_norm_hidden.weight": [16]},
        {},
        "mtp",
    ),
    "mimo": ({"model.mtp_layers.0.input_layernorm.weight": [16]}, {}, "mtp"),
    "ernie": ({"model.mtp_linear_proj.0.weight": [16, 32]}, {}, "mtp"),
    "medusa": ({"0.0.linear.weight": [16, 16], "0.1.weight": [32, 16]}, {}, "medusa"),
    "medusa, prefixed": ({"medusa_heads.0.0.linear.weight": [16, 16]}, {"medusa_num_heads": 1}, "medusa"),
    "medusa of vllm": ({"blocks.0.layers.0.weight": [16, 16], "lm_heads.0.weight": [32, 16]}, {}, "medusa"),
    "dflash": (
        {"fc.weight": [16, 80], "hidden_norm.weight": [16], "layers.0.self_attn.q_proj.weight": [16, 16]},
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 2, 3, 4, 5]}},
        "dflash",
    ),
    "a target": (TARGET, {"architectures": ["LlamaForCausalLM"]}, "model"),
    "gpt2": ({"wte.weight": [32, 16], "h.0.ln_1.weight": [16]}, {}, "model"),
    "nothing known": ({"odd": [1]}, {}, "unknown"),
}


@pytest.mark.parametrize(("tensors", "config", "method"), METHOD_CASES.values(), ids=METHOD_CASES)
def test_methods(make, tensors, config, method):
    found, codes = make(tensors, {**BODY, **config})
    assert found.method == method
    assert not {"INS102", "INS104", "INS105", "INS106"} & set(codes)
    assert ("INS101" in codes) == (method == "unknown")


def test_every_method_was_tried():
    assert {method for _, _, method in METHOD_CASES.values()} == set(METHODS)


def test_mtp_layers_within_a_target_are_named(make):
    assert make({**TARGET, **under("model.layers.12.", NEXTN)}, BODY)[0].contains_mtp
    assert not make(TARGET, BODY)[0].contains_mtp


def test_without_a_config_the_tensors_decide(make):
    found, codes = make(EAGLE3, None)
    assert (found.method, found.dialect, found.aux_count, found.draft_vocab, codes) == ("eagle3", "", None, 8, [])


@pytest.mark.parametrize("end", [".self_attn.q_proj.weight", ".weight"])
def test_a_name_as_long_as_a_book(make, end):
    """What takes the square of its length takes hours here."""
    assert make({**EAGLE3, "a" * 1_000_000 + end: [1]}, BODY)[0].method == "eagle3"


@pytest.mark.parametrize(
    ("name", "wrapper", "layer"),
    [
        ("midlayer.self_attn.q_proj.weight", "", "midlayer."),
        ("layers.0.self_attn.q_proj.weight", "", "layers.0."),
        ("draft_model.model.layers.10.self_attn.q_proj.weight", "draft_model.model.", "layers.10."),
        ("0.self_attn.q_proj.weight", "", "0."),
        ("model.decoder.self_attn.q_proj.weight", "model.", "decoder."),
        ("self_attn.q_proj.weight", "", ""),
    ],
)
def test_what_stands_before_the_attention(make, name, wrapper, layer):
    found, _ = make({"fc.weight": [16, 48], name: [16, 32]}, {"speculators_model_type": "eagle3"})
    assert (found.wrapper, found.layer) == (wrapper, layer)


@pytest.mark.parametrize("wrapper", ["", "model.", "draft_model.model."])
@pytest.mark.parametrize("layer", ["layers.0.", "midlayer.", "odd."])
def test_the_wrapper_is_told_from_the_layer(make, wrapper, layer):
    tensors = {name.replace("layers.0.", layer): shape for name, shape in EAGLE3.items()}
    found, _ = make(under(wrapper, tensors), BODY)
    assert (found.wrapper, found.layer, found.aux_count) == (wrapper, layer, 3)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"architectures": ["MedusaModel"]}, "INS102"),
        ({"speculators_model_type": "dflash"}, "INS102"),
        ({"architectures": ["PEagleDraftModel"]}, "INS102"),
        # The founding incident: layers of one dialect under the config of another.
        ({"architectures": ["LlamaForCausalLM"]}, "INS103"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 20}, "INS104"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "INS105"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, "INS105"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
            },
            "INS106",
        ),
    ],
)
def test_contradictions(make, config, code):
    assert code in make(EAGLE3, {**BODY, **config})[1]


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "modelopt"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "modelopt"),
        ({"architectures": ["Eagle3Speculator"]}, "speculators"),
        ({"speculators_model_type": "eagle3"}, "speculators"),
    ],
)
def test_dialects_by_config(make, config, dialect):
    found, codes = make(EAGLE3, {**BODY, **config})
    assert (found.dialect, codes) == (dialect, [])


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": "LlamaForCausalLM", "hidden_size": "16", "vocab_size": True, "eagle_config": []},
        {
            "architectures": [None, 3],
            "text_config": 7,
            "eagle_aux_hidden_state_layer_ids": ["a"],
            "draft_vocab_size": -1,
        },
        {"transformer_layer_config": {"hidden_size": None}, "speculators_model_type": ["x"]},
    ],
)
def test_configs_of_wrong_types_are_no_traceback(make, config):
    assert make(EAGLE3, config)[0].method == "eagle3"

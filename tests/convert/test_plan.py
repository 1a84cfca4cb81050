"""What a conversion decides: ids, options, losses, settings that must be said otherwise."""

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from harness.canary.build import build
from harness.canary.spec import SHIPPED
from harness.checkpoint.read import read
from harness.contracts import check
from harness.convert import drafter, plan
from harness.errors import CheckpointError, UsageError
from tests.convert.support import config_of, convert, edit_config, held, write_drafter, write_target

IDS = drafter.IDS


@pytest.fixture
def source(tmp_path):
    return write_drafter(tmp_path / "source", "specforge")


def planned(folder, to="sglang", **request):
    return plan.make(read(folder), plan.Request(to, **request))


def rewrite(folder, change):
    """Apply `change` to the dict of tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def nested(ids):
    return {"eagle_config": {IDS: ids}}


# -- layer ids


def test_ids_that_may_count_inputs_or_outputs_are_not_guessed(source):
    edit_config(source, **nested([1, 3, 6]))
    with pytest.raises(UsageError, match=r"nothing says.*\n.*--aux-ids-are inputs.*--aux-ids-are outputs"):
        planned(source)


@pytest.mark.parametrize(
    ("ids", "are", "to", "written"),
    [
        ([1, 3, 6], "inputs", "sglang", [0, 2, 5]),
        ([0, 2, 5], "outputs", "sglang", [0, 2, 5]),
        ([0, 2, 5], "outputs", "vllm", [1, 3, 6]),
        ([1, 3, 6], "inputs", "vllm", [1, 3, 6]),
        ([0, 2, 5], "outputs", "modelopt", [0, 2, 5]),
        ([1, 3, 6], "inputs", "specforge", [0, 2, 5]),
    ],
)
def test_ids_are_written_as_the_dialect_counts(source, ids, are, to, written):
    edit_config(source, **nested(ids))
    lossy = ["t2d"] if to == "modelopt" else []
    config = planned(source, to, aux_ids_are=are, lossy=lossy).config
    assert config.get(IDS, config.get("eagle_config", {}).get(IDS)) == written
    assert (IDS in config) == (to == "vllm")


def test_what_was_converted_knows_what_its_ids_count(source, tmp_path):
    edit_config(source, **nested([1, 3, 6]))
    made = convert(source, tmp_path / "sglang", "sglang", aux_ids_are="inputs")
    assert planned(made, "vllm").config[IDS] == [1, 3, 6]


def test_the_input_of_layer_0_is_no_output(source):
    edit_config(source, **nested([0, 3, 6]))
    assert planned(source, "vllm", aux_ids_are="inputs").config[IDS] == [0, 3, 6]
    with pytest.raises(CheckpointError, match="cannot be told"):
        planned(source, aux_ids_are="inputs")
    with pytest.raises(CheckpointError, match="cannot say"):
        planned(source, "specforge", aux_ids_are="inputs")


DEEPSEEK = ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM"]  # fmt: skip


@pytest.mark.parametrize("architecture", DEEPSEEK)
@pytest.mark.parametrize(
    ("inputs", "written"), [([2, 30, 58], [1, 29, 57]), ([3, 30, 58], [3, 30, 58]), ([1, 30, 58], None)]
)
def test_sglangs_deepseek_class_has_a_rule_of_its_own(source, tmp_path, architecture, inputs, written):
    target = write_target(tmp_path / "target", architecture)
    edit_config(source, **nested(inputs))
    if written is None:
        with pytest.raises(CheckpointError, match=r"cannot be told: it adds 1 to each id if the first is 1"):
            planned(source, aux_ids_are="inputs", target=target)
    else:
        made = planned(source, aux_ids_are="inputs", target=target)
        assert made.config["eagle_config"][IDS] == written
        [finding] = [f for f in check.check(made.preview, target, made.contract).findings if f.code == "CHK403"]
        assert finding.severity == "note"
        # ... and reading it again must give the same layers.
        edit_config(source, **dict(made.config))
        assert drafter.understand(read(source)).aux == tuple(inputs)


@pytest.mark.parametrize(
    ("version", "written", "noted"),
    [("0.5.12", [2, 29, 57], False), ("0.5.13", [3, 30, 58], True), ("0.5.15", [3, 30, 58], False)],
)
def test_that_rule_is_young(source, tmp_path, version, written, noted):
    edit_config(source, **nested([3, 30, 58]))
    target = write_target(tmp_path / "target", "DeepseekV3ForCausalLM")
    made = planned(source, aux_ids_are="inputs", target=target, engine_version=version)
    assert made.config["eagle_config"][IDS] == written
    assert any("was not read" in note for note in made.notes) is noted


def test_two_places_that_disagree(source):
    edit_config(source, **{IDS: [1, 3, 6]}, **nested([0, 2, 5]))
    with pytest.raises(CheckpointError, match="two places name different layers"):
        planned(source, aux_ids_are="inputs")


def test_four_layers_reach_vllm(source):
    edit_config(source, **nested([1, 2, 3, 6]))
    made = planned(source, "vllm", aux_ids_are="inputs")
    assert made.config["num_aux_hidden_states"] == 4
    assert not made.lost


# -- engine releases and losses


@pytest.mark.parametrize("version", ["0.5.1", "0.5.3", "0.5.10.post1", "0.5.12", "0.5.23"])
def test_sglang_gets_names_that_each_release_knows(tmp_path, version):
    source = write_drafter(tmp_path / "source", "modelopt")
    made = planned(source, engine_version=version)
    assert made.release == f"sglang=={version}"
    assert not [name for name in made.names.values() if name.startswith("layers.")]
    assert len([name for name in made.names.values() if name.startswith("midlayer.")]) == 10


@pytest.mark.parametrize(
    ("options", "to", "version", "lost", "tensors"),
    [
        ({"norm_before_residual": True}, "sglang", "0.5.23", "norm_before_residual", 0),
        ({"attention_bias": True}, "sglang", "0.5.23", "attention_bias", 3),
        ({"fc_norm": True}, "sglang", "0.5.10.post1", "fc_norm", 3),
        ({"norm_output": True}, "sglang", "0.5.3", "norm_output", 0),
        ({"norm_before_fc": True}, "sglang", "0.5.15", "norm_before_fc", 1),
        ({}, "modelopt", None, "t2d", 1),
    ],
)
def test_a_loss_is_refused_until_it_is_named(tmp_path, options, to, version, lost, tensors):
    source = write_drafter(tmp_path / "source", "specforge", **options)
    with pytest.raises(UsageError, match=rf"would lose (.*; )?{lost}: .*\n.*--lossy {lost}"):
        planned(source, to, engine_version=version)
    made = convert(source, tmp_path / "made", to, engine_version=version, lossy=[lost])
    assert len(held(made)) == len(held(source)) - tensors
    # o_proj.bias stays, which SGLang loads, and with it attention_bias.
    assert bool(config_of(made).get(lost)) is (lost == "attention_bias")
    assert drafter.understand(read(made))


@pytest.fixture
def own(tmp_path):
    """Return a canary's target, and its drafter with an embedding of its own."""
    spec = dataclasses.replace(SHIPPED["small-wrong"], own_embed_tokens=True, aux_ids="nested", aux_ids_are="outputs")
    made = build(spec, tmp_path / "own")
    return made.target, made.drafter


def test_an_embedding_that_sglang_replaces_by_another_is_a_loss(own):
    target, folder = own
    with pytest.raises(UsageError, match="would accept next to nothing"):
        planned(folder, aux_ids_are="outputs", target=read(target))
    made = planned(folder, aux_ids_are="outputs", target=read(target), lossy=("embed_tokens.weight",))
    assert [loss.key for loss in made.lost] == ["embed_tokens.weight"]
    assert not any("embed_tokens" in name for name in made.names.values())


def test_an_embedding_that_sglang_replaces_by_its_equal_is_kept(own):
    target, folder = own
    [embedding] = [
        tensor
        for file in target.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.endswith("embed_tokens.weight")
    ]
    rewrite(folder, lambda tensors: tensors.update({"embed_tokens.weight": embedding}))
    made = planned(folder, aux_ids_are="outputs", target=read(target))
    assert not made.lost
    assert "embed_tokens.weight" in made.names.values()


def test_an_embedding_that_nothing_is_held_against_is_noted(own):
    made = planned(own[1], aux_ids_are="outputs")
    assert any("give --target" in note for note in made.notes)


def test_an_embedding_of_its_own_is_no_matter_for_vllm(own):
    assert not planned(own[1], to="vllm", aux_ids_are="outputs", target=read(own[0])).lost


def test_a_stray_lossy_is_refused(source):
    with pytest.raises(UsageError, match="nothing of that name would be lost"):
        planned(source, lossy=["norm_output"])


def test_unknown_tensors_are_not_carried_along_in_silence(source):
    rewrite(source, lambda tensors: tensors.update({"midlayer.self_attn.sinks": np.zeros(4, np.float32)}))
    with pytest.raises(UsageError, match=r"would lose midlayer\.self_attn\.sinks: no dialect"):
        planned(source)
    assert "midlayer.self_attn.sinks" not in planned(source, lossy=["midlayer.self_attn.sinks"]).names


# -- what tensors and config say of each other


@pytest.mark.parametrize(
    "setting",
    ["fc_norm", "norm_before_fc", "attention_bias"],
)
def test_a_setting_that_the_tensors_prove(tmp_path, setting):
    source = write_drafter(tmp_path / "source", "specforge", **{setting: True})
    assert planned(edit_config(source, **{setting: None}), "vllm").config[setting] is True
    edit_config(source, **{setting: False})
    with pytest.raises(CheckpointError, match=rf"{setting} is False, but"):
        planned(source, "vllm")


def test_a_setting_without_its_tensors(source):
    with pytest.raises(CheckpointError, match="fc_norm is True, but its tensors are not in the checkpoint"):
        planned(edit_config(source, fc_norm=True), "vllm")


def test_old_names_of_norms(tmp_path):
    source = write_drafter(tmp_path / "source", "specforge", fc_norm=True)
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    rewrite(
        source, lambda tensors: [tensors.update({f"{b}.weight": tensors.pop(f"{a}.weight")}) for a, b in old.items()]
    )
    edit_config(source, fc_norm=None, use_aux_norm=True)
    made = planned(source, "vllm")
    assert {made.names[f"{written}.weight"] for written in old.values()} == {f"{name}.weight" for name in old}
    assert made.config["fc_norm"] is True
    assert "use_aux_norm" not in made.config


def test_settings_that_older_releases_would_not_find(source):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0}
    edit_config(source, rope_theta=None, rope_parameters=rope, torch_dtype=None, dtype="bfloat16")
    edit_config(source, tie_word_embeddings=True, num_hidden_layers=32, draft_vocab_size=None, truncated_vocab_size=17)
    config = planned(source).config
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    assert config["rope_parameters"] == rope
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is False
    assert config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == 17
    with pytest.raises(CheckpointError, match="rope_theta is"):
        planned(edit_config(source, rope_theta=10000.0))


def test_what_convert_does_not_know(source, tmp_path):
    rewrite(source, lambda tensors: tensors.update({"midlayer.self_attn.q_norm.weight": np.zeros(4, np.float32)}))
    with pytest.raises(CheckpointError, match="q_norm and k_norm"):
        planned(source)
    assert planned(source, "vllm").config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    rewrite(
        source,
        lambda tensors: tensors.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": np.zeros(4, np.float32)}),
    )
    with pytest.raises(CheckpointError, match="MLA"):
        planned(source, "vllm")
    target = write_target(tmp_path / "target")
    with pytest.raises(CheckpointError, match="convert knows EAGLE-3 drafters only"):
        plan.make(target, plan.Request("vllm"))
    two = write_drafter(tmp_path / "two", "modelopt")
    rewrite(two, lambda tensors: tensors.update({"layers.1.input_layernorm.weight": np.zeros(4, np.float32)}))
    with pytest.raises(CheckpointError, match="2 decoder layers"):
        planned(two)
    assert planned(two, "vllm").config["num_hidden_layers"] == 2


def test_speculators_needs_the_target(source, tmp_path):
    with pytest.raises(UsageError, match="--target"):
        planned(source, "speculators")
    target = write_target(tmp_path / "target")
    made = planned(source, "speculators", target=target)
    assert made.config["speculators_config"]["verifier"]["name_or_path"] == str(target.folder)
    with pytest.raises(UsageError, match="lose model_type"):
        planned(edit_config(source, model_type="phi3"), "speculators", target=target)


def test_t2d_is_made_for_trainers_and_equals_theirs(tmp_path):
    specforge, modelopt = (write_drafter(tmp_path / dialect, dialect) for dialect in ("specforge", "modelopt"))
    assert held(convert(modelopt, tmp_path / "made", "specforge"))["t2d"] == held(specforge)["t2d"]
    rewrite(modelopt, lambda tensors: tensors.update(d2t=tensors["d2t"] + 1000))
    with pytest.raises(CheckpointError, match="do not fit a vocabulary"):
        planned(modelopt, "specforge")


# -- names

LAYER = ["hidden_norm.weight", "input_layernorm.weight", "self_attn.q_proj.weight", "mlp.down_proj.weight"]
TOP = ["fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"]


@settings(deadline=None)
@given(
    wrapper=st.sampled_from(["", "model.", "draft_model.", "draft_model.model."]),
    layer=st.one_of(st.just("midlayer."), st.integers(0, 99).map(lambda number: f"layers.{number}.")),
    bare=st.sets(st.sampled_from(TOP)),
    order=st.randoms(use_true_random=False),
)
def test_any_spelling_of_the_known_names_comes_to_the_same(wrapper, layer, bare, order):
    written = [f"{wrapper}{layer}{name}" for name in LAYER]
    written += [name if name in bare else f"{wrapper}{name}" for name in TOP]
    order.shuffle(written)
    names, unknown = drafter._names(_Named(written))
    assert not unknown
    assert set(names.values()) == {f"layers.0.{name}" for name in LAYER} | set(TOP)


@settings(deadline=None)
@given(st.sets(st.text(min_size=1), max_size=20))
def test_a_strange_name_is_unknown_or_one_of_the_known(written):
    names, unknown = drafter._names(_Named(sorted(written)))
    assert set(names) | set(unknown) == written
    assert not set(names) & set(unknown)
    for name in names.values():
        assert re.fullmatch(r"(layers\.\d+\.)?[a-z_0-9.]+", name)


def test_two_tensors_of_one_name(source):
    rewrite(source, lambda tensors: tensors.update({"model.norm.weight": np.zeros(4, np.float32)}))
    with pytest.raises(CheckpointError, match=r"are both norm\.weight"):
        planned(source)


def test_a_quantisation_that_names_modules_is_not_renamed_in_silence(source):
    edit_config(source, quantization_config={"ignore": ["midlayer.mlp.down_proj"]})
    with pytest.raises(CheckpointError, match="quantization_config names modules"):
        planned(source)
    assert planned(edit_config(source, quantization_config={"bits": 8}))


class _Named:
    """A checkpoint of which nothing but the names is asked."""

    folder = "folder"

    def __init__(self, names):
        self.tensors = dict.fromkeys(names)


def test_edits_say_old_and_new(source):
    lines = [str(edit) for edit in planned(edit_config(source, dtype="bfloat16", torch_dtype=None)).edits]
    assert lines == ['torch_dtype: absent -> "bfloat16"']
    assert json.dumps(config_of(source))

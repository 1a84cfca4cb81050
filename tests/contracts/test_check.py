"""The static check says what a release does with a drafter, and never passes what it does not know."""

import dataclasses
import json
import math
import shutil

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from harness.canary import faults
from harness.canary.build import build
from harness.canary.spec import CanarySpec
from harness.checkpoint.families import Families
from harness.checkpoint.header import Shard, Tensor
from harness.checkpoint.read import read
from harness.cli import main
from harness.contracts import check as checking
from harness.contracts import embedding, model
from harness.contracts.check import CODES, check
from harness.contracts.trials import NATIVE, NEEDED
from harness.verdict import Verdict

OLD, NEW, VLLM = "sglang==0.5.1", "sglang==0.5.12", "vllm==0.32.0"


def contract(release):
    engine, _, version = release.partition("==")
    found = model.shipped(engine, version)
    assert found is not None, f"no contract of {release} ships"
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that builds a canary pair with these choices, once."""
    root, kept = tmp_path_factory.mktemp("pairs"), {}

    def make(**choices):
        spec = CanarySpec("check", **{"dialect": "specforge", **choices})
        if spec.fingerprint not in kept:
            kept[spec.fingerprint] = build(spec, root / spec.fingerprint[:12])
        return kept[spec.fingerprint]

    return make


@pytest.fixture
def edited(made, tmp_path):
    """Return a function that copies a pair's drafter, with changes to its config and its tensors."""

    def edit(config=None, tensors=None, **choices):
        pair = made(**choices)
        folder = tmp_path / "drafter"
        shutil.copytree(pair.drafter, folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **(config or {})}))
        if tensors:
            with safe_open(folder / "model.safetensors", framework="np") as file:
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            save_file(tensors(held), folder / "model.safetensors")
        return folder, pair.target

    return edit


GONE = object()
"""Stands for a key that is to be removed."""


def variant(checkpoint, tensors=None, **config):
    """Return a checkpoint with other headers and config: `tensors` maps a name to its shape, None removes it."""
    held = dict(checkpoint.tensors)
    for name, shape in (tensors or {}).items():
        held.pop(name, None)
        if shape is not None:
            held[name] = Tensor("BF16", tuple(shape), (0, 2 * math.prod(shape)))
    families = Families()
    families.add(held)
    values = {key: value for key, value in {**checkpoint.config, **config}.items() if value is not GONE}
    shards = (Shard(checkpoint.folder, held, {}, 0, 0),)
    return dataclasses.replace(checkpoint, config=values, shards=shards, families=families.all())


def codes(report, verdict=None):
    return {finding.code for finding in report.findings if verdict in (None, finding.verdict)}


def judged(release, drafter, target=None):
    return check(read(drafter), read(target) if target else None, contract(release))


@pytest.mark.parametrize("release", [OLD, NEW, VLLM])
def test_a_drafter_in_its_native_names_passes(made, release):
    pair = made()
    report = judged(release, pair.drafter, pair.target)
    assert report.verdict is Verdict.PASS
    assert codes(report) == {"CHK204", "CHK303"}
    assert sum(fate.fate == "used" for fate in report.fates.values()) == 14


def test_the_incident(made):
    """`layers.0.*` under SGLang's architecture: dropped in silence by 0.5.1, loaded by 0.5.12 and by vLLM."""
    pair = made(dialect="modelopt")
    report = judged(OLD, pair.drafter, pair.target)
    dropped = next(finding for finding in report.findings if finding.code == "CHK201")
    unfilled = next(finding for finding in report.findings if finding.code == "CHK301")
    assert (report.verdict, len(dropped.names), len(unfilled.names)) == (Verdict.FAIL, 10, 7)
    assert all(name.startswith("layers.0.") for name in dropped.names)
    assert all(name.startswith("model.midlayer.") for name in unfilled.names)
    assert "--to sglang --engine-version 0.5.1" in dropped.remedy
    assert judged(NEW, pair.drafter, pair.target).verdict is Verdict.PASS
    assert judged(VLLM, pair.drafter, pair.target).verdict is Verdict.PASS


def embedded(pair, release, target=True, **config):
    """Return the report on a drafter with an embedding of its own, as the command makes it."""
    folder = read(pair.target) if target else None
    drafter = read(pair.drafter)
    drafter = dataclasses.replace(drafter, config={**drafter.config, **config})
    known = contract(release)
    return check(drafter, folder, known, other_embedding=checking.other_embedding(drafter, folder, [known]))


@pytest.mark.parametrize("release", [OLD, NEW])
def test_an_embedding_that_the_target_s_replaces(made, release):
    pair = made(own_embed_tokens=True)
    report = embedded(pair, release)
    assert codes(report, Verdict.FAIL) == {"CHK304"}
    assert "vLLM" in next(finding for finding in report.findings if finding.code == "CHK304").remedy
    unknown = embedded(pair, release, target=False)
    assert "CHK304" in codes(unknown, Verdict.PASS)
    assert "CHK304" not in codes(embedded(made(), release)), "it brings none"


def test_an_embedding_on_a_release_that_was_not_read(made):
    """A later SGLang may do otherwise: that is said, and is no error."""
    pair = made(own_embed_tokens=True)
    later = dataclasses.replace(contract(NEW), version="0.9.0")
    drafter, target = read(pair.drafter), read(pair.target)
    report = check(drafter, target, later, other_embedding=checking.other_embedding(drafter, target, [later]))
    [finding] = [finding for finding in report.findings if finding.code == "CHK304"]
    assert "was not read of this release" in finding.summary
    assert finding.verdict is Verdict.PASS


def test_weights_are_read_only_where_they_matter(made, monkeypatch):
    pair = made(own_embed_tokens=True)
    monkeypatch.setattr(checking, "differs", lambda *_: pytest.fail("read"))
    assert checking.other_embedding(read(pair.drafter), read(pair.target), [contract(VLLM), None]) is False


def test_an_embedding_that_stays_the_drafters(made, edited):
    pair = made(own_embed_tokens=True)
    assert codes(embedded(pair, VLLM), Verdict.FAIL) == set()
    assert "CHK304" not in codes(embedded(pair, NEW, target_hidden_size=128)), "the target is of another width"
    file = read(pair.target)
    [name] = embedding.embeddings(file)
    with safe_open(pair.target / "model.safetensors", framework="np") as held:
        theirs = held.get_tensor(name)
    folder, target = edited(tensors=lambda held: held | {"embed_tokens.weight": theirs}, own_embed_tokens=True)
    same = read(folder)
    assert embedding.differs(same, read(target)) is False


def test_no_embedding_on_a_release_that_shares_none(made):
    drafter = read(made().drafter)
    for width, code in ((256, "CHK303"), (512, "CHK301")):
        drafter = dataclasses.replace(drafter, config={**drafter.config, "target_hidden_size": width})
        found = [finding for finding in check(drafter, None, contract(NEW)).findings if finding.code == code]
        assert any("embed_tokens.weight" in name for finding in found for name in finding.names), (width, code)


@pytest.mark.parametrize(("release", "code"), [(OLD, "CHK201"), (NEW, "CHK201"), (VLLM, "CHK203")])
def test_a_prefix_that_nobody_knows(made, tmp_path, release, code):
    broken = faults.apply("rename-prefix", made().drafter, tmp_path / "broken", "draft_head.block.")
    report = judged(release, broken)
    finding = next(finding for finding in report.findings if finding.code == code)
    assert finding.where == "draft_head.block.*"
    assert len(finding.names) == 10


def test_speculators_config_on_an_engine_that_cannot_read_it(made):
    pair = made(dialect="speculators", aux_layers=(1, 3, 6), aux_ids="top-level", attention_bias=True)
    report = judged(NEW, pair.drafter, pair.target)
    by_code = {finding.code: finding for finding in report.findings}
    assert {"CHK101", "CHK201", "CHK402", "CHK403"} <= codes(report, Verdict.FAIL)
    assert {name.rpartition(".")[2] for name in by_code["CHK201"].names} == {"bias"}
    assert "no place for" in by_code["CHK201"].remedy
    assert by_code["CHK403"].remedy == "write [0, 2, 5]"
    assert judged(VLLM, pair.drafter, pair.target).verdict is Verdict.PASS


def test_a_setting_that_no_source_file_spells_is_ignored(made):
    report = judged(NEW, made(norm_before_residual=True).drafter)
    assert codes(report, Verdict.FAIL) == {"CHK401"}
    assert judged(VLLM, made(norm_before_residual=True).drafter).verdict is Verdict.PASS


def test_layer_ids_that_one_runner_does_not_read(made):
    pair = made(aux_layers=(1, 3, 6), aux_ids="nested")
    report = judged(VLLM, pair.drafter, pair.target)
    finding = next(finding for finding in report.findings if finding.code == "CHK402")
    assert "model runner V2" in finding.summary
    assert finding.remedy == "write it as eagle_aux_hidden_state_layer_ids"


def test_chunks_beyond_the_three_that_were_tried():
    config = {"draft_vocab_size": 192, "fc_norm": True}
    fate = contract(NEW).fate("fc_norm.4.weight", contract(NEW).holding(config))
    assert (fate.fate, fate.into, fate.canonical) == ("used", ("model.fc_norm.4.weight",), "fc_norm.4.weight")


def test_default_layer_ids_need_not_be_read(made, edited):
    folder, target = edited({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    assert "CHK402" not in codes(judged(NEW, folder, target))


def test_an_architecture_that_reaches_the_targets_class(made):
    report = judged(NEW, made(dialect="yuhuili").drafter)
    assert codes(report, Verdict.FAIL) == {"CHK102"}
    assert '"architectures": ["LlamaForCausalLMEagle3"]' in report.findings[0].remedy


def test_every_missing_tensor_is_named(made):
    names = [name for name in read(made().drafter).tensors if name not in ("t2d", "d2t")]
    for name in names:
        folder = made().drafter
        checkpoint = read(folder)
        report = check(variant(checkpoint, {name: None}), None, contract(NEW))
        assert codes(report, Verdict.FAIL) == {"CHK301"}, name


def test_a_smaller_draft_vocabulary_without_d2t(edited):
    folder, _ = edited(tensors=lambda held: {k: v for k, v in held.items() if k != "d2t"})
    assert "CHK302" in codes(judged(NEW, folder), Verdict.FAIL)


def test_shapes_against_the_config(edited):
    def shorten(held):
        key = next(name for name in held if name.endswith("q_proj.weight"))
        return {**held, key: held[key][:-8]}

    folder, _ = edited(tensors=shorten)
    report = judged(NEW, folder)
    assert codes(report, Verdict.FAIL) == {"CHK501"}


def test_a_target_of_another_width_vocabulary_and_length(edited, made, tmp_path):
    folder, target = edited()
    other = tmp_path / "target"
    shutil.copytree(target, other)
    config = json.loads((other / "config.json").read_text())
    config |= {"hidden_size": 512, "vocab_size": 640, "max_position_embeddings": 8192}
    (other / "config.json").write_text(json.dumps(config))
    report = judged(NEW, folder, other)
    assert {"CHK502", "CHK503"} <= codes(report, Verdict.FAIL)
    assert "CHK404" in codes(report)


def test_what_is_not_known_is_never_a_pass(made, edited):
    folder, target = edited({"hidden_size": None})
    assert codes(judged(NEW, folder), Verdict.INVALID) == {"CHK504"}
    assert codes(judged(NEW, target)) == {"CHK002"}
    assert checking.unknown_release("sglang==0.0.1", []).verdict is Verdict.INVALID
    odd = dataclasses.replace(contract(NEW), keys=tuple(r for r in contract(NEW).keys if r.prefix != "decoder."))
    report = check(read(made().drafter), None, dataclasses.replace(odd, keys=()))
    assert "CHK003" in codes(report, Verdict.INVALID)


# -- how many hidden states fc takes

IDS = "eagle_aux_hidden_state_layer_ids"
FOUR = [1, 3, 5, 6]


@pytest.mark.parametrize("release", [OLD, NEW, VLLM])
@pytest.mark.parametrize("count", [2, 4])
def test_an_fc_of_a_width_that_no_release_builds(made, release, count):
    """The width is the config's, 3 where it says nothing, and never that of the tensor under test."""
    drafter, target = read(made().drafter), read(made().target)
    for other in (None, target):
        report = check(variant(drafter, {"fc.weight": (256, count * 256)}), other, contract(release))
        assert codes(report, Verdict.FAIL) == {"CHK501"} | ({"CHK502"} if other else set())


@pytest.mark.parametrize(
    ("release", "config", "builds"),
    [
        (NEW, {"num_aux_hidden_states": 4}, 4),
        (VLLM, {"num_aux_hidden_states": 4}, 4),
        (OLD, {"num_aux_hidden_states": 4}, 3),
        (NEW, {"eagle_config": {IDS: FOUR}}, 4),
        (OLD, {"eagle_config": {IDS: FOUR}}, 3),
        (VLLM, {IDS: FOUR}, 3),
        (NEW, {"num_aux_hidden_states": 3, "eagle_config": {IDS: FOUR}}, 3),
        (VLLM, {"num_aux_hidden_states": 3, "eagle_config": {IDS: FOUR}, IDS: FOUR}, 3),
        (VLLM, {"num_aux_hidden_states": None, "eagle_config": {IDS: FOUR}, IDS: FOUR}, 4),
        (VLLM, {"num_aux_hidden_states": "4"}, 0),
    ],
)
def test_what_fc_is_counted_by(made, release, config, builds):
    drafter = read(made().drafter)
    for count in (3, 4):
        report = check(variant(drafter, {"fc.weight": (256, count * 256)}, **config), None, contract(release))
        wrong = [finding.names for finding in report.findings if finding.code in ("CHK203", "CHK301", "CHK501")]
        assert wrong == ([] if count == builds else [("fc.weight",)]), count


def test_a_wider_target_that_the_config_does_not_name(made):
    """Both engines build fc for the drafter's own width then."""
    pair = made()
    drafter, target = read(pair.drafter), read(pair.target)
    target = dataclasses.replace(target, config={**target.config, "hidden_size": 512})
    wide = variant(drafter, {"fc.weight": (256, 3 * 512)})
    assert "CHK501" in codes(check(wide, target, contract(NEW)), Verdict.FAIL)
    named = variant(wide, target_hidden_size=512)
    assert not codes(check(named, target, contract(NEW)), Verdict.FAIL) - {"CHK301"}


# -- layer ids


@pytest.mark.parametrize("release", [NEW, VLLM])
@pytest.mark.parametrize("ids", [[1, 3, 6], FOUR])
def test_ids_in_both_places(made, release, ids):
    """The place that is read has the same: nothing is lost."""
    pair = made()
    width = {"fc.weight": (256, len(ids) * 256)}
    both = variant(read(pair.drafter), width, **{IDS: ids, "eagle_config": {IDS: ids}})
    assert not codes(check(both, read(pair.target), contract(release))) & {"CHK203", "CHK301", "CHK402", "CHK501"}
    torn = variant(both, **{IDS: [number + 1 for number in ids]})
    found = [f.summary for f in check(torn, None, contract(release)).findings if f.code == "CHK402"]
    assert found
    assert all(" counts" in summary for summary in found)


KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"num_hidden_layers": 61}}


def targeting(made, **config):
    target = read(made().target)
    return dataclasses.replace(target, config={**target.config, **config})


def test_default_layers_of_a_target_that_nests_its_config(made):
    drafter = variant(read(made().drafter), **{IDS: [2, 30, 58]})
    assert "CHK402" not in codes(check(drafter, targeting(made, **KIMI), contract("sglang==0.5.23")))
    assert "CHK402" in codes(check(drafter, targeting(made), contract("sglang==0.5.23")))


def meaning(report):
    [finding] = [finding for finding in report.findings if finding.code == "CHK403"]
    return finding


@pytest.mark.parametrize(
    ("release", "target", "ids", "counts", "severity", "written"),
    [
        ("sglang==0.5.23", "LlamaForCausalLM", [2, 30, 58], "inputs", "error", [1, 29, 57]),
        ("sglang==0.5.23", "LlamaForCausalLM", [1, 29, 57], "outputs", "note", None),
        ("sglang==0.5.23", "DeepseekV3ForCausalLM", [2, 30, 58], "inputs", "note", None),
        ("sglang==0.5.23", "KimiK25ForConditionalGeneration", [3, 30, 58], "inputs", "note", None),
        ("sglang==0.5.23", "Glm4MoeLiteForCausalLM", [2, 29, 57], "outputs", "error", [3, 30, 58]),
        ("sglang==0.5.23", "GlmMoeDsaForCausalLM", [1, 29, 57], "outputs", "note", None),
        ("sglang==0.5.23", "MistralLarge3ForCausalLM", [3, 30, 58], "inputs", "note", None),
        ("sglang==0.5.12", "DeepseekV3ForCausalLM", [3, 30, 58], "inputs", "error", [2, 29, 57]),
        ("sglang==0.5.23", "GptOssForCausalLM", [3, 5, 8], "inputs", "note", None),
        ("sglang==0.5.23", None, [3, 30, 58], "inputs", "warning", None),
        ("sglang==0.5.23", None, [1, 30, 58], "outputs", "note", None),
        ("vllm==0.32.0", "DeepseekV3ForCausalLM", [3, 30, 58], "inputs", "note", None),
    ],
)
def test_what_ids_mean_hangs_on_the_target(made, release, target, ids, counts, severity, written):
    """A conversion's stamp says what was meant, the target's class what is captured."""
    drafter = variant(read(made().drafter), eagle_config={IDS: ids}, draftgate={"aux_ids_are": counts})
    other = targeting(made, architectures=[target]) if target else None
    finding = meaning(check(drafter, other, contract(release)))
    assert finding.severity == severity
    assert finding.remedy == f"write {written}" if written else not finding.remedy.startswith("write")


# -- what the contract does not speak of


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, {"midlayer.self_attn.q_norm.weight": (64,)}),
        ({"architectures": ["PEagleDraftModel"]}, {}),
        ({}, {"mask_hidden": (1, 768)}),
        ({"quantization_config": {"quant_method": "fp8"}}, {}),
        ({"quantization_config": {"quant_method": "fp8"}}, {"midlayer.mlp.up_proj.weight_scale": (1,)}),
        ({"model_type": "qwen3"}, {}),
        ({"model_type": None}, {}),
    ],
)
def test_a_drafter_that_the_contract_does_not_speak_of(made, config, tensors):
    report = check(variant(read(made().drafter), tensors, **config), read(made().target), contract(VLLM))
    assert (codes(report), report.verdict) == ({"CHK002"}, Verdict.INVALID)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "qwen3"}, "CHK002"),
        ({"model_type": "mistral"}, "CHK002"),
        ({"model_type": GONE}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "CHK002"),
    ],
)
def test_the_body_of_speculators(made, change, code):
    drafter = read(made(dialect="speculators").drafter)
    body = {**drafter.config["transformer_layer_config"], **change}
    body = {key: value for key, value in body.items() if value is not GONE}
    report = check(variant(drafter, transformer_layer_config=body), None, contract(VLLM))
    assert codes(report) & {"CHK002", "CHK101"} == ({code} if code else set())
    peagle = check(variant(drafter, speculators_model_type="peagle"), None, contract(VLLM))
    assert codes(peagle) == {"CHK002"}


def test_a_quantisation_beside_the_config(edited):
    folder, _ = edited()
    (folder / "hf_quant_config.json").write_text("{}")
    assert codes(judged(NEW, folder)) == {"CHK002"}


def test_no_model_type(made):
    """transformers 5 raises; before, the folder's name decides, which nobody tried."""
    drafter = variant(read(made().drafter), model_type=GONE)
    assert codes(check(drafter, None, contract(NEW)), Verdict.FAIL) == {"CHK101"}
    assert codes(check(drafter, None, contract(OLD))) == {"CHK002"}


def test_a_drafter_without_a_head(made):
    """Engines share the target's where the vocabularies are one, and SGLang only where the config leaves it open."""
    drafter = variant(read(made(full_draft_vocab=True).drafter), {"lm_head.weight": None, "d2t": None, "t2d": None})
    vocab = drafter.config["vocab_size"]

    def found(release, **config):
        report = check(variant(drafter, **config), None, release)
        return {f.code for f in report.findings if "lm_head.weight" in (*f.names, f.where)}, report.verdict

    assert found(contract(VLLM), draft_vocab_size=vocab) == ({"CHK303"}, Verdict.PASS)
    assert found(contract(VLLM), draft_vocab_size=vocab // 2)[0] == {"CHK301"}
    assert found(contract(NEW), draft_vocab_size=None) == ({"CHK303"}, Verdict.PASS)
    assert found(contract(NEW), draft_vocab_size=vocab) == ({"CHK301"}, Verdict.FAIL)
    later = dataclasses.replace(contract(NEW), version="0.9.0")
    assert found(later, draft_vocab_size=None) == ({"CHK002"}, Verdict.INVALID)


# -- settings and names


@pytest.mark.parametrize(
    ("rope", "older", "lost"),
    [
        ({"rope_theta": 500000.0}, {}, True),
        ({"rope_theta": 500000.0}, {"rope_theta": 500000.0}, False),
        ({"rope_theta": 10000}, {}, False),
        ({"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}, {"rope_theta": 1e6}, True),
        ("junk", {}, False),
    ],
)
def test_rope_parameters_that_older_releases_do_not_read(made, rope, older, lost):
    drafter = variant(read(made().drafter), rope_theta=older.get("rope_theta", GONE), rope_parameters=rope)
    assert ("CHK401" in codes(check(drafter, None, contract("sglang==0.5.9")), Verdict.FAIL)) is lost
    assert "CHK401" not in codes(check(drafter, None, contract("sglang==0.5.23")))


@pytest.mark.parametrize("release", [OLD, NEW, VLLM])
def test_a_null_width(made, release):
    report = check(variant(read(made().drafter), target_hidden_size=None), None, contract(release))
    assert codes(report, Verdict.FAIL) >= {"CHK103"}


LAYER = [name.removesuffix(".weight") for name in NEEDED[NATIVE] if name.endswith("weight")]


def layers(drafter, *numbers, prefix=""):
    """Return the shapes of further layers, as the first one has them but for the width of what q, k and v read."""
    shapes = {name: drafter.tensors[f"midlayer.{name}.weight"].shape for name in LAYER}
    narrow = {name: (s[0], 256) if name[10:] in ("q_proj", "k_proj", "v_proj") else s for name, s in shapes.items()}
    return {f"{prefix}layers.{number}.{name}.weight": s for number in numbers for name, s in narrow.items()}


@pytest.mark.parametrize(("release", "code"), [("sglang==0.5.23", "CHK201"), (VLLM, "CHK203")])
def test_a_layer_beyond_the_last(made, release, code):
    drafter = read(made().drafter)
    three = variant(drafter, layers(drafter, 1, 2), num_hidden_layers=3)
    assert check(three, None, contract(release)).verdict is Verdict.PASS
    report = check(variant(three, num_hidden_layers=2), None, contract(release))
    assert codes(report, Verdict.FAIL) == {code}
    [finding] = [finding for finding in report.findings if finding.code == code]
    assert set(finding.names) == set(layers(drafter, 2))


def test_settings_and_further_layers_under_model(made):
    """`model.` makes no difference to what is inside the model: the settings' own names neither."""
    drafter = read(made(fc_norm=True).drafter)
    moved = {f"fc_norm.{chunk}.weight" for chunk in range(3)}
    names = {f"model.{name}": (256,) for name in moved} | dict.fromkeys(moved) | {"model.input_norm.weight": (768,)}
    further = layers(drafter, 1, 2, prefix="model.")
    renamed = variant(drafter, names | further, num_hidden_layers=3, norm_before_fc=True)
    assert check(renamed, None, contract("sglang==0.5.23")).verdict is Verdict.PASS
    assert "CHK203" in codes(check(renamed, None, contract(VLLM)), Verdict.FAIL)
    off = variant(renamed, fc_norm=False, norm_before_fc=False)
    assert "CHK201" in codes(check(off, None, contract("sglang==0.5.23")), Verdict.FAIL)


@pytest.mark.parametrize("release", ["sglang==0.5.9", "sglang==0.5.23", VLLM])
def test_names_of_the_engines_own_parameters(made, release):
    """A loader may take them, and no trial asked."""
    drafter = read(made().drafter)
    parts = [f"midlayer.self_attn.{each}_proj.weight" for each in "qkv"]
    rows = sum(drafter.tensors[name].shape[0] for name in parts)
    fused = variant(drafter, dict.fromkeys(parts) | {"midlayer.self_attn.qkv_proj.weight": (rows, 512)})
    report = check(fused, None, contract(release))
    assert (codes(report, Verdict.INVALID), report.verdict) == ({"CHK003"}, Verdict.INVALID)


def test_shapes_of_what_is_not_loaded_do_not_matter(made):
    drafter = variant(read(made().drafter), {"t2d": (7,), "midlayer.self_attn.rotary_emb.inv_freq": (3,)})
    assert check(drafter, None, contract(NEW)).verdict is Verdict.PASS


def test_as_many_chunks_are_normed_as_fc_takes(made):
    drafter = read(made(fc_norm=True).drafter)
    two = variant(drafter, {"fc.weight": (256, 512), "fc_norm.2.weight": None}, num_aux_hidden_states=2)
    assert check(two, None, contract(NEW)).verdict is Verdict.PASS
    four = {"fc.weight": (256, 1024), "fc_norm.3.weight": (256,)}
    assert check(variant(drafter, four, num_aux_hidden_states=4), None, contract(NEW)).verdict is Verdict.PASS
    surplus = variant(drafter, {"fc.weight": (256, 512)}, num_aux_hidden_states=2)
    assert codes(check(surplus, None, contract(NEW)), Verdict.FAIL) == {"CHK201"}


JUNK = ["x", -1, [], None, True, 1e9, [1, "a"], {"a": {}}]


@pytest.mark.parametrize("dialect", ["specforge", "speculators", "modelopt"])
def test_no_config_is_too_odd_to_be_judged(made, dialect):
    """Whatever stands in a config, the check ends with a verdict; a drafter with its sizes gone never passes."""
    pair = made(dialect=dialect, aux_ids="nested" if dialect == "modelopt" else "none")
    checkpoint, target = read(pair.drafter), read(pair.target)
    paths = [(key,) for key in checkpoint.config]
    paths += [(key, inner) for key, value in checkpoint.config.items() if isinstance(value, dict) for inner in value]
    for path in paths:
        for junk in JUNK:
            config = json.loads(json.dumps(checkpoint.config))
            owner = config
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = junk
            odd = dataclasses.replace(checkpoint, config=config)
            other = dataclasses.replace(target, config={**target.config, path[-1]: junk})
            check(checkpoint, other, contract(VLLM))
            verdict = check(odd, target, contract(NEW)).verdict
            if path[-1] in ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"):
                assert verdict is not Verdict.PASS, (path, junk)


def test_the_command(made, capsys, tmp_path):
    pair = made(dialect="modelopt")
    path, target = str(pair.drafter), str(pair.target)
    assert main(["check", path, "--target", target, "--engine", NEW]) == 0
    assert main(["check", path, "--target", target, "--engine", NEW, "--engine", OLD]) == 1
    assert main(["check", path, "--engine", "sglang==0.0.1"]) == 3
    assert main(["check", path, "--engine", "trt==1"]) == 2
    assert main(["check", path]) == 2
    assert main(["check", str(tmp_path / "nothing"), "--engine", NEW]) == 2
    (tmp_path / "broken.json").write_text("{}")
    assert main(["check", path, "--contract", str(tmp_path / "broken.json")]) == 3
    capsys.readouterr()


@pytest.mark.parametrize("form", ["json", "sarif", "github", "text"])
def test_formats_say_the_same(made, capsys, form):
    path = str(made(dialect="modelopt").drafter)
    assert main(["check", path, "--engine", OLD, "--format", form]) == 1
    text = capsys.readouterr().out
    if form == "json":
        report = json.loads(text)["reports"][0]
        assert report["verdict"] == "FAIL"
        assert report["keys"]["layers.0.hidden_norm.weight"]["fate"] == "dropped"
        assert report["parameters"]["model.midlayer.hidden_norm.weight"] is False
    elif form == "sarif":
        run = json.loads(text)["runs"][0]
        assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == set(CODES)
        assert {"CHK201", "CHK301"} <= {result["ruleId"] for result in run["results"] if result["level"] == "error"}
    elif form == "github":
        assert sum(line.startswith("::error ") for line in text.splitlines()) == 2
        assert all(line.startswith("::") for line in text.splitlines())
    else:
        assert "FAIL         sglang==0.5.1: 14 keys (10 dropped, 4 used), 3 of 11 parameters filled" in text

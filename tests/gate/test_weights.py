"""Each way in which weights can fail to land is red and named."""

import dataclasses

import pytest

from harness.errors import UsageError
from harness.gate import weights
from harness.verdict import Verdict
from tests.gate.evidence import config, evidence, key, load, parameter, serving

EXCEPTIONS = weights.load_exceptions("vllm", "0.32.0")


def judge(*, alike=lambda ours, targets: ours == targets, tied=lambda head, embedding: False, **changes):
    return weights.judge(evidence(**changes), EXCEPTIONS, alike, tied)


def with_drafter(parameters=None, keys=None, **changes):
    made = evidence()
    target, drafter = made.loads
    if parameters is not None:
        drafter = dataclasses.replace(drafter, parameters=tuple(parameters))
    if keys is not None:
        drafter = dataclasses.replace(drafter, keys=tuple(keys))
    return {"loads": (target, dataclasses.replace(drafter, **changes))}


def red(judgement, code):
    found = [finding for finding in judgement.findings if finding.verdict is not Verdict.PASS]
    assert [finding.code for finding in found] == [code], judgement.as_text()
    return found[0]


def test_healthy():
    assert judge().verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("lost", "word"),
    [
        (key("layers.0.q", landed=()), "dropped"),
        (key("layers.0.q", landed=(), offered=0), "never offered"),
        (key("layers.0.q", landed=(), overwritten=True), "overwritten"),
        (key("layers.0.q", landed=(), read=True), "dropped"),
    ],
)
def test_a_key_that_lands_nowhere(lost, word):
    finding = red(judge(**with_drafter(keys=[key("fc.weight"), lost])), "WGT003")
    assert finding.verdict is Verdict.FAIL
    assert f"{word}: layers.0.q" in finding.actual
    assert finding.remedy


def test_a_scalar_read_as_value_is_used():
    assert judge(**with_drafter(keys=[key("k_scale", landed=(), read=True, shape=())])).verdict is Verdict.PASS


def test_t2d_is_ignored_by_design_and_named():
    judgement = judge(**with_drafter(keys=[key("fc.weight"), key("t2d", landed=())]))
    assert judgement.verdict is Verdict.PASS
    assert "t2d" in judgement.as_text()


def test_the_exception_is_not_for_the_target():
    made = evidence()
    target = dataclasses.replace(made.loads[0], keys=(key("embed"), key("t2d", landed=())))
    red(judge(loads=(target, made.loads[1])), "WGT003")


@pytest.mark.parametrize("written", [0, 63])
def test_a_parameter_that_is_not_filled(written):
    finding = red(judge(**with_drafter([parameter("model.fc.weight"), parameter("norm.weight", written)])), "WGT004")
    assert finding.verdict is Verdict.FAIL
    assert f"norm.weight [8, 8]: {written} of 64" in finding.actual


def padded(name="lm_head.weight", rows=7, *ranks, keys=None):
    """Return what changes an evidence so that a drafter's tensor is filled from a key of so many rows, rank by rank."""
    keys = (name,) if keys is None else keys
    loads = []
    for rank, (written, filled) in enumerate(ranks):
        tensor = dataclasses.replace(parameter(name, written, filled=filled), keys=keys if written else ())
        made = load("drafter", [parameter("model.fc.weight"), tensor], [key("fc.weight"), key(name, shape=(rows, 8))])
        place = dataclasses.replace(made.place, rank=rank, tp_rank=rank, tp_size=len(ranks), pid=1 + rank)
        loads.append(dataclasses.replace(made, place=place))
    return {"loads": (evidence().loads[0], *loads)}


@pytest.mark.parametrize("ranks", [((56, 8),), ((56, 8), (0, 64))])
def test_padding_that_the_engine_filled_is_fine(ranks):
    assert judge(**padded("lm_head.weight", 7, *ranks)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "lacking",
    [
        padded("qkv_proj.weight", 7, (56, 8)),  # no vocabulary: a shard that is absent, and zeros in its place
        padded("lm_head.weight", 7, (48, 16)),  # more than the padding
        padded("lm_head.weight", 7, (56, 8), keys=("a", "b")),
    ],
)
def test_what_the_engine_filled_without_data_is_not_loaded(lacking):
    finding = red(judge(**lacking), "WGT004")
    assert finding.verdict is Verdict.FAIL
    assert "filled with data of no key" in finding.actual


HALVES = ((128, 0, 1, 0, 64),), ((128, 0, 1, 64, 128),)
COLUMNS = ((16, 0, 8, 0, 8),), ((16, 0, 8, 8, 16),)


def taken(*ranks):
    loads = [
        load("drafter", [parameter("fc.weight")], [dataclasses.replace(key("fc.weight"), taken=pieces)], rank)
        for rank, pieces in enumerate(ranks)
    ]
    return {"loads": (evidence().loads[0], *loads)}


@pytest.mark.parametrize("ranks", [HALVES, COLUMNS, (HALVES[0], None), (HALVES[0] + COLUMNS[1], HALVES[1])])
def test_ranks_that_take_a_key_between_them(ranks):
    assert judge(**taken(*ranks)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ((HALVES[0], HALVES[0]), "50 %"),  # rank 1 took rank 0's half
        ((COLUMNS[1], COLUMNS[1]), "50 %"),
        ((HALVES[0], COLUMNS[0]), "75 %"),
        ((((128, 0, 1, 0, 120),),), "93.75 %"),  # the tail is lost
    ],
)
def test_a_key_of_which_no_rank_took_a_part(ranks, share):
    finding = red(judge(**taken(*ranks)), "WGT003")
    assert finding.verdict is Verdict.FAIL
    assert f"fc.weight: {share} used" in finding.actual


def tied_target(**facts):
    """Return what changes an evidence so that the target stores a head beside the embedding that it ties it to."""
    names = {"model.embed_tokens.weight": "lm_head.weight", "lm_head.weight": "model.embed_tokens.weight"}
    tensors = [
        dataclasses.replace(parameter(name), keys=("model.embed_tokens.weight",), aliases=(alias,))
        for name, alias in names.items()
    ]
    keys = [key("model.embed_tokens.weight"), key("lm_head.weight", landed=())]
    return {"loads": (load("target", tensors, keys), evidence().loads[1])}


def test_a_stored_head_that_is_the_tied_embedding_need_not_land():
    asked = []
    judgement = judge(tied=lambda *pair: not asked.append(pair), **tied_target())
    assert judgement.verdict is Verdict.PASS
    assert asked == [("lm_head.weight", "model.embed_tokens.weight")]
    assert "copy of the embedding" in judgement.measurements["target"]["unused_keys"]["lm_head.weight"]["exempt"]


def test_a_stored_head_that_is_another_than_the_tied_embedding_is_lost():
    assert "lm_head.weight" in red(judge(tied=lambda *_: False, **tied_target()), "WGT003").actual


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vllm", "model.layers.3.self_attn.mla_attn.mla_attn._k_scale"),
        ("vllm", "model.layers.3.self_attn.mla_attn.mla_attn._prob_scale"),
        ("vllm", "model.layers.3.self_attn.attn._v_scale"),
        ("vllm", "model.layers.3.self_attn.rotary_emb.long_short_cos_sin_cache"),
        ("vllm", "model.layers.3.self_attn.rotary_emb.cos_sin_cache_bf16"),
        ("sglang", "model.layers.3.self_attn.rotary_emb.long_cos_sin_cache"),
    ],
)
def test_buffers_that_need_no_data(engine, name):
    release = {"vllm": "0.32.0", "sglang": "0.5.23"}[engine]
    assert weights.load_exceptions(engine, release).reason("target", "parameter", name)
    assert not weights.load_exceptions(engine, release).reason(
        "target", "parameter", "model.layers.3.self_attn.k_scale"
    )


def after(state, detail="", name="model.fc.weight"):
    return with_drafter([dataclasses.replace(parameter(name), after=state, after_detail=detail)])


@pytest.mark.parametrize("detail", ["while serving: float32 8x8 to float32 8x8 of other values", "while serving: gone"])
def test_a_tensor_that_changed_after_the_load(detail):
    finding = red(judge(**after("changed", detail)), "WGT009")
    assert finding.verdict is Verdict.FAIL
    assert f"model.fc.weight: {detail}" in finding.actual


@pytest.mark.parametrize(
    ("state", "detail"),
    [
        ("repacked", "UnquantizedLinearMethod: bfloat16 8x8 to float16 8x8"),
        ("repacked", "Fp8LinearMethod: bfloat16 8x8 to float8_e4m3fn 8x8"),
        ("cannot be read", ""),
    ],
)
def test_a_tensor_of_which_it_cannot_be_told_what_it_holds_after_the_load(state, detail):
    finding = red(judge(**after(state, detail)), "WGT006")
    assert finding.verdict is Verdict.INVALID
    assert "model.fc.weight" in finding.actual


def test_a_tensor_that_is_packed_by_design_is_said_not_to_be_compared():
    judgement = judge(**after("repacked", "UnquantizedLinearMethod: bfloat16 8x8 to bfloat16 0"))
    assert judgement.verdict is Verdict.PASS
    assert "1 packed by their layers and not comparable" in judgement.as_text()


def test_a_drafter_that_was_not_looked_at_again_is_not_called_unchanged():
    finding = red(judge(**after("not compared")), "WGT006")
    assert finding.verdict is Verdict.INVALID
    assert "ranks [0]" in finding.summary


@pytest.mark.parametrize("unsure", [{"exact": False}, {"written": 0, "unseen_change": True}])
def test_what_cannot_be_counted_is_not_claimed(unsure):
    vague = dataclasses.replace(parameter("norm.weight"), **unsure)
    finding = red(judge(**with_drafter([parameter("model.fc.weight"), vague])), "WGT006")
    assert finding.verdict is Verdict.INVALID
    assert "norm.weight" in finding.actual


def test_filled_by_the_engine_alone_is_not_loaded():
    red(judge(**with_drafter([parameter("norm.weight", written=0, filled=64)])), "WGT004")


def test_a_buffer_counts_and_an_attribute_does_not():
    red(judge(**with_drafter([parameter("a"), parameter("d2t", 0, kind="buffer")])), "WGT004")
    assert judge(**with_drafter([parameter("a"), parameter("z", 0, kind="attribute")])).verdict is Verdict.PASS


def test_an_embedding_shared_with_a_filled_one():
    changes = with_drafter([parameter("model.fc.weight"), parameter("embed.weight", 0)])
    changes["servings"] = (dataclasses.replace(evidence().servings[0], shared=(("embed.weight", "embed.weight"),)),)
    assert judge(**changes).verdict is Verdict.PASS


def test_sharing_with_an_unfilled_one_helps_nobody():
    made = evidence()
    target = dataclasses.replace(made.loads[0], parameters=(parameter("embed.weight", 0), parameter("lm_head.weight")))
    drafter = with_drafter([parameter("model.fc.weight"), parameter("embed.weight", 0)])["loads"][1]
    servings = (dataclasses.replace(made.servings[0], shared=(("embed.weight", "embed.weight"),)),)
    codes = [f.code for f in judge(loads=(target, drafter), servings=servings).findings if f.verdict is Verdict.FAIL]
    assert codes == ["WGT004", "WGT004"]


def test_sharing_a_head_of_another_shape_helps_nobody():
    """The target's head has a row for each of its tokens, the drafter's one for each of its own, fewer."""
    made = evidence()
    head = dataclasses.replace(parameter("lm_head.weight", 0), shape=(4, 16))
    drafter = with_drafter([parameter("model.fc.weight"), head])["loads"][1]
    servings = (dataclasses.replace(made.servings[0], shared=(("lm_head.weight", "lm_head.weight"),)),)
    finding = red(judge(loads=(made.loads[0], drafter), servings=servings), "WGT004")
    assert "lm_head.weight" in finding.actual


def test_one_rank_of_two_unfilled():
    made = evidence()
    bad = load(
        "drafter", [parameter("model.fc.weight"), parameter("norm.weight", 0)], [key("fc.weight"), key("norm")], 1
    )
    red(judge(loads=(*made.loads, bad)), "WGT004")


def test_what_did_not_land_is_in_the_record_as_it_was_judged():
    keys = [key("fc.weight"), key("norm", landed=()), key("t2d", landed=())]
    vague = dataclasses.replace(parameter("norm.weight"), exact=False)
    bad = load("drafter", [parameter("model.fc.weight"), parameter("norm.weight", 0)], keys, 1)
    good = load("drafter", [parameter("model.fc.weight"), vague], keys, 2)
    measured = judge(loads=(evidence().loads[0], bad, good)).measurements["drafter"]
    assert measured["tensors_not_filled"] == {"norm.weight": "not filled"}
    assert measured["unused_keys"]["norm"] == {"fate": "dropped", "exempt": ""}
    assert measured["unused_keys"]["t2d"]["exempt"].startswith("the inverse of d2t")
    assert set(measured["unused_keys"]) == {"norm", "t2d"}


def test_keys_of_another_pipeline_stage_are_not_dropped():
    first = load("target", [parameter("a")], [key("a"), key("b", landed=())], 0)
    second = load("target", [parameter("b")], [key("a", landed=()), key("b")], 1)
    assert judge(loads=(first, second, evidence().loads[1])).verdict is Verdict.PASS


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_no_load_seen(role):
    loads = tuple(item for item in evidence().loads if item.role != role)
    assert red(judge(loads=loads), "WGT001").verdict is Verdict.INVALID


def test_a_load_that_raised():
    finding = red(judge(**with_drafter(error="KeyError: 'layers.0.q'")), "WGT002")
    assert finding.verdict is Verdict.FAIL
    assert "layers.0.q" in finding.actual


def test_a_load_that_could_not_be_followed():
    assert red(judge(**with_drafter(tapped=False)), "WGT006").verdict is Verdict.INVALID


def test_no_headers():
    keys = [dataclasses.replace(key("fc.weight"), in_files=False)]
    assert red(judge(**with_drafter(keys=keys)), "WGT006").verdict is Verdict.INVALID


def test_no_parameters():
    assert red(judge(**with_drafter([])), "WGT004").verdict is Verdict.INVALID


def test_a_config_key_that_matters_and_is_never_read():
    path = "eagle_config.eagle_aux_hidden_state_layer_ids"
    finding = red(judge(config=(config("hidden_size"), config(path, [1, 3, 6], read=False))), "WGT005")
    assert finding.verdict is Verdict.FAIL
    assert path in finding.actual


@pytest.mark.parametrize("path", ["rope_theta", "transformer_layer_config.rope_theta"])
def test_an_engine_that_stops_reading_the_rotary_base(path):
    assert path in red(judge(config=(config("hidden_size"), config(path, 1e6, read=False))), "WGT005").actual


def test_a_harmless_value_may_go_unread():
    assert judge(config=(config("a"), config("norm_before_residual", False, read=False))).verdict is Verdict.PASS


@pytest.mark.parametrize("keys", [(), (config("hidden_size", read=False),)])
def test_config_hook_saw_nothing(keys):
    assert red(judge(config=keys), "WGT005").verdict is Verdict.INVALID


def test_exceptions_are_for_one_engine():
    vllm, sglang = (weights.load_exceptions(*release).rows for release in (("vllm", "0.32.0"), ("sglang", "0.5.23")))
    assert vllm
    assert sglang
    assert not set(vllm) & set(sglang)
    assert not weights.load_exceptions("another", "1.0").rows


def test_a_row_with_a_missing_reason_is_refused(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('[[exception]]\nengine = "vllm"\nversions = ""\nrole = "any"\nwhat = "key"\npattern = "*"\n')
    with pytest.raises(UsageError, match="exception 1"):
        weights.load_exceptions("vllm", "0.32.0", path)


def test_serving_is_needed_for_sharing_only():
    assert judge(servings=()).verdict is Verdict.PASS
    assert judge(servings=(serving([]),)).verdict is Verdict.PASS


def test_a_failed_start_names_the_load_that_raised():
    raising = with_drafter(error="KeyError: 'decoder.q'")["loads"]
    judgement = weights.judge_failed_start(raising)
    assert judgement.verdict is Verdict.FAIL
    assert "decoder.q" in judgement.as_text()


def test_a_failed_start_without_one_is_not_the_weights_fault():
    assert weights.judge_failed_start(evidence().loads) is None
    assert weights.judge_failed_start(()) is None


VOCABULARY = (config("hidden_size"), config("vocab_size", 512), config("draft_vocab_size", 128))


def test_a_small_draft_vocabulary_needs_a_map():
    """Whatever the engine keeps it in: a map that is None is no parameter that could be found unfilled."""
    mapped = with_drafter(keys=[key("fc.weight"), key("d2t")], parameters=[parameter("fc.weight")])
    assert judge(**mapped, config=VOCABULARY).verdict is Verdict.PASS
    without = with_drafter(keys=[key("fc.weight")], parameters=[parameter("fc.weight")])
    finding = red(judge(**without, config=VOCABULARY), "WGT007")
    assert "128 draft ids" in finding.summary
    assert "d2t" in finding.remedy
    nested = (config("hidden_size"), config("transformer_layer_config.vocab_size", 512), VOCABULARY[2])
    assert red(judge(**without, config=nested), "WGT007")


@pytest.mark.parametrize("draft", [512, None])
def test_a_whole_draft_vocabulary_needs_none(draft):
    without = with_drafter(keys=[key("fc.weight")], parameters=[parameter("fc.weight")])
    whole = (config("hidden_size"), config("vocab_size", 512), config("draft_vocab_size", draft))
    assert judge(**without, config=whole).verdict is Verdict.PASS


def replaced(**changes):
    """Return what changes an evidence so that the drafter brings an embedding, and serves with the target's."""
    target = dataclasses.replace(
        evidence().loads[0],
        keys=(key("model.embed"),),
        parameters=(dataclasses.replace(parameter("embed.weight"), keys=("model.embed",)),),
    )
    facts = {"keys": ("embed",), **changes}
    drafter = with_drafter(
        [parameter("model.fc.weight"), dataclasses.replace(parameter("embed.weight"), **facts)],
        [key("fc.weight"), *map(key, facts["keys"])],
    )["loads"][1]
    servings = (dataclasses.replace(evidence().servings[0], shared=(("embed.weight", "embed.weight"),)),)
    return {"loads": (target, drafter), "servings": servings}


def test_a_tensor_that_the_targets_replaced_after_the_load():
    asked = []
    finding = red(judge(alike=lambda *pair: asked.append(pair), **replaced()), "WGT008")
    assert finding.verdict is Verdict.FAIL
    assert finding.actual == "embed, replaced by the target's model.embed"
    assert asked == [("embed", "model.embed")]


def test_a_tensor_that_was_replaced_by_its_equal_is_fine():
    judgement = judge(alike=lambda *_: True, **replaced())
    assert judgement.verdict is Verdict.PASS
    assert "1 tensors of the drafter were replaced by the target's, which hold the same" in judgement.as_text()


def test_a_tensor_of_several_keys_that_was_replaced_is_not_claimed():
    finding = red(judge(alike=lambda *_: True, **replaced(keys=("embed.a", "embed.b"))), "WGT006")
    assert finding.verdict is Verdict.INVALID

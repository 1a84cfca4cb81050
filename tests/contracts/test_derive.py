"""A release is run as itself; what it proves becomes its contract, and what proves nothing is refused."""

import json
import re

import pytest

from harness.contracts import derive, trials
from harness.contracts.environment import engine_release
from harness.errors import UsageError
from harness.files import exclusive
from tests.contracts.conftest import small_release

MODEL = "sglang/srt/models/llama_eagle3.py"


def derived(place, asked=None):
    """Derive by one mode, without making an environment."""
    with exclusive(place.folder / "lock") as held:
        asked = asked or trials.all_trials()
        return derive._compose(place, derive._ask(place, asked, pretend=False, held=held))


def rewrite(place, old, new, file=MODEL):
    path = place.site / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def few(monkeypatch):
    """Ask few questions, where a test needs no more."""
    monkeypatch.setattr(trials, "CONDITIONS", ())
    monkeypatch.setattr(trials, "DIALECT_TRIALS", {})
    monkeypatch.setattr(trials, "LAYER_PREFIXES", ("midlayer.", "layers.0.", "decoder."))
    monkeypatch.setattr(trials, "TOP_PREFIXES", ("",))


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """Return the contract of the small release as it is."""
    return derived(small_release(tmp_path_factory.mktemp("as-it-is")))


def fates(contract, prefix, of="layer"):
    return {name: row.fate for row in contract.keys if (row.of, row.prefix) == (of, prefix) for name in row.names}


def test_names_under_every_prefix(contract):
    assert fates(contract, "midlayer.")["hidden_norm.weight"] == "used"
    assert fates(contract, "model.midlayer.") == fates(contract, "midlayer.")
    assert set(fates(contract, "layers.0.").values()) == {"dropped"}
    assert not any(row.told for row in contract.keys if row.prefix == "layers.0.")


def test_parameters_and_what_fills_them(contract):
    built = {parameter.name: parameter for parameter in contract.parameters}
    qkv = built["model.midlayer.self_attn.qkv_proj.weight"]
    assert qkv.shape == ("q+2*kv", "2*hidden")
    assert qkv.ways == (tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "kqv"),)
    assert built["model.fc.weight"].shape == ("hidden", "n_aux*target_hidden")
    assert built["hot_token_id"].attribute


def test_a_setting_is_known_by_what_it_changes(contract):
    conditions = {condition.when: condition for condition in contract.conditions}
    assert [p.name for p in conditions["fc_norm=true"].adds] == [f"model.fc_norm.{i}.weight" for i in range(3)]
    assert conditions["norm_before_residual=true"].adds == conditions["norm_before_residual=true"].keys == ()
    assert [p.name for p in conditions["attention_bias=true"].adds] == ["model.midlayer.self_attn.qkv_proj.bias"]


def test_config_keys_are_those_that_were_read(contract):
    config = {row.key: row for row in contract.config}
    assert config["fc_norm"].read_by == ("sglang.srt.models.llama_eagle3",)
    assert config["norm_before_residual"].read_by == ()
    assert config["norm_before_residual"].spelled_in == ()


def test_how_each_trainers_config_fares(contract):
    assert contract.dialects["specforge"] == contract.model_class
    assert contract.dialects["yuhuili"] == "sglang.srt.models.llama.LlamaForCausalLM"
    assert contract.dialects["speculators"].startswith("raises ValueError: Unrecognized model")
    assert "none of this release's model classes" in contract.dialects["angelslim"]


def test_layer_ids(contract):
    assert contract.aux["captures default"] == [2, 4, 5]
    assert contract.aux["captures 1,3,6"] == [2, 4, 7]
    assert contract.aux["reads nested"] is contract.aux["reads top-level"] is None


@pytest.mark.usefixtures("few")
def test_what_the_release_says_of_a_key_and_where_it_raises(release):
    rewrite(
        release,
        "                continue\n            place",
        "                self.miss(name)\n                continue\n            place",
    )
    rewrite(
        release,
        "    def load_weights",
        """    def miss(self, name):
        if name.startswith("decoder."):
            raise KeyError(name)
        logging.getLogger(__name__).warning("Parameter %s not found", name)

    def load_weights""",
    )
    rewrite(release, "import sgl_kernel", "import logging\n\nimport sgl_kernel")
    told = derived(release)
    assert set(fates(told, "decoder.").values()) == {"raises"}
    assert all(row.told for row in told.keys if row.prefix == "layers.0." and row.fate == "dropped")


BODY = "    def load_weights(self, weights):\n"
LOST = "if parameter is None or 'hidden_norm' in name:"
STUBBED = ("import sgl_kernel", "from sgl_kernel import Norm as Fast\nimport sgl_kernel")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([STUBBED, ("self.model.norm = Norm(config.hidden_size)", "self.model.norm = Fast(8)")], "stand-ins took part"),
        ([STUBBED, (BODY, f"{BODY}        Fast(8)\n")], "stand-ins took part in loading"),
        ([("place.copy_(tensor)", "place.copy_(tensor * 2)")], "the two witnesses disagree"),
        ([("place.copy_(tensor)", "place[:1].copy_(tensor[:1])")], "loads in part"),
        ([("if parameter is None:", LOST)], "keys lost ['midlayer.hidden_norm.weight']"),
        ([("import torch\n", "import os\nimport torch\nos._exit(7)\n")], "ended without a result"),
    ],
)  # fmt: skip
def test_a_run_that_proves_nothing_is_refused(release, changes, said):
    for old, new in changes:
        rewrite(release, old, new)
    with pytest.raises(derive._Refused, match=re.escape(said)):
        derived(release, asked=trials.all_trials()[:2])


def test_another_version_than_asked_for_is_refused(release):
    (release.site / "sglang" / "__init__.py").write_text('__version__ = "9.9.8"\n')
    with pytest.raises(derive._Refused, match="the release that ran is 9"):
        derived(release, asked=trials.all_trials()[:2])


@pytest.mark.usefixtures("few")
def test_modes_that_disagree_make_a_release_unknown(release, monkeypatch, tmp_path):
    rewrite(
        release,
        "            part = next(",
        """            if GPU:
                name = name.replace("layers.0.", "midlayer.")
            part = next(""",
    )
    rewrite(release, "class Norm(", "GPU = torch.cuda.is_available()\n\n\nclass Norm(")
    monkeypatch.setattr(derive, "make", lambda *_, **__: release)
    monkeypatch.setattr(derive, "engine_release", lambda _: ("sglang", release.release))
    with pytest.raises(derive.Unknown, match="behaves differently"):
        derive.derive("sglang==9.9.9", engines_root=tmp_path, root=tmp_path)


@pytest.mark.usefixtures("few")
def test_a_contract_is_kept_until_the_release_or_the_questions_change(release, monkeypatch, tmp_path):
    asked = []
    ask = derive._ask
    monkeypatch.setattr(derive, "make", lambda *_, **__: release)
    monkeypatch.setattr(derive, "engine_release", lambda _: ("sglang", release.release))
    monkeypatch.setattr(derive, "_MODES", {"sglang": (False,)})
    monkeypatch.setattr(derive, "_ask", lambda *args, **kwargs: asked.append(1) or ask(*args, **kwargs))
    first = derive.derive("sglang==9.9.9", engines_root=tmp_path, root=tmp_path)
    again = derive.derive("sglang==9.9.9", engines_root=tmp_path, root=tmp_path)
    assert (len(asked), json.dumps(again.dialects)) == (1, json.dumps(first.dialects))
    (release.site / MODEL).write_text((release.site / MODEL).read_text() + "\n# changed\n")
    derive.derive("sglang==9.9.9", engines_root=tmp_path, root=tmp_path)
    assert len(asked) == 2


def test_a_repository_has_no_contract():
    with pytest.raises(UsageError, match="no engine that contracts are derived of"):
        engine_release("vllm @ git+file:///some@main")

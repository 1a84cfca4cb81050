"""Which keys of a drafter's config the engine reads: by attribute, nested, copied, pickled, never."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import types

import pytest
import torch
from draftgate_probe.config import ConfigReads, TracedDict, flatten
from draftgate_probe.journal import Journal

FILE = {
    "hidden_size": 8,
    "norm_before_fc": True,
    "tie_word_embeddings": False,
    "eagle_config": {"layer_ids": [1, 3], "use_aux_hidden_state": True, "deep": {"inner": 1}},
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
}


def make_library():
    """A stand-in for transformers' PretrainedConfig, in a module of that name."""
    source = """
class PretrainedConfig:
    attribute_map = {"width": "hidden_size"}
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)
    def __getattribute__(self, name):
        if name != "attribute_map" and name in super().__getattribute__("attribute_map"):
            name = super().__getattribute__("attribute_map")[name]
        return super().__getattribute__(name)
    @property
    def half(self):
        return self.hidden_size // 2
    def validate(self):
        return self.tie_word_embeddings
    def to_dict(self):
        import copy
        return copy.deepcopy(self.__dict__)
    @classmethod
    def get_config_dict(cls, path, **kwargs):
        import json, pathlib
        return json.loads(pathlib.Path(path, "config.json").read_text()), kwargs
"""
    module = types.ModuleType("transformers.configuration")
    exec(compile(source, "transformers", "exec"), module.__dict__)
    return module.PretrainedConfig


@pytest.fixture
def watched(tmp_path):
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(FILE))
    folder = tmp_path / "evidence"
    folder.mkdir()
    journal = Journal(folder, "target", str(drafter), "toy", "1")
    library = make_library()
    original = library.__getattribute__
    reads = ConfigReads(journal, library)
    reads.install()
    config = library(_name_or_path=str(drafter), **copy.deepcopy(FILE))

    def seen():
        reads.write()
        (file,) = folder.glob("config-*.json")
        return {row["path"]: row for row in json.loads(file.read_text())["reads"]}

    yield types.SimpleNamespace(
        reads=reads, config=config, seen=seen, library=library, drafter=drafter, journal=journal
    )
    reads.remove()
    assert library.__getattribute__ is original
    assert journal.faults == []


def test_an_attribute_read_is_noted_with_its_reader_and_value(watched):
    assert watched.config.hidden_size == 8
    row = watched.seen()["hidden_size"]
    assert (row["there"], row["seen"], row["readers"]) == (True, ["8"], [__name__])


def test_a_key_nobody_reads_is_not_noted(watched):
    assert watched.config.hidden_size
    assert "norm_before_fc" not in watched.seen()


def test_another_name_of_the_same_key_is_the_key(watched):
    assert watched.config.width == 8
    assert "hidden_size" in watched.seen()


def test_nested_keys_are_noted_by_path(watched):
    assert watched.config.eagle_config["layer_ids"] == [1, 3]
    assert watched.config.eagle_config.get("deep")["inner"] == 1
    assert "use_aux_hidden_state" in watched.config.eagle_config
    seen = watched.seen()
    assert {"eagle_config.layer_ids", "eagle_config.deep.inner"} <= set(seen)
    assert "eagle_config.use_aux_hidden_state" not in seen


def test_a_key_that_is_asked_for_and_not_there(watched):
    assert getattr(watched.config, "fc_norm", None) is None
    assert watched.config.eagle_config.get("aux_ids") is None
    seen = watched.seen()
    assert not seen["fc_norm"]["there"]
    assert not seen["eagle_config.aux_ids"]["there"]


def test_a_property_of_the_library_is_read_by_whoever_asks_for_it(watched):
    assert watched.config.half == 4
    assert watched.seen()["hidden_size"]["readers"] == [__name__]


def test_checks_and_copies_of_the_library_are_no_reads(watched):
    watched.config.validate()
    watched.config.to_dict()
    copy.deepcopy(watched.config)
    pickle.dumps(watched.config.eagle_config)
    json.dumps(watched.config.eagle_config)
    dict(**watched.config.eagle_config)
    seen = watched.seen()
    assert set(seen) == {"eagle_config"}


def test_a_nested_dict_pickles_and_copies_as_a_plain_one(watched):
    nested = watched.config.eagle_config
    assert isinstance(nested, TracedDict)
    for twin in (pickle.loads(pickle.dumps(nested)), copy.deepcopy(nested), copy.copy(nested), nested.copy()):
        assert type(twin) is dict
        assert type(twin["deep"]) is dict
        assert twin == FILE["eagle_config"]


def test_a_change_to_a_nested_dict_is_kept(watched):
    watched.config.eagle_config["layer_ids"] = [7]
    assert watched.config.eagle_config["layer_ids"] == [7]


def test_the_file_s_own_dict_is_traced_before_a_config_is_made_of_it(watched):
    found, _ = watched.library.get_config_dict(str(watched.drafter))
    assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert "speculators_config.proposal_methods.0.speculative_tokens" in watched.seen()


def test_a_config_that_is_not_the_drafter_s_is_left_out(watched):
    target = watched.library(_name_or_path="target", hidden_size=9, extra={"a": 1})
    assert target.hidden_size == 9
    assert type(target.extra) is dict
    assert watched.seen() == {}


def test_a_wrapper_is_the_drafter_s_once_it_is_claimed_even_for_earlier_reads(watched):
    wrapper = watched.library(inner=watched.config, norm_before_fc=True)
    assert wrapper.norm_before_fc
    assert "norm_before_fc" not in watched.seen()
    watched.reads.claim(wrapper)
    assert "norm_before_fc" in watched.seen()


def test_another_process_s_word_that_all_is_known_ends_the_watch(watched):
    (watched.journal.folder / "complete-1").touch()
    for _ in range(100):
        watched.config.hidden_size  # noqa: B018
    assert watched.reads._original is None


def test_reads_are_written_without_anyone_asking(watched):
    assert watched.config.hidden_size
    watched.reads._timer.join()
    (file,) = watched.journal.folder.glob("config-*.json")
    assert "hidden_size" in file.read_text()


def test_compiled_code_that_reads_a_config_stays_one_graph(watched):
    config = watched.config
    compiled = torch.compile(lambda x: x * config.hidden_size, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 8


def test_flatten_names_every_leaf():
    assert dict(flatten(FILE))["speculators_config.proposal_methods.0.speculative_tokens"] == 3
    assert dict(flatten({"a": {}, "b": [1]})) == {"a": {}, "b": [1]}


def test_the_caller_s_frame_is_the_reader(watched):
    module = types.ModuleType("some_engine.models")
    exec("def read(config): return config.norm_before_fc", module.__dict__)
    module.read(watched.config)
    assert watched.seen()["norm_before_fc"]["readers"] == ["some_engine.models"]
    assert sys.modules.get("some_engine") is None

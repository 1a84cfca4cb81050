"""The attachment, on an SGLang of a few lines (fake_sglang): by plugin, by path, and what it says when it cannot."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from draftgate_probe import attach_sglang, session
from draftgate_probe.serving import ENOUGH

from harness.errors import EvidenceError
from harness.probe.evidence import PLUGIN, Fate, environment, read, read_loads

TREE = Path(__file__).with_name("fake_sglang")
WIDTH = 8


class Server:
    """A copy of the stand-in, whose parts may be renamed, and one server's life in it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.tree, self.evidence = folder, folder / "engine", folder / "evidence"
        self.patch = monkeypatch
        shutil.copytree(TREE, self.tree, ignore=shutil.ignore_patterns("__pycache__"))

    def rename(self, pattern, new):
        """Give a part of the engine another name, wherever the engine uses it."""
        for file in self.tree.rglob("*.py"):
            file.write_text(re.sub(pattern, new, file.read_text()))

    def toy(self):
        return importlib.import_module("toy")

    def write(self, target="Target"):
        paths = self.toy().write(self.folder, getattr(self.toy(), target))
        return environment(self.evidence, *map(str, paths), engine="sglang")

    def start(self, target="Target", **how):
        for name, value in self.write(target).items():
            self.patch.setenv(name, value)
        attach_sglang.register()
        self.worker = self.toy().serve(self.folder, getattr(self.toy(), target), **how)

    def answer(self, steps=ENOUGH + 1):
        self.toy().answer(self.worker, steps)

    def run(self, target="Target", **how):
        self.start(target, **how)
        self.answer()
        return read(self.evidence)

    def process(self):
        """Run it all in a process of its own, which the probe must find its way into."""
        env = self.write()
        path = os.pathsep.join([env.pop("PYTHONPATH"), str(self.tree)])
        argv = [sys.executable, str(self.tree / "toy.py"), str(self.folder)]
        env = {**os.environ, **env, "PYTHONPATH": path}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return read(self.evidence)

    def hooked(self):
        """Return what an attached probe replaces in this SGLang."""
        loaders, runners, config, worker = (
            importlib.import_module(f"sglang.srt.{name}")
            for name in (
                "model_loader.loader",
                "model_executor.model_runner",
                "configs.model_config",
                "speculative.eagle_worker",
            )
        )
        return (
            loaders._initialize_model,
            loaders.DefaultModelLoader.__dict__["load_model"],
            runners.ModelRunner.__dict__["forward"],
            config.ModelConfig.__dict__["__init__"],
            worker.EAGLEWorker.__dict__["forward_batch_generation"],
        )


@pytest.fixture
def server(tmp_path, monkeypatch):
    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("sglang", "transformers", "toy")]:
            monkeypatch.delitem(sys.modules, name)

    forget()
    made = Server(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(str(made.tree))
    monkeypatch.setattr(session.os, "register_at_fork", lambda **_: None)
    yield made
    forget()


def test_the_engine_finds_the_probe_by_its_entry_point():
    (found,) = [point for point in entry_points(group="sglang.srt.plugins") if point.name == PLUGIN]
    assert found.load() is attach_sglang.register


@pytest.mark.parametrize("target", ["Target", "Old", "Parts"])
def test_a_run_from_load_to_the_last_hook(server, target):
    before = server.hooked()
    found = server.run(target)
    assert (found.engine, found.engine_version) == ("sglang", "9.9")
    assert found.engine_path == str(server.tree / "sglang")
    assert {key: fate for key, fate in found.fates("drafter").items() if fate is not Fate.USED} == {"t2d": Fate.DROPPED}
    assert set(found.fates("target").values()) == {Fate.USED}
    assert all(row.written == row.elements for load in found.loads for row in load.parameters)
    (drafter,) = found.of("drafter")
    assert (drafter.parameter("hot_token_id").kind, drafter.parameter("hot_token_id").keys) == ("attribute", ("d2t",))
    (serving,) = found.servings
    assert (serving.runner, serving.proposer) == (
        "sglang.srt.model_executor.model_runner.ChildRunner",
        "sglang.srt.speculative.eagle_worker.EAGLEWorker",
    )
    assert serving.shared == (("embed.weight", "embed.weight"),)
    assert serving.projection.found_by == "key"
    assert (serving.requested, serving.declared) == (None, (2, 4, 5))
    assert serving.dummy_proposals == 1
    assert serving.unobserved == ()
    for proposal in serving.proposals:
        assert proposal.layers() == ((2,), (4,), (5,))
        assert all(capture.exact for capture in proposal.captures)
        # one pass on the features, which are projected, then the drafter's own output
        assert proposal.pass_widths == (3 * WIDTH, WIDTH, WIDTH)
        assert proposal.projection_widths == (3 * WIDTH,)
        assert (proposal.layers_entered, proposal.compared, proposal.strays) == (3, 4, ())
    assert [proposal.decode for proposal in serving.proposals] == [False, True, True]
    assert [key.path for key in found.config if key.read] == ["hidden_size"]
    assert server.hooked() == before


def test_ids_of_the_config_are_on_record_beside_what_was_captured(server):
    (serving,) = server.run(ids=[1, 3, 6]).servings
    assert (serving.requested, serving.declared) == ((1, 3, 6), (2, 4, 7))
    assert serving.proposals[0].layers() == ((2,), (4,), (7,))


def test_the_wrong_algorithm_hands_over_one_hidden_state(server):
    (serving,) = server.run(algorithm="EAGLE").servings
    assert {proposal.feature_width for proposal in serving.proposals} == {WIDTH}
    assert serving.projection.in_features == 3 * WIDTH
    assert serving.went_around == ENOUGH
    assert [capture.final_norm for capture in serving.proposals[0].captures] == [True]


def test_features_that_are_altered_on_the_way_equal_no_layer(server):
    server.start()
    server.worker.features = lambda features: features * 2
    server.answer()
    assert read(server.evidence).servings[0].proposals[0].layers() == ((), (), ())


def test_states_of_another_token_are_on_record(server):
    server.start()
    server.worker.features = lambda features: features.roll(1, 0)
    server.answer()
    for proposal in read(server.evidence).servings[0].proposals:
        assert [(stray.row, stray.own, stray.held[0]) for stray in proposal.strays][0] == (0, (0,), (3,))


def test_layers_whose_inputs_are_not_whole_are_unobserved_and_not_called_wrong(server, monkeypatch):
    monkeypatch.setattr("draftgate_probe.serving.travelling", lambda _: None)
    (serving,) = server.run("Parts").servings
    assert serving.proposals[0].captures == ()
    assert any("could not be seen" in text for text in serving.unobserved)


def test_the_first_request_alone_may_be_too_short(server):
    server.start()
    server.answer(ENOUGH)
    with pytest.raises(EvidenceError, match="2 real proposals"):
        read(server.evidence)


def test_a_loader_without_checkpoint_data_is_on_record_as_such(server):
    found = server.run(loader="DummyModelLoader")
    assert [load.tapped for load in found.loads] == [False, False]


def test_a_child_loader_is_recorded_once(server):
    assert len(server.run(loader="LayeredModelLoader").loads) == 2


def test_a_rank_stands_where_the_target_stood_although_the_drafter_is_shown_no_pipeline(server, monkeypatch):
    """As `draft_pp_context` (speculative/spec_utils.py, 0.5.23) does."""
    state, sizes = importlib.import_module("sglang.srt.distributed.parallel_state"), iter([2, *[1] * 9])
    monkeypatch.setattr(state, "get_pp_group", lambda: types.SimpleNamespace(rank_in_group=0, world_size=next(sizes)))
    found = server.run()
    assert {each.place.pp_size for each in (*found.loads, *found.servings)} == {2}


def test_a_load_that_raises_is_on_record_and_raises_on(server, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", property(lambda _: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        server.start()
    (load,) = read_loads(server.evidence)
    assert "ZeroDivisionError" in load.error


@pytest.mark.parametrize(
    ("pattern", "new", "what"),
    [
        (r"\b_initialize_model\b", "_make_model", "cannot attach model loaders"),
        (r"\bBaseModelLoader\b", "Loader", "cannot attach model loaders"),
        (r"\bModelConfig\b", "TheConfig", "cannot attach draft model config"),
        (r"\bPretrainedConfig\b", "ConfigBase", "cannot attach config reads"),
        (r"(?<!model\.)\bforward\((?=(self, )?(forward_batch|batch|Batch)\b)", "run_pass(", "no class with `forward`"),
        (r"\bforward_batch_generation\b", "run_step", "no class with `forward_batch_generation`"),
        (r"\bforward_batch\b", "batch", "before a forward pass: KeyError: 'forward_batch'"),
        (r"\bis_draft_worker\b", "drafting", "before a forward pass: AttributeError"),
        (r"\bis_decode\b", "decodes", "before a forward pass: AttributeError"),
        (r"\bis_target_verify\b", "verifies", "before a forward pass: AttributeError"),
        (r"\bspec_info\b", "draft_info", "before a forward pass: AttributeError"),
        (r"(?<!configs\.)\bmodel_config\b", "configuration", "before loading: KeyError"),
    ],
)
def test_a_part_that_has_another_name_makes_the_evidence_invalid(server, pattern, new, what):
    server.rename(pattern, new)
    server.start()
    server.answer(2)
    with pytest.raises(EvidenceError, match=re.escape(what)):
        read(server.evidence)


def test_without_the_harness_s_variables_nothing_is_touched(server, monkeypatch):
    monkeypatch.delenv("DRAFTGATE_PROBE_DIR", raising=False)
    before = server.hooked()
    attach_sglang.register()
    assert server.hooked() == before


def test_where_there_are_plugins_the_path_does_not_attach_as_well(server):
    found = server.process()
    assert [load.role for load in found.loads] == ["drafter", "target"]
    assert found.servings[0].proposals[0].layers() == ((2,), (4,), (5,))


def test_without_plugins_the_path_attaches_and_hides_no_other_sitecustomize(server):
    shutil.rmtree(server.tree / "sglang" / "srt" / "plugins")
    (server.tree / "sitecustomize.py").write_text(f"open({str(server.folder / 'ran')!r}, 'w').close()")
    found = server.process()
    assert [load.role for load in found.loads] == ["drafter", "target"]
    assert found.servings[0].proposals[0].layers() == ((2,), (4,), (5,))
    assert (server.folder / "ran").exists()


def test_a_process_that_imports_no_model_loader_is_left_alone(tmp_path):
    env = environment(tmp_path / "evidence", "t", "d", engine="sglang")
    code = "import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, timeout=60, check=True)
    with pytest.raises(EvidenceError, match="no evidence at all"):
        read(tmp_path / "evidence")

"""The attachment, on a vLLM of a few lines: what it hooks, what it takes for real, and that it lets go again."""

from __future__ import annotations

import json
import sys
import types
from importlib.metadata import entry_points

import pytest
import torch
from draftgate_probe import attach_vllm, session
from draftgate_probe.serving import ENOUGH
from safetensors.torch import save_file

from harness.errors import EvidenceError
from harness.probe.evidence import PLUGIN, Fate, read, read_loads
from harness.probe.facts import After
from tests.probe.test_config import make_library
from tests.probe.test_serving import Drafter, Target


def module(monkeypatch, name, **names):
    made = types.ModuleType(name)
    for key, value in names.items():
        if isinstance(value, type):
            value.__module__ = name
        setattr(made, key, value)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def group():
    return types.SimpleNamespace(rank_in_group=0, world_size=1)


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """Install the stand-in; `drop(name)` takes one of its parts away before `register`."""
    config_class = make_library()

    class SpeculativeConfig:
        def __init__(self, draft_model_config):
            self.draft_model_config = draft_model_config
            self.__post_init__()

        def __post_init__(self):
            pass

    class BaseModelLoader:
        def load_model(self, vllm_config, model_config, prefix=""):
            model = model_config.make()
            self.load_weights(model, model_config)
            return model

        def load_weights(self, model, model_config):
            model.load_weights(iter(model_config.tensors.items()))

    class Runner:
        def __init__(self, model):
            self.model = model

        def load_model(self):
            pass

        def execute_model(self, scheduler_output, dummy_run=False):
            return self.model(torch.arange(scheduler_output.total_num_scheduled_tokens) % 32)

    class Proposer:
        def __init__(self, model):
            self.model = model

        def load_model(self):
            pass

        def propose(self, target_token_ids, target_positions, target_hidden_states, dummy_run=False):
            return self.model(hidden_states=self.model.combine(target_hidden_states))

    class ChildProposer(Proposer):
        def propose(self, *args, **kwargs):
            return super().propose(*args, **kwargs)

    module(monkeypatch, "vllm", __version__="9.9", __path__=["/e/site/vllm"])
    module(monkeypatch, "transformers", PretrainedConfig=config_class)
    module(monkeypatch, "vllm.config", SpeculativeConfig=SpeculativeConfig)
    module(monkeypatch, "vllm.distributed", parallel_state=types.SimpleNamespace(
        get_tp_group=group, get_pp_group=group, get_dp_group=group,
    ))  # fmt: skip
    module(monkeypatch, "vllm.model_executor")
    module(monkeypatch, "vllm.model_executor.model_loader")
    module(monkeypatch, "vllm.model_executor.model_loader.base_loader", BaseModelLoader=BaseModelLoader)
    module(monkeypatch, "vllm.v1.worker.toy", Runner=Runner)
    module(monkeypatch, "vllm.v1.spec_decode.toy", Proposer=Proposer, ChildProposer=ChildProposer)
    at_fork = []
    monkeypatch.setattr(session.os, "register_at_fork", lambda **hooks: at_fork.extend(hooks.values()))

    class Engine:
        folder = tmp_path / "evidence"
        forked = at_fork
        originals = (BaseModelLoader.load_model, Runner.execute_model, Proposer.propose, ChildProposer.propose)

        def drop(self, name):
            monkeypatch.setitem(sys.modules, name, None)

        def now(self):
            return (BaseModelLoader.load_model, Runner.execute_model, Proposer.propose, ChildProposer.propose)

        def start(self, *, one=False):
            configs = {}
            for role, make in (("target", Target), ("drafter", Drafter)):
                path = tmp_path / ("both" if one else role)
                path.mkdir(exist_ok=True)
                hf = config_class(_name_or_path=str(path), hidden_size=8, unread=1)
                (path / "config.json").write_text(json.dumps({"hidden_size": 8, "unread": 1}))
                tensors = dict(make().state_dict()) | {"surplus": torch.zeros(2)}
                save_file(tensors, path / "model.safetensors")
                configs[role] = types.SimpleNamespace(
                    model=str(path), hf_config=hf, hf_text_config=hf, make=self.maker(make), tensors=tensors,
                    runner="draft" if role == "drafter" else "generate",
                )  # fmt: skip
            self.folder.mkdir()
            self.handed = []
            monkeypatch.setenv("DRAFTGATE_PROBE_DIR", str(self.folder))
            monkeypatch.setenv("DRAFTGATE_PROBE_TARGET", configs["target"].model)
            monkeypatch.setenv("DRAFTGATE_PROBE_DRAFTER", configs["drafter"].model)
            attach_vllm.register()
            speculative = SpeculativeConfig(configs["drafter"])
            vllm_config = types.SimpleNamespace(speculative_config=speculative)
            assert configs["drafter"].hf_config.hidden_size == 8
            torch.manual_seed(0)
            self.runner = Runner(BaseModelLoader().load_model(vllm_config, configs["target"]))
            self.proposer = ChildProposer(BaseModelLoader().load_model(vllm_config, configs["drafter"]))

        def maker(self, cls):
            def make():
                model = cls()
                model.requires_grad_(requires_grad=False)
                type(model).load_weights = lambda model, weights: [
                    model.get_parameter(name).copy_(tensor) for name, tensor in weights if name != "surplus"
                ]
                return model

            return make

        @torch.no_grad()
        def step(self, tokens=4, *, dummy=False, drafts=0, change=lambda features: features):
            scheduled = {"request": [-1] * drafts} if drafts else {}
            _, aux = self.runner.execute_model(
                types.SimpleNamespace(total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=scheduled),
                dummy_run=dummy,
            )
            self.handed.append(change(torch.cat(aux, -1)))
            ids = torch.arange(tokens)
            return self.proposer.propose(ids, ids, self.handed[-1], dummy_run=dummy)

    yield Engine()
    for cls in (Target, Drafter):
        if "load_weights" in cls.__dict__:
            del cls.load_weights


def test_the_engine_finds_the_probe_by_its_entry_point():
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == PLUGIN]
    assert found.load() is attach_vllm.register


def test_a_run_from_load_to_the_last_hook(vllm):
    vllm.start()
    vllm.step(dummy=True)
    for number in range(ENOUGH):
        vllm.step(drafts=3 if number else 0)
    found = read(vllm.folder)
    assert (found.engine, found.engine_version, found.engine_path) == ("vllm", "9.9", "/e/site/vllm")
    assert found.fates("drafter")["surplus"] is Fate.DROPPED
    assert all(row.written == row.elements for load in found.loads for row in load.parameters)
    (serving,) = found.servings
    assert serving.unobserved == ()
    assert serving.dummy_proposals == 1
    assert len(serving.proposals) == ENOUGH
    assert {proposal.layers() for proposal in serving.proposals} == {((1,), (3,), (4,))}
    assert [proposal.decode for proposal in serving.proposals] == [False, True, True]
    assert all(proposal.compared == 4 and not proposal.strays for proposal in serving.proposals)
    assert serving.declared == (1, 3, 4)
    assert [key.path for key in found.config if key.read] == ["hidden_size"]
    assert vllm.now() == vllm.originals


def test_what_the_drafter_serves_with_is_held_against_what_was_loaded(vllm):
    vllm.start()
    assert {row.after for row in read_loads(vllm.folder)[0].parameters} == {After.NOT_COMPARED}
    vllm.proposer.model.fc.weight.copy_(torch.ones(()))
    for _ in range(ENOUGH):
        vllm.step()
    found = read(vllm.folder)
    after = {row.name: row.after for row in found.of("drafter")[0].parameters}
    assert after.pop("fc.weight") == After.CHANGED
    assert set(after.values()) == {After.SAME}


def test_states_of_another_token_are_on_record(vllm):
    vllm.start()
    for _ in range(ENOUGH):
        vllm.step(change=lambda features: features.roll(1, 0))
    for proposal in read(vllm.folder).servings[0].proposals:
        assert [(stray.row, stray.own, stray.held[0]) for stray in proposal.strays][0] == (0, (0,), (3,))


def test_without_real_proposals_the_evidence_is_unfinished(vllm):
    vllm.start()
    vllm.step(dummy=True)
    with pytest.raises(EvidenceError, match="0 real proposals"):
        read(vllm.folder)


def test_a_forked_child_is_a_process_of_its_own(vllm, monkeypatch):
    vllm.start()
    monkeypatch.setattr(session.os, "getpid", lambda: 4242)
    for hook in vllm.forked:
        hook()
    child = json.loads((vllm.folder / "process-4242.json").read_text())
    assert child["faults"] == []


def test_where_target_and_drafter_are_one_checkpoint_the_engine_s_word_decides(vllm, monkeypatch):
    vllm.start(one=True)
    assert sorted(load.role for load in read_loads(vllm.folder)) == ["drafter", "target"]


def test_without_the_harness_s_variables_nothing_is_touched(vllm, monkeypatch):
    monkeypatch.delenv("DRAFTGATE_PROBE_DIR", raising=False)
    attach_vllm.register()
    assert vllm.now() == vllm.originals


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("vllm.model_executor.model_loader.base_loader", "cannot attach model loaders"),
        ("vllm.config", "cannot attach draft model config"),
        ("transformers", "cannot attach config reads"),
    ],
)
def test_a_part_that_cannot_be_hooked_is_a_fault_and_the_engine_starts(vllm, part, what):
    vllm.drop(part)
    vllm.start()
    vllm.step()
    with pytest.raises(EvidenceError, match=what):
        read(vllm.folder)


@pytest.mark.parametrize("part", ["vllm.v1.spec_decode.toy", "vllm.v1.worker.toy"])
def test_an_engine_without_a_known_proposer_or_runner_is_a_fault(vllm, part):
    vllm.drop(part)
    vllm.start()
    vllm.step()
    with pytest.raises(EvidenceError, match="no class with"):
        read_loads(vllm.folder)


def test_a_recorder_that_fails_is_a_fault_and_the_load_goes_on(vllm, monkeypatch):
    monkeypatch.setattr(session, "LoadRecorder", lambda *_: 1 / 0)
    vllm.start()
    vllm.step()
    with pytest.raises(EvidenceError, match="recording the target's load"):
        read(vllm.folder)


def test_a_load_that_raises_is_on_record_and_raises_on(vllm, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", property(lambda _: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        vllm.start()
    (load,) = read_loads(vllm.folder)
    assert "ZeroDivisionError" in load.error

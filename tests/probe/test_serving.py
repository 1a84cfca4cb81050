"""What the drafter is fed is known by value, whatever the engine says it captured."""

from __future__ import annotations

import pytest
import torch
from draftgate_probe import serving
from draftgate_probe.matching import find_projection, hidden_size
from draftgate_probe.serving import ENOUGH, ServingRecorder
from torch import nn

WIDTH, LAYERS = 8, 6


class Layer(nn.Module):
    """Adds its input in place, as fused kernels do: a hook that keeps a reference instead of a copy sees rubbish."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states.clone()
        else:
            residual.add_(hidden_states)
        hidden_states.copy_(self.mlp(self.norm(residual)))
        return hidden_states, residual


class Target(nn.Module):
    def __init__(self, aux=(1, 3, 4)):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.aux_hidden_state_layers = aux

    def forward(self, ids):
        hidden, residual, aux = self.embed(ids), None, {}
        for index, layer in enumerate(self.layers):
            if index in self.aux_hidden_state_layers:
                aux[index] = hidden.clone() if residual is None else hidden + residual
            hidden, residual = layer(torch.arange(len(ids)), hidden, residual)
        aux[LAYERS] = hidden + residual
        return self.norm(hidden + residual), [aux[index] for index in self.aux_hidden_state_layers]


class Drafter(nn.Module):
    def __init__(self, *, bypass=False):
        super().__init__()
        self.fc = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Layer()])
        self.bypass = bypass

    def combine(self, features):
        return features[:, :WIDTH] if self.bypass else self.fc(features)

    def forward(self, hidden_states):
        return hidden_states + 1


def load_record(*, key="fc.weight"):
    return {"parameters": [{"name": "fc.weight", "shape": [WIDTH, 3 * WIDTH], "keys": [key] if key else []}]}


class Engine:
    """The order of events in a step: forward of the target, then the proposer."""

    def __init__(self, target=None, drafter=None, record=None):
        torch.manual_seed(0)
        self.target, self.drafter = target or Target(), drafter or Drafter()
        self.saved, self.done, self.faults = [], [], []
        self.recorder = ServingRecorder(
            self.target,
            self.drafter,
            record or load_record(),
            self.saved.append,
            lambda: self.done.append(True),
            lambda where, error: self.faults.append((where, error)),
        )

    @torch.no_grad()
    def step(self, rows=5, *, real=True, change=lambda aux: torch.cat(aux, -1), passes=2):
        self.recorder.step_begins(real=real)
        _, aux = self.target(torch.randint(0, 32, (rows,)))
        features = change(aux)
        self.recorder.propose_begins(features if isinstance(features, list) else [features], real=real)
        hidden = self.drafter.combine(torch.cat(features, -1) if isinstance(features, list) else features)
        for _ in range(passes):
            hidden = self.drafter(hidden_states=hidden)
        self.recorder.propose_ends()

    @property
    def proposals(self):
        assert self.faults == []
        return self.saved[-1]["proposals"]

    def layers(self):
        return [capture["layers"] for capture in self.proposals[-1]["captures"]]


def test_captured_layers_are_named_in_the_order_they_were_handed_over():
    engine = Engine()
    engine.step()
    assert engine.layers() == [[1], [3], [4]]
    assert all(capture["exact"] for capture in engine.proposals[0]["captures"])
    proposal = engine.proposals[0]
    assert (proposal["rows"], proposal["feature_width"]) == (5, 3 * WIDTH)
    assert proposal["projection_widths"] == [3 * WIDTH]
    assert (proposal["passes"], proposal["pass_widths"]) == (2, [WIDTH, WIDTH])


def test_a_list_of_chunks_is_the_same_as_their_concatenation():
    engine = Engine()
    engine.step(change=lambda aux: aux)
    assert engine.layers() == [[1], [3], [4]]


@pytest.mark.parametrize("aux", [(2, 4, 5), (0, 2, 3), (4, 3, 1), (1, 3, LAYERS)])
def test_a_capture_off_by_one_or_in_another_order_shows_by_value(aux):
    engine = Engine(Target(aux))
    engine.target.aux_hidden_state_layers = aux
    engine.step()
    assert engine.layers() == [[layer] for layer in aux]


def test_one_hidden_state_instead_of_three():
    engine = Engine(drafter=Drafter(bypass=True))
    engine.step(change=lambda aux: aux[1])
    assert engine.proposals[0]["feature_width"] == WIDTH
    assert engine.layers() == [[3]]
    assert engine.proposals[0]["projection_widths"] == []


def test_a_projection_that_is_gone_around():
    engine = Engine(drafter=Drafter(bypass=True))
    engine.step()
    assert engine.proposals[0]["projection_widths"] == []
    assert engine.saved[0]["projection"]["module"] == "fc"


def test_features_that_equal_no_layer():
    engine = Engine()
    engine.step(change=lambda aux: torch.cat([aux[0], aux[1] * 1.5, torch.zeros_like(aux[2])], -1))
    assert engine.layers() == [[1], [], []]


def test_features_that_are_close_are_named_with_their_distance():
    engine = Engine()
    engine.step(change=lambda aux: torch.cat(aux, -1) * 1.001)
    captures = engine.proposals[0]["captures"]
    assert engine.layers() == [[1], [3], [4]]
    assert not any(capture["exact"] for capture in captures)
    assert all(0 < capture["distance"] < 1e-2 for capture in captures)


def test_the_final_normed_state_is_recognised():
    engine = Engine()
    with torch.no_grad():
        engine.recorder.step_begins(real=True)
        final, _ = engine.target(torch.arange(4))
        engine.recorder.propose_begins([final], real=True)
        engine.recorder.propose_ends()
    capture = engine.proposals[0]["captures"][0]
    assert (capture["final_norm"], capture["layers"]) == (True, [])


def test_rows_taken_out_of_the_step_are_found():
    engine = Engine()
    engine.step(rows=9, change=lambda aux: torch.cat(aux, -1)[torch.tensor([0, 1, 5, 8])])
    assert engine.layers() == [[1], [3], [4]]


def test_dummy_runs_are_counted_apart():
    engine = Engine()
    engine.step(real=False)
    engine.step(real=False)
    engine.step()
    assert engine.saved[-1]["dummy_proposals"] == 2
    assert len(engine.proposals) == 1


def test_a_dummy_step_is_not_matched_with_a_later_real_proposal():
    engine = Engine()
    engine.step()
    engine.recorder.step_begins(real=False)
    with torch.no_grad():
        engine.target(torch.arange(3))
    engine.recorder.propose_begins([torch.zeros(3, 3 * WIDTH)], real=True)
    engine.recorder.propose_ends()
    assert len(engine.proposals) == 1


def test_after_enough_proposals_no_hook_is_left():
    engine = Engine()
    for _ in range(ENOUGH):
        engine.step()
    assert engine.done == [True]
    assert engine.saved[-1]["complete"]
    modules = [*engine.target.modules(), *engine.drafter.modules()]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)
    engine.step()
    assert len(engine.saved) == ENOUGH


def test_layers_that_run_without_their_hooks_are_said_to_be_unobserved(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(serving.torch.compiler, "is_compiling", lambda: True)
    engine.step()
    assert engine.proposals[0]["captures"] == []
    assert any("target's layers" in text for text in engine.saved[-1]["unobserved"])
    assert any("drafter" in text for text in engine.saved[-1]["unobserved"])


def test_code_that_is_compiled_with_our_hooks_in_it_stays_one_graph_and_is_unobserved():
    engine = Engine()
    engine.recorder.step_begins(real=True)
    compiled = torch.compile(engine.target.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        _, aux = compiled(torch.arange(4))
    engine.recorder.propose_begins([torch.cat(aux, -1)], real=True)
    engine.recorder.propose_ends()
    assert engine.proposals[0]["captures"] == []
    assert any("target's layers" in text for text in engine.saved[-1]["unobserved"])


def test_features_of_a_strange_width_are_said_to_be_unobserved():
    engine = Engine(drafter=Drafter(bypass=True))
    engine.step(change=lambda aux: torch.cat(aux, -1)[:, :-1])
    assert any("no multiple" in text for text in engine.saved[-1]["unobserved"])


def test_the_projection_is_found_by_its_key_and_failing_that_by_its_shape():
    drafter = Drafter()
    assert find_projection(drafter, load_record(), WIDTH)[2] == "key"
    assert find_projection(drafter, load_record(key="model.fc.0.weight"), WIDTH)[2] == "key"
    assert find_projection(drafter, load_record(key=None), WIDTH)[2] == "shape"
    assert find_projection(drafter, load_record(key="midlayer.mlp.fc1.weight"), WIDTH)[2] == "shape"
    assert find_projection(drafter, {"parameters": []}, WIDTH) is None


def test_the_hidden_size_is_the_norms_and_not_the_experts_scales_or_a_head_s():
    target = Target()
    for layer in target.layers:
        layer.post_norm = nn.LayerNorm(WIDTH, bias=False)
        layer.q_norm, layer.k_norm = nn.LayerNorm(2, bias=False), nn.LayerNorm(2, bias=False)
        for number in range(5):
            layer.register_parameter(f"w{number}_scale", nn.Parameter(torch.ones(256)))
    assert hidden_size(target, list(target.layers)) == WIDTH
    with pytest.raises(LookupError, match="no layer norm"):
        hidden_size(target, [nn.Linear(2, 2)])


def test_shared_memory_of_target_and_drafter_is_named():
    target, drafter = Target(), Drafter()
    drafter.embed = target.embed
    engine = Engine(target, drafter)
    engine.step()
    assert engine.saved[-1]["shared"] == [["embed.weight", "embed.weight"]]


def test_an_exception_in_a_hook_is_a_fault_and_the_engine_runs_on(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(serving, "stream", lambda *_: 1 / 0)
    engine.step()
    assert "division by zero" in str(engine.faults[0][1])

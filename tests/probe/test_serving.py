"""What the drafter is fed is known by value, whatever the engine says it captured."""

from __future__ import annotations

import pytest
import torch
from draftgate_probe import serving
from draftgate_probe.matching import ROWS, decoder_layers, find_projection, hidden_size
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
        self.embed = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.aux_hidden_state_layers = aux

    def forward(self, ids, positions=None):
        hidden, residual, aux = self.embed(ids), None, {}
        for index, layer in enumerate(self.layers):
            if index in self.aux_hidden_state_layers:
                aux[index] = hidden.clone() if residual is None else hidden + residual
            hidden, residual = layer(torch.arange(len(ids)) if positions is None else positions, hidden, residual)
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
        return self.layers[0](None, hidden_states.clone(), None)[0]


def load_record(*, key="fc.weight"):
    layer = {"layers.0.norm.weight": [WIDTH], "layers.0.mlp.weight": [WIDTH, WIDTH]}
    return {
        "parameters": [
            {"name": "fc.weight", "shape": [WIDTH, 3 * WIDTH], "keys": [key] if key else []},
            *({"name": name, "shape": shape, "keys": [name]} for name, shape in layer.items()),
        ]
    }


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
    def step(
        self, rows=5, *, real=True, change=lambda aux: torch.cat(aux, -1), passes=2, decode=False, ids=None, ran=None,
        handed=None, replayed=False,
    ):  # fmt: skip
        """Run one step; `ran` and `handed`: positions of the rows of the target and of the features (None: unsaid)."""
        self.recorder.step_begins(real=real, decode=decode)
        ids = torch.randperm(128)[:rows] if ids is None else torch.tensor(ids)
        _, aux = self.target(ids, None if ran is None else torch.tensor(ran))
        features = change(aux)
        places = None if handed is None else torch.tensor(handed)
        self.recorder.propose_begins(features if isinstance(features, list) else [features], places, real=real)
        if not replayed:
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

    def strays(self):
        return {stray["row"]: stray["held"] for stray in self.proposals[-1]["strays"]}


def test_captured_layers_are_named_in_the_order_they_were_handed_over():
    engine = Engine()
    engine.step()
    assert engine.layers() == [[1], [3], [4]]
    assert all(capture["exact"] for capture in engine.proposals[0]["captures"])
    proposal = engine.proposals[0]
    assert (proposal["rows"], proposal["feature_width"]) == (5, 3 * WIDTH)
    assert proposal["projection_widths"] == [3 * WIDTH]
    assert (proposal["passes"], proposal["pass_widths"], proposal["layers_entered"]) == (2, [WIDTH, WIDTH], 2)
    assert (proposal["compared"], proposal["strays"]) == (5, [])


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
    assert engine.proposals[0]["layers_entered"] == 2
    assert engine.saved[0]["projection"]["module"] == "fc"


def test_a_drafter_that_is_replayed_was_not_seen_to_go_around_anything():
    engine = Engine()
    engine.step(replayed=True)
    assert (engine.proposals[0]["projection_widths"], engine.proposals[0]["layers_entered"]) == ([], 0)
    assert any("replayed" in text for text in engine.saved[-1]["unobserved"])


def test_a_decode_is_told_from_a_prefill():
    engine = Engine()
    engine.step()
    engine.step(decode=True)
    assert [proposal["decode"] for proposal in engine.proposals] == [False, True]


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
        engine.recorder.step_begins(real=True, decode=False)
        final, _ = engine.target(torch.arange(4))
        engine.recorder.propose_begins([final], real=True)
        engine.recorder.propose_ends()
    capture = engine.proposals[0]["captures"][0]
    assert (capture["final_norm"], capture["layers"]) == (True, [])


def wide(change):
    return lambda aux: change(torch.cat(aux, -1))


SHIFTED = {
    "shifted by one": lambda states: states.roll(1, 0),
    "shifted, the first twice": lambda states: torch.cat([states[:1], states[:-1]]),
    "shifted, after nothing": lambda states: torch.cat([torch.zeros_like(states[:1]), states[:-1]]),
    "shifted and rounded": lambda states: states.roll(-1, 0) * 1.001,
    "permuted": lambda states: states[[1, 0, 3, 2, *range(4, len(states))]],
    "one row repeated": lambda states: states[2].expand_as(states),
    "the last two equal": lambda states: torch.cat([states[:-1], states[-2:-1]]),
    "a chunk of the row before": lambda states: torch.cat([states[:, :WIDTH].roll(1, 0), states[:, WIDTH:]], -1),
}


@pytest.mark.parametrize("rows", [5, ROWS + 6])
@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("fault", SHIFTED)
def test_states_of_another_token_are_named(fault, said, rows):
    engine = Engine()
    engine.step(rows, change=wide(SHIFTED[fault]), handed=list(range(rows)) if said else None)
    assert engine.layers() == [[1], [3], [4]], "of the right layers"
    (compared,) = [proposal["compared"] for proposal in engine.proposals]
    assert compared == min(rows, ROWS)
    if rows > ROWS and fault == "the last two equal":
        assert engine.strays() == {}, "that is beyond what is kept"
        return
    assert engine.strays()
    for row, held in engine.strays().items():
        assert held != [[row]] * 3


def test_a_stray_row_is_told_with_what_it_holds():
    engine = Engine()
    engine.step(change=wide(SHIFTED["a chunk of the row before"]))
    assert engine.strays() == {row: [[(row - 1) % 5], [row], [row]] for row in range(5)}
    assert [stray["own"] for stray in engine.proposals[0]["strays"]] == [[row] for row in range(5)]


def test_states_that_equal_another_token_s_are_not_taken_for_their_own_that_are_near():
    engine = Engine()
    with torch.no_grad():
        engine.target.embed.weight[1:5] = engine.target.embed.weight[0] * (1 + 1e-4 * torch.arange(1, 5)[:, None])
    engine.step(ids=[0, 1, 2, 3, 4], change=wide(lambda states: states.roll(1, 0)))
    assert list(engine.strays()) == [0, 1, 2, 3, 4]


def test_a_row_that_is_rounded_among_exact_ones_is_no_stray():
    engine = Engine()
    engine.step(change=wide(lambda states: torch.cat([states[:4], states[4:] * 1.0001])))
    assert (engine.layers(), engine.strays()) == ([[1], [3], [4]], {})


def test_a_token_that_is_repeated_is_no_stray():
    engine = Engine()
    engine.step(ids=[7, 7, 9, 7, 7], change=wide(lambda states: states[[1, 0, 2, 4, 3]]), handed=[0, 1, 2, 3, 4])
    assert (engine.layers(), engine.strays()) == ([[1], [3], [4]], {})


def test_padding_is_not_compared():
    engine = Engine()
    engine.step(change=wide(lambda states: torch.cat([states, torch.zeros(3, 3 * WIDTH)])), handed=[0, 1, 2, 3, 4])
    assert engine.layers() == [[1], [3], [4]]
    assert (engine.proposals[0]["compared"], engine.strays()) == (5, {})


def test_padding_of_the_target_s_pass_is_not_compared():
    engine = Engine()
    engine.step(
        ids=[5, 6, 7, 0, 0, 0], ran=[3, 4, 5, 0, 0, 0], handed=[3, 4, 5], change=wide(lambda states: states[:3])
    )
    assert engine.layers() == [[1], [3], [4]]
    assert (engine.proposals[0]["compared"], engine.strays()) == (3, {})


@pytest.mark.parametrize("said", [True, False])
def test_rows_taken_out_of_the_step_are_found(said):
    engine, chosen = Engine(), [0, 1, 5, 8]
    engine.step(rows=9, change=wide(lambda states: states[chosen]), handed=chosen if said else None)
    assert engine.layers() == [[1], [3], [4]]
    assert (engine.proposals[0]["compared"], engine.strays()) == (4, {})


def test_rows_taken_out_of_the_step_have_an_order_where_they_have_no_place():
    engine = Engine()
    engine.step(rows=9, change=wide(lambda states: states[[1, 0, 5, 8]]))
    assert list(engine.strays()) == [1]
    engine.step(rows=9, change=lambda aux: [aux[0][[0, 1, 5, 8]], aux[1][[0, 2, 5, 8]], aux[2][[0, 1, 5, 8]]])
    assert engine.strays() == {1: [[1], [2], [1]]}


TWO = {"ids": [1, 2, 3, 4, 5, 6], "ran": [7, 8, 9, 3, 4, 5]}
"""Two requests in one step."""


def test_rows_that_were_rejected_are_left_out():
    engine = Engine()
    engine.step(**TWO, change=wide(lambda states: states[[0, 1, 3, 4, 5]]), handed=[7, 8, 3, 4, 5])
    assert (engine.proposals[0]["compared"], engine.strays()) == (5, {})
    engine.step(**TWO, change=wide(lambda states: states[[0, 1, 2, 4, 5]]), handed=[7, 8, 3, 4, 5])
    assert engine.strays() == {2: [[2]] * 3}


def test_requests_that_change_places():
    engine = Engine()
    same = {"ids": [1, 2, 3, 4, 5, 6], "ran": [0, 1, 2, 0, 1, 2], "handed": [0, 1, 2, 0, 1, 2]}
    engine.step(**same)
    assert engine.strays() == {}
    engine.step(**same, change=wide(lambda states: states.roll(3, 0)))
    assert engine.strays()[0] == [[3]] * 3


def test_a_tree_of_drafts_has_no_certain_order_but_one_row_for_all_chunks():
    engine = Engine()
    tree = {"ids": [1, 2, 3, 4], "ran": [7, 8, 8, 9], "handed": [7, 8, 9, 10]}
    engine.step(**tree, change=wide(lambda states: states[[0, 2, 3, 0]]))
    assert engine.strays() == {}
    assert any("tree" in text for text in engine.saved[-1]["unobserved"])
    engine.step(**tree, change=lambda aux: [aux[0][[0, 2, 3, 0]], aux[1][[0, 1, 3, 0]], aux[2][[0, 2, 3, 0]]])
    assert list(engine.strays()) == [1]


def test_rows_that_cannot_be_compared_are_said_to_be_unobserved():
    engine = Engine()
    engine.step(handed=[20, 21, 22, 23, 24])
    assert engine.proposals[0]["captures"] == []
    assert any("none could be compared" in text for text in engine.saved[-1]["unobserved"])


def test_the_decoder_layers_are_those_beside_the_token_embedding():
    model, tower = nn.Module(), nn.Module()
    tower.position_embedding, tower.blocks = nn.Embedding(64, WIDTH), nn.ModuleList(Layer() for _ in range(9))
    model.visual, model.language = tower, Target()
    assert decoder_layers(model) == list(model.language.layers)
    del model.language.embed, tower.position_embedding
    assert decoder_layers(model) == list(tower.blocks), "nothing but the length is left to go by"
    with pytest.raises(LookupError, match="no ModuleList"):
        decoder_layers(nn.Linear(2, 2))


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
    engine.recorder.step_begins(real=False, decode=False)
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
    engine.recorder.step_begins(real=True, decode=False)
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

"""Every way in which a checkpoint can fail to land must show in the record of the load."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from draftgate_probe.loading import LoadRecorder
from safetensors.torch import save_file
from torch import nn


class Toy(nn.Module):
    """A model whose `load_weights` is given by the test."""

    def __init__(self, loader=None):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.qkv = nn.Linear(4, 12, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.requires_grad_(requires_grad=False)
        self._loader = loader

    def load_weights(self, weights):
        return self._loader(self, weights)


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {
        "embed.weight": torch.randn(8, 4),
        "q": torch.randn(4, 4),
        "k": torch.randn(4, 4),
        "v": torch.randn(4, 4),
        "norm.weight": torch.randn(4),
        "d2t": torch.arange(6),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def load(checkpoint, loader, model=None, offer=None):
    folder, tensors = checkpoint
    model = model or Toy(loader)
    faults = []
    recorder = LoadRecorder(model, str(folder), lambda where, error: faults.append((where, error)))
    keys = tensors if offer is None else offer
    with torch.no_grad(), recorder:
        model.load_weights((key, tensors[key].clone()) for key in keys)
    facts = recorder.facts()
    assert faults == []
    facts["parameter"] = {row["name"]: row for row in facts["parameters"]}
    facts["key"] = {row["name"]: row for row in facts["keys"]}
    return facts


def usual(model, weights):
    """What an engine's loader does: fused shards by narrow, the rest by name."""
    for name, tensor in weights:
        if name in "qkv":
            model.qkv.weight.data.narrow(0, "qkv".index(name) * 4, 4).copy_(tensor)
        elif name == "embed.weight":
            model.embed.weight.data.copy_(tensor)
        elif name == "norm.weight":
            model.norm.weight.copy_(tensor)


def test_everything_that_lands_is_counted_to_the_element(checkpoint):
    facts = load(checkpoint, usual)
    qkv = facts["parameter"]["qkv.weight"]
    assert (qkv["written"], qkv["elements"], qkv["writes"], qkv["rewritten"]) == (48, 48, 3, 0)
    assert qkv["keys"] == ["k", "q", "v"]
    assert facts["parameter"]["norm.weight"]["keys"] == ["norm.weight"]
    assert facts["parameter"]["scale"]["kind"] == "buffer"
    assert facts["parameter"]["cache"]["kind"] == "scratch"
    assert facts["parameter"]["scale"]["written"] == 0
    assert facts["limits"] == []
    assert facts["tapped"]
    assert facts["error"] == ""


def test_a_dropped_key_was_offered_and_landed_nowhere(checkpoint):
    key = load(checkpoint, usual)["key"]["d2t"]
    assert key["offered"] == 1
    assert key["landed"] == []
    assert not key["read_as_values"]
    assert key["shape"] == [6]


def test_a_key_that_is_in_the_files_but_never_offered(checkpoint):
    facts = load(checkpoint, usual, offer=["q", "k", "v", "embed.weight"])
    assert facts["key"]["norm.weight"]["offered"] == 0
    assert facts["parameter"]["norm.weight"]["written"] == 0


def test_a_fused_parameter_with_a_missing_shard_is_partly_written(checkpoint):
    row = load(checkpoint, usual, offer=["q", "v"])["parameter"]["qkv.weight"]
    assert (row["written"], row["filled"], row["elements"]) == (32, 0, 48)
    assert row["keys"] == ["q", "v"]


def test_two_shards_in_one_place_show_as_rewritten_and_overwritten(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name in "qk":
                model.qkv.weight.data[:4].copy_(tensor)

    facts = load(checkpoint, loader)
    assert facts["parameter"]["qkv.weight"]["rewritten"] == 16
    assert facts["key"]["q"]["overwritten"]
    assert facts["key"]["k"]["landed"] == ["qkv.weight"]


def test_replaced_data_is_followed(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "embed.weight":
                model.embed.weight.data = tensor
            elif name == "norm.weight":
                model.norm.weight = nn.Parameter(tensor.float() + 1, requires_grad=False)

    facts = load(checkpoint, loader)
    assert facts["parameter"]["embed.weight"]["written"] == 32
    assert facts["parameter"]["norm.weight"]["keys"] == ["norm.weight"]
    assert facts["parameter"]["norm.weight"]["written"] == 4


def test_data_transformed_before_the_copy_is_followed(checkpoint):
    def loader(model, weights):
        kept = {}
        for name, tensor in weights:
            kept[name] = tensor.to(torch.float64)
        fused = torch.cat([kept["q"].t().contiguous(), kept["k"] * 2, kept["v"]])
        model.qkv.weight.copy_(fused.float())

    row = load(checkpoint, loader)["parameter"]["qkv.weight"]
    assert row["written"] == 48
    assert row["keys"] == ["k", "q", "v"]


def test_a_loader_that_collects_everything_in_a_dict_first(checkpoint):
    def loader(model, weights):
        state = dict(weights)
        model.load_state_dict(
            {"embed.weight": state["embed.weight"], "norm.weight": state["norm.weight"]}, strict=False
        )

    facts = load(checkpoint, loader)
    assert facts["parameter"]["embed.weight"]["keys"] == ["embed.weight"]
    assert facts["key"]["q"]["landed"] == []


def test_a_buffer_and_a_plain_attribute(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "d2t":
                model.hot_token_id = tensor + torch.arange(6)
            elif name == "norm.weight":
                model.scale.copy_(tensor[:3])

    facts = load(checkpoint, loader)
    assert facts["parameter"]["hot_token_id"]["kind"] == "attribute"
    assert facts["key"]["d2t"]["landed"] == ["hot_token_id"]
    assert facts["parameter"]["scale"]["written"] == 3


def test_padding_is_filled_and_not_written(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "embed.weight":
                model.embed.weight.data[:6].copy_(tensor[:6])
                model.embed.weight.data[6:].fill_(0)

    row = load(checkpoint, loader)["parameter"]["embed.weight"]
    assert (row["written"], row["filled"]) == (24, 8)


def test_a_reset_after_the_copy_takes_the_data_away_again(checkpoint):
    def loader(model, weights):
        usual(model, weights)
        model.norm.weight.zero_()

    facts = load(checkpoint, loader)
    assert facts["parameter"]["norm.weight"]["written"] == 0
    assert facts["key"]["norm.weight"]["landed"] == []
    assert facts["key"]["norm.weight"]["overwritten"]


def test_aliases_are_named(checkpoint):
    model = Toy(usual)
    model.head = nn.Linear(4, 8, bias=False)
    model.head.weight = model.embed.weight
    facts = load(checkpoint, usual, model=model)
    assert facts["parameter"]["head.weight"]["aliases"] == ["embed.weight"]
    assert facts["parameter"]["head.weight"]["written"] == 32


@pytest.mark.parametrize(
    "read", [lambda t: t[0].item(), lambda t: t.tolist(), lambda t: t.numpy(), lambda t: int(t[1])]
)
def test_values_read_by_python_are_told_from_dropped(checkpoint, read):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "d2t":
                read(tensor)

    key = load(checkpoint, loader)["key"]["d2t"]
    assert key["read_as_values"]
    assert key["landed"] == []


def test_a_column_slice_of_many_rows_is_counted_by_mask(tmp_path):
    rows = 5000
    save_file({"w": torch.randn(rows, 3)}, tmp_path / "model.safetensors")
    model = Toy()
    model.big = nn.Linear(8, rows, bias=False).requires_grad_(requires_grad=False)
    model._loader = lambda model, weights: [model.big.weight[:, 2:5].copy_(tensor) for _, tensor in weights]
    facts = load((tmp_path, {"w": torch.randn(rows, 3)}), None, model=model)
    row = facts["parameter"]["big.weight"]
    assert (row["written"], row["exact"]) == (rows * 3, True)


def test_index_assignment_is_counted_where_it_wrote(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "embed.weight":
                model.embed.weight[torch.tensor([0, 3, 7])] = tensor[:3]

    row = load(checkpoint, loader)["parameter"]["embed.weight"]
    assert (row["written"], row["exact"]) == (12, True)


def test_a_tensor_that_was_freed_does_not_lend_its_key_to_the_next_in_its_place(checkpoint):
    def loader(model, weights):
        for _, tensor in weights:
            tensor.add_(1)
            del tensor
        model.norm.weight.copy_(torch.empty(4).fill_(2))

    facts = load(checkpoint, loader)
    assert facts["parameter"]["norm.weight"]["keys"] == []
    assert facts["parameter"]["norm.weight"]["filled"] == 4


def test_a_write_on_another_thread_is_seen_to_be_unseen(checkpoint):
    def loader(model, weights):
        state = dict(weights)

        def write():
            with torch.no_grad():
                model.norm.weight.copy_(state["norm.weight"])

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()

    row = load(checkpoint, loader)["parameter"]["norm.weight"]
    assert row["written"] == 0
    assert row["unseen_change"]


def test_a_raising_load_is_recorded_with_what_was_seen(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "q":
                raise KeyError(name)
            model.embed.weight.data.copy_(tensor)

    folder, tensors = checkpoint
    model = Toy(loader)
    recorder = LoadRecorder(model, str(folder), lambda *_: None)
    with pytest.raises(KeyError), torch.no_grad(), recorder:
        model.load_weights(tensors.items())
    facts = recorder.facts()
    assert facts["error"] == "KeyError: 'q'"
    assert {row["name"]: row["written"] for row in facts["parameters"]}["embed.weight"] == 32
    assert "load_weights" not in vars(model)


def test_a_loader_that_never_calls_load_weights_is_a_stated_limit(checkpoint):
    folder, _ = checkpoint
    model = Toy(usual)
    recorder = LoadRecorder(model, str(folder), lambda *_: None)
    with recorder:
        pass
    facts = recorder.facts()
    assert not facts["tapped"]
    assert any("did not call" in limit for limit in facts["limits"])


def test_a_checkpoint_without_headers_is_a_stated_limit(tmp_path):
    model = Toy(usual)
    recorder = LoadRecorder(model, "org/name", lambda *_: None)
    with recorder:
        pass
    assert any("not a folder" in limit for limit in recorder.facts()["limits"])


def test_files_that_the_index_does_not_name_are_not_the_checkpoint(checkpoint):
    """Mistral's consolidated.safetensors holds the same again, by other names."""
    folder, tensors = checkpoint
    save_file({"layers.0.wq": torch.zeros(2)}, folder / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(load(checkpoint, usual)["key"]) == sorted(tensors)


def test_what_was_taken_of_each_key_is_on_record(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "embed.weight":
                model.embed.weight.data[:6].copy_(tensor.narrow(0, 0, 6))
            elif name == "q":
                model.qkv.weight.data[:4, :2].copy_(tensor.narrow(1, 2, 2))
            elif name == "k":
                model.qkv.weight.data[4:8].copy_(tensor.float())
            elif name == "v":
                for row in range(4):
                    model.qkv.weight.data[8 + row].copy_(tensor[row])
            elif name == "norm.weight":
                model.norm.weight.data = tensor[:3]

    key = load(checkpoint, loader)["key"]
    assert (key["embed.weight"]["size"], key["embed.weight"]["taken"]) == (128, [(128, 0, 1, 0, 96)])
    assert key["q"]["taken"] == [(16, 0, 4, 8, 16)]
    assert key["k"]["taken"] == [(64, 0, 1, 0, 64)]
    assert key["v"]["taken"] == [(64, 0, 1, 0, 64)]
    assert key["norm.weight"]["taken"] == [(16, 0, 1, 0, 12)]
    assert key["d2t"]["taken"] == []


def test_a_part_of_a_computed_copy_counts_as_the_whole_that_was_copied(checkpoint):
    def loader(model, weights):
        for name, tensor in weights:
            if name == "q":
                model.qkv.weight.data[:2].copy_((tensor * 2)[:2])

    assert load(checkpoint, loader)["key"]["q"]["taken"] == [(64, 0, 1, 0, 64)]


def test_an_exception_inside_the_tracer_is_a_fault_and_the_load_goes_on(checkpoint, monkeypatch):
    folder, tensors = checkpoint
    model = Toy(usual)
    faults = []
    recorder = LoadRecorder(model, str(folder), lambda _, error: faults.append(str(error)))
    monkeypatch.setattr(recorder._lineage, "saw", lambda *_: 1 / 0)
    with torch.no_grad(), recorder:
        model.load_weights(tensors.items())
    assert "division by zero" in faults[0]
    assert torch.equal(model.norm.weight, tensors["norm.weight"])

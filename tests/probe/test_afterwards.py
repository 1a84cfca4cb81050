"""What changes a drafter after its load must show, and what its engine does by design is told apart."""

from __future__ import annotations

import pytest
import torch
from draftgate_probe.afterwards import Afterwards
from torch import nn


class Method:
    """What an engine gives each linear layer."""

    def process_weights_after_loading(self, layer):
        pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.fc = nn.Linear(48, 16)
        self.fc.quant_method = Method()
        self.norm = nn.LayerNorm(16, bias=False)
        self.hot = torch.arange(5)
        self.requires_grad_(requires_grad=False)


NAMES = ("embed.weight", "fc.weight", "norm.weight", "hot")


def after(before_ready=lambda model: None, serving=lambda model: None, lent=()):
    model = Model()
    watched = Afterwards(model, NAMES)
    before_ready(model)
    watched.ready()
    serving(model)
    rows = watched.rows(lent)
    assert sorted(rows) == sorted(NAMES)
    return {name: (row["after"], row["after_detail"]) for name, row in rows.items()}


def put(module, name, value):
    """Return a change that sets one tensor of a module, as engines do."""
    return lambda model: setattr(
        getattr(model, module), name, nn.Parameter(value(getattr(getattr(model, module), name)), requires_grad=False)
    )


def test_a_model_that_is_left_alone():
    assert set(after().values()) == {("same", "")}


def test_a_copy_of_the_same_values_elsewhere_is_no_change():
    assert set(after(serving=put("embed", "weight", torch.clone)).values()) == {("same", "")}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("embed.weight", lambda model: model.embed.weight.copy_(torch.randn(32, 16))),  # the target's, copied over it
        ("norm.weight", lambda model: model.norm.weight.mul_(1.001)),
        ("norm.weight", lambda model: setattr(model, "norm", nn.LayerNorm(16, bias=False).half())),
        ("fc.weight", lambda model: setattr(model, "fc", nn.Linear(48, 16))),
        ("fc.weight", lambda model: delattr(model, "fc")),
        ("hot", lambda model: model.hot.add_(1)),
    ],
)
def test_what_changes_while_serving_is_named(name, change):
    rows = after(serving=change)
    state, detail = rows.pop(name)
    assert state == "changed"
    assert detail.startswith("while serving: ")
    assert set(rows.values()) == {("same", "")}


def test_a_wrong_cast_of_a_layer_without_a_method():
    assert after(put("norm", "weight", torch.Tensor.half))["norm.weight"] == (
        "changed", "before the model was ready: float32 16 to float16 16",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (lambda weight: torch.empty(0), "float32 16x48 to float32 0"),
        (lambda weight: weight.half(), "float32 16x48 to float16 16x48"),
        (lambda weight: weight + 1, "float32 16x48 to float32 16x48 of other values"),
    ],
)
def test_what_a_layers_method_may_have_done_is_told_apart(value, step):
    assert after(put("fc", "weight", value))["fc.weight"] == ("repacked", f"Method: {step}")


def test_a_repacked_tensor_that_changes_again():
    rows = after(put("fc", "weight", lambda _: torch.empty(0)), put("fc", "weight", lambda _: torch.ones(16, 48)))
    assert rows["fc.weight"] == ("changed", "while serving: float32 0 to float32 16x48")


def test_a_tensor_that_became_the_targets_is_not_held_against_itself():
    rows = after(serving=lambda model: model.embed.weight.zero_(), lent={"embed.weight"})
    assert rows["embed.weight"] == ("the target's", "")


def test_elements_that_cannot_be_read_are_not_called_the_same():
    assert (
        after(serving=put("embed", "weight", lambda weight: weight.to("meta")))["embed.weight"][0] == "cannot be read"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int64])
def test_every_type_and_layout_is_compared_bit_for_bit(dtype):
    model = nn.Module()
    model.register_buffer("table", torch.zeros(6, 40).to(dtype).t())
    watched = Afterwards(model, ["table"])
    watched.ready()
    assert watched.rows(())["table"]["after"] == "same"
    model.table.copy_(torch.ones(40, 6).to(dtype))
    assert watched.rows(())["table"]["after"] == "changed"

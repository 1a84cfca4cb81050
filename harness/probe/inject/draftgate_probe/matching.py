"""Recognise things by what they are, not by their class: layers, the projection, shared memory, equal values."""

from __future__ import annotations

import collections
import functools
import inspect
import re
from typing import Any, cast

import torch

from .lineage import storage_id
from .loading import walk

ROWS = 64
"""Token rows of each layer's input that are kept for one step."""

COMPARED = 4
"""Token rows of each feature chunk that are looked for among them."""

CLOSE = 1e-2
"""Largest relative L2 distance at which a chunk that is not bit-equal still counts as a layer's input."""

_FC = re.compile(r"(?:^|\.)fc(?:\.\d+)?\.weight$")


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers of a model: its longest list of modules. Raises LookupError if it has none."""
    lists: list[Any] = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise LookupError(f"{type(model).__name__} has no ModuleList to find its decoder layers in")
    return list(max(lists, key=cast("Any", len)))


def hidden_size(model: Any, layers: list[Any]) -> int:
    """Return the width of a model's hidden state: the commonest, then longest, of its layers' norms.

    By the parameters' names, because a quantised mixture of experts has more vectors of scales than of norms.
    """
    vectors = [(name, p.shape[0]) for layer in layers for name, p in layer.named_parameters() if p.dim() == 1]
    norms = [length for name, length in vectors if "norm" in name.lower() or "ln" in name.lower()]
    lengths: dict[int, int] = collections.Counter(norms)
    if not lengths:
        raise LookupError(f"{type(model).__name__}: no layer norm to learn the hidden size from")
    return max(lengths, key=lambda length: (lengths[length], length))


def final_norms(model: Any, layers: list[Any], width: int) -> list[Any]:
    """Return the norms beside a model's decoder layers: modules with nothing but vectors of the hidden size."""
    last = layers[-1]
    for owner in model.modules():
        for child in owner.children():
            if isinstance(child, torch.nn.ModuleList) and any(layer is last for layer in child):
                beside = [(module, list(module.parameters())) for module in owner.children()]
                return [module for module, held in beside if held and all(tuple(p.shape) == (width,) for p in held)]
    return []


def find_projection(drafter: Any, load: dict[str, Any], width: int) -> tuple[str, Any, str, list[int]] | None:
    """Return name, module, how it was found and shape of the drafter's input projection, or None if it has none.

    By lineage: the module of the matrix that a checkpoint key named `fc` filled. Failing that (no such key, or it was
    dropped) by shape: a matrix outside every list of layers that takes a multiple, at least twice, of the target's
    hidden size.
    """
    modules = dict(drafter.named_modules())
    for row in load["parameters"]:
        if len(row["shape"]) == 2 and any(_FC.search(key) for key in row["keys"]):
            owner = row["name"].rpartition(".")[0]
            if owner in modules:
                return owner, modules[owner], "key", row["shape"]
    inside = {
        id(child)
        for module in drafter.modules()
        if isinstance(module, torch.nn.ModuleList)
        for layer in module
        for child in layer.modules()
    }
    for row in load["parameters"]:
        owner = row["name"].rpartition(".")[0]
        if len(row["shape"]) != 2 or owner not in modules or id(modules[owner]) in inside:
            continue
        if row["shape"][1] >= 2 * width and row["shape"][1] % width == 0:
            return owner, modules[owner], "shape", row["shape"]
    return None


def shared(target: Any, drafter: Any) -> list[list[str]]:
    """Return [drafter tensor, target tensor] for each drafter tensor that has the memory of one of the target's."""
    places: dict[Any, str] = {}
    for name, _, tensor in walk(target):
        if tensor.numel() and storage_id(tensor) is not None:
            places.setdefault((storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape)), name)
    pairs = []
    for name, _, tensor in walk(drafter):
        at = (storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and at in places:
            pairs.append([name, places[at]])
    return pairs


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


def stream(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], width: int) -> Any:
    """Return the residual stream in a layer's arguments: the hidden state, plus the residual where there is one.

    By the names of the layer's arguments (`hidden_states`, `residual`: every decoder layer of vLLM and SGLang), or by a
    residual that travels beside them (`travelling`); a layer that names them otherwise gives its first tensor of the
    hidden size. None where the hidden state is only this rank's part of a sum (SGLang leaves some sums to the next
    layer's fused kernel: `_sglang_needs_allreduce_fusion`, 0.5.1 to 0.5.20; `OwedOutput`, 0.5.23).
    """
    given = _signature(type(module).forward).bind(module, *args, **kwargs).arguments
    hidden, beside = given.get("hidden_states"), travelling(given.values())
    if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
        return None
    if beside is not None:
        return add(hidden, beside, width)
    parts = [value for value in (hidden, given.get("residual")) if torch.is_tensor(value)]
    return merge(parts or given.values(), width, limit=2 if parts else 1)


def travelling(values: Any) -> Any:
    """Return the residual stream object that one of these values carries, or None.

    SGLang 0.5.23, layers/layer_boundary/residual/stream.py: `forward_batch.residual_stream`. Its `residual` is the
    whole stream, unless `pending` is set: then the last output is still to be added.
    """
    found = (getattr(value, "residual_stream", None) for value in values if not torch.is_tensor(value))
    return next((value for value in found if value is not None), None)


def add(hidden: Any, beside: Any, width: int) -> Any:
    """Return hidden state plus travelling residual, as rows; None where the sum is not a plain one or not yet whole."""
    pending = beside.pending
    if not torch.is_tensor(hidden) or (pending is not None and not pending.update.is_plain_add):
        return None
    parts = [hidden] if pending is None or beside.residual is None else [hidden, beside.residual]
    return merge(parts, width)


def merge(values: Any, width: int, limit: int = 2) -> Any:
    """Return the sum of the first tensors (at most `limit`) of that width, as rows; None if there is none."""
    wide = [value for value in values if torch.is_tensor(value) and value.shape[-1:] == (width,)]
    parts = [value.reshape(-1, width)[:ROWS] for value in wide if value.is_floating_point()][:limit]
    if not parts:
        return None
    if len(parts) == 2 and parts[0].shape == parts[1].shape:
        return parts[0] + parts[1]
    return parts[0].clone()  # layers reuse these buffers in place


def compare(chunk: Any, recorded: Any) -> float:
    """Return how far a chunk's first rows are from the nearest recorded ones: 0.0 when bit-equal, else relative L2."""
    rows = chunk[:COMPARED]
    if rows.shape[-1] != recorded.shape[-1]:
        return float("inf")
    same = (rows[:, None] == recorded[None]).all(-1)
    if rows.dtype == recorded.dtype and bool(same.any(1).all()):
        return 0.0
    rows, recorded = rows.float(), recorded.float()
    nearest = torch.cdist(rows[None], recorded[None])[0].amin(1)
    worst = float((nearest / rows.norm(dim=-1).clamp_min(1e-20)).max())
    return max(worst, 1e-12)  # 0.0 is kept for bit-equal

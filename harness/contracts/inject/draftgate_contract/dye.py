"""The second witness of a load: every key is loaded as a constant of its own, and the model is read afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from draftgate_probe.loading import attributes, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_UNTOUCHED = -7777
"""What integer tensors are filled with beforehand; floating ones get NaN."""

MOST = 250
"""Constants up to here are exact in bfloat16."""


def paint(model: Any) -> None:
    """Fill every parameter and saved buffer with what no key holds."""
    with torch.no_grad():
        for _, kind, tensor in walk(model):
            if kind != "scratch" and tensor.dtype is not torch.bool:
                tensor.data.fill_(float("nan") if tensor.is_floating_point() else _UNTOUCHED)


def dyes(keys: list[str]) -> dict[str, int]:
    """Give each key its constant, from 1 up."""
    if len(keys) > MOST:
        raise ValueError(f"{len(keys)} keys are more than bfloat16 tells apart")
    return {key: number for number, key in enumerate(keys, start=1)}


def dyed(weights: Iterator[tuple[str, Any]], constants: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """Replace each tensor by its constant. Boolean tensors cannot hold one and stay as they are."""
    for key, tensor in weights:
        yield key, (tensor if tensor.dtype is torch.bool else torch.full_like(tensor, constants[key]))


def read(model: Any, constants: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return for every painted tensor which keys it holds, how much of them, and how much is still untouched.

    Of tensors that modules hold as plain attributes only one-dimensional integers are read, as they are and less their
    position: SGLang keeps `d2t` as `d2t + arange` (sglang/srt/models/llama_eagle3.py).
    """
    names = {number: key for key, number in constants.items()}
    found = {
        name: _held(tensor, names)
        for name, kind, tensor in walk(model)
        if kind != "scratch" and tensor.dtype is not torch.bool
    }
    for name, tensor in attributes(model):
        if name not in found and tensor.dim() == 1 and tensor.numel() and not tensor.is_floating_point():
            offsets = _held(tensor - torch.arange(len(tensor), device=tensor.device), names)
            plain = _held(tensor, names)
            found[name] = max(plain, offsets, key=lambda held: held["written"])
    return found


def _held(tensor: Any, names: Mapping[int, str]) -> dict[str, Any]:
    flat = tensor.detach().to(torch.float64).flatten()
    untouched = torch.isnan(flat) if tensor.is_floating_point() else flat == _UNTOUCHED
    values, counts = flat[~untouched].unique(return_counts=True)
    written = {names[int(v)]: int(n) for v, n in zip(values.tolist(), counts.tolist(), strict=True) if v in names}
    return {"keys": sorted(written), "written": sum(written.values()), "untouched": int(untouched.sum())}


def disagreements(traced: list[dict[str, Any]], seen: Mapping[str, dict[str, Any]], blind: set[str]) -> list[str]:
    """Return where the two witnesses contradict each other. `blind` are keys that have no dye."""
    wrong = []
    for row in traced:
        held = seen.get(row["name"])
        if row["kind"] == "scratch" or row["dtype"] == "bool" or blind & set(row["keys"]):
            continue
        if held is None:
            wrong.append(f"{row['name']}: followed, and not found in the dyed model")
            continue
        said = {"keys": row["keys"], "written": row["written"]}
        if row["kind"] != "attribute":
            said["untouched"] = row["elements"] - row["written"] - row["filled"]
        if any(held[what] != value for what, value in said.items()):
            wrong.append(f"{row['name']}: followed {said}, dyed {held}")
        elif not row["exact"]:
            wrong.append(f"{row['name']}: could not be followed exactly")
    return wrong

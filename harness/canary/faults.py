"""Mutated copies of a drafter, each with one fault that engines swallow without a word.

Every function reads a drafter's folder in any dialect and writes a new folder with `fault.json` beside the checkpoint,
which records the fault, its arguments and the seed. Tensor names are the checkpoint's own, as `tensor_names` lists
them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.canary.build import write_checkpoint
from harness.canary.spec import default_aux_layers
from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["FAULTS", "NOT_LOADED", "Fault", "apply", "tensor_names"]

NOT_LOADED = {"t2d": "both engines skip it by design: they map draft ids to target ids, never back"}
"""Tensors whose loss changes nothing, with the reason."""

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass
class _Checkpoint:
    """A checkpoint in memory, to be changed in place."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, NDArray[Any]]
    rng: np.random.Generator

    def tensor(self, name: str) -> NDArray[Any]:
        """Return a tensor. Raises `UsageError` naming those there are."""
        if name not in self.tensors:
            raise UsageError(f"{self.folder} has no tensor {name!r}; it has {', '.join(self.tensors)}")
        return self.tensors[name]

    def named(self, ending: str) -> str:
        """Return the one tensor name that ends in `ending`."""
        found = [name for name in self.tensors if name.endswith(ending)]
        if len(found) != 1:
            raise UsageError(f"{self.folder} has {len(found)} tensors that end in {ending!r}, not one")
        return found[0]

    @property
    def body(self) -> dict[str, Any]:
        """The Llama part of the config."""
        return self.config.get("transformer_layer_config", self.config)  # type: ignore[no-any-return]


def _random(like: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return normal values of standard deviation 0.02, the usual initialisation of an untrained matrix."""
    return (rng.standard_normal(like.shape, np.float32) * np.float32(0.02)).astype(like.dtype)


def _constructed(name: str, like: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return what an engine holds before loading: norms ones, integers zeros, matrices noise."""
    if not np.issubdtype(like.dtype, np.floating) and like.dtype.name != "bfloat16":
        return np.zeros_like(like)
    return np.ones_like(like) if "norm" in name else _random(like, rng)


def remove_tensor(checkpoint: _Checkpoint, tensor: str) -> None:
    """Leave the tensor out, so that the engine keeps what it constructed."""
    checkpoint.tensor(tensor)
    del checkpoint.tensors[tensor]


def zero_tensor(checkpoint: _Checkpoint, tensor: str) -> None:
    """Fill the tensor with zeros."""
    checkpoint.tensors[tensor] = np.zeros_like(checkpoint.tensor(tensor))


def default_tensor(checkpoint: _Checkpoint, tensor: str) -> None:
    """Fill the tensor with what an engine constructs: ones for norms, noise for matrices, zeros for `d2t`."""
    checkpoint.tensors[tensor] = _constructed(tensor, checkpoint.tensor(tensor), checkpoint.rng)


def swap_fc_chunks(checkpoint: _Checkpoint, first: str, second: str) -> None:
    """Swap two of the three column blocks of `fc`: the drafter reads auxiliary layers in another order."""
    name = checkpoint.named("fc.weight")
    chunks = np.split(checkpoint.tensor(name), 3, axis=1)
    i, j = int(first), int(second)
    chunks[i], chunks[j] = chunks[j], chunks[i]
    checkpoint.tensors[name] = np.concatenate(chunks, axis=1)


def drop_fc_chunk(checkpoint: _Checkpoint, chunk: str) -> None:
    """Zero one of the three column blocks of `fc`: one auxiliary layer is not read."""
    name = checkpoint.named("fc.weight")
    fc = checkpoint.tensor(name).copy()
    width = fc.shape[1] // 3
    fc[:, int(chunk) * width : (int(chunk) + 1) * width] = 0
    checkpoint.tensors[name] = fc


def shift_aux_ids(checkpoint: _Checkpoint, by: str = "1") -> None:
    """Add `by` to the layer ids in the config; where it has none, write the default ones so shifted."""
    config = checkpoint.config
    nested = config.setdefault("eagle_config", {}) if _IDS not in config else config
    oracle = json.loads((checkpoint.folder.parent / "oracle.json").read_text()) if _IDS not in nested else {}
    ids = nested.get(_IDS) or default_aux_layers(oracle["spec"]["layers"])
    nested[_IDS] = [layer + int(by) for layer in ids]


def zero_d2t(checkpoint: _Checkpoint) -> None:
    """Zero `d2t`: draft ids are taken for target ids."""
    zero_tensor(checkpoint, "d2t")


def rename_prefix(checkpoint: _Checkpoint, prefix: str = "decoder.") -> None:
    """Write the decoder layer under a prefix that no engine knows."""
    layer = checkpoint.named("hidden_norm.weight").removesuffix("hidden_norm.weight")
    checkpoint.tensors = {
        name.replace(layer, prefix, 1) if name.startswith(layer) else name: tensor
        for name, tensor in checkpoint.tensors.items()
    }


def dead(checkpoint: _Checkpoint) -> None:
    """Replace every weight by an untrained one of the same shape; the vocabulary map stays."""
    for name, tensor in checkpoint.tensors.items():
        if name not in {"d2t", "t2d"}:
            checkpoint.tensors[name] = _constructed(name, tensor, checkpoint.rng)


def slow(checkpoint: _Checkpoint) -> None:
    """Pad the MLP with neurons that do nothing until the drafter has twice the target's parameters.

    Drafts stay right, but K draft steps cost about 2K target steps and yield at most K + 1 tokens: speculation loses.
    """
    from safetensors import safe_open  # noqa: PLC0415 -- only this fault looks at the target

    with safe_open(checkpoint.folder.parent / "target" / "model.safetensors", framework="numpy") as target:
        size = sum(int(np.prod(target.get_slice(name).get_shape())) for name in target.keys())  # noqa: SIM118
    hidden = checkpoint.body["hidden_size"]
    width = max(checkpoint.body["intermediate_size"], -(-2 * size // (3 * hidden)))
    width = -(-width // 64) * 64
    for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        full = checkpoint.named(f"{name}.weight")
        tensor = checkpoint.tensor(full)
        shape = list(tensor.shape)
        shape[axis] = width
        padded = np.zeros(shape, tensor.dtype)
        padded[tuple(slice(length) for length in tensor.shape)] = tensor
        checkpoint.tensors[full] = padded
    checkpoint.body["intermediate_size"] = width


def wrong_vocabulary(checkpoint: _Checkpoint) -> None:
    """Map every draft id to the token of the next one, as a drafter cut for another vocabulary would."""
    if "d2t" in checkpoint.tensors:
        d2t = checkpoint.tensors["d2t"]
        ids = np.arange(len(d2t))
        checkpoint.tensors["d2t"] = np.roll(ids + d2t, -1) - ids
    else:
        name = checkpoint.named("lm_head.weight")
        checkpoint.tensors[name] = np.roll(checkpoint.tensor(name), 1, axis=0)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault by name. `arguments` are the names of what `change` takes after the checkpoint."""

    name: str
    change: Callable[..., None]
    arguments: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of what it does."""
        return (self.change.__doc__ or "").split("\n", 1)[0]


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("remove-tensor", remove_tensor, ("tensor",)),
        Fault("zero-tensor", zero_tensor, ("tensor",)),
        Fault("default-tensor", default_tensor, ("tensor",)),
        Fault("swap-fc-chunks", swap_fc_chunks, ("first", "second")),
        Fault("drop-fc-chunk", drop_fc_chunk, ("chunk",)),
        Fault("shift-aux-ids", shift_aux_ids, ("by",)),
        Fault("zero-d2t", zero_d2t),
        Fault("rename-prefix", rename_prefix, ("prefix",)),
        Fault("dead", dead),
        Fault("slow", slow),
        Fault("wrong-vocabulary", wrong_vocabulary),
    )
}
"""Every fault there is, by name."""


def tensor_names(drafter: Path) -> list[str]:
    """Return the names of a drafter's tensors, sorted."""
    from safetensors import safe_open  # noqa: PLC0415 -- keeps the import light

    with safe_open(drafter / "model.safetensors", framework="numpy") as file:
        return sorted(file.keys())


def apply(fault: str, drafter: Path, into: Path, *arguments: str, seed: int = 0) -> Path:
    """Write a copy of `drafter` with the fault into the new folder `into`, and return it.

    `drafter` is a canary's `drafter` folder: two faults look at what stands beside it. Raises `UsageError` for an
    unknown fault or tensor, for wrong arguments, and when `into` exists.
    """
    from safetensors.numpy import load_file  # noqa: PLC0415 -- keeps the import light

    if fault not in FAULTS:
        raise UsageError(f"no fault {fault!r}; there are {', '.join(FAULTS)}")
    if into.exists():
        raise UsageError(f"{into} exists already", remedy="remove it, or name another folder")
    checkpoint = _Checkpoint(
        drafter,
        json.loads((drafter / "config.json").read_text()),
        load_file(drafter / "model.safetensors"),
        np.random.default_rng(seed),
    )
    try:
        FAULTS[fault].change(checkpoint, *arguments)
    except (TypeError, ValueError, IndexError) as error:
        wanted = ", ".join(FAULTS[fault].arguments) or "none"
        raise UsageError(
            f"fault {fault}: arguments {list(arguments)} do not fit ({error}); it takes {wanted}"
        ) from error
    into.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_checkpoint(into, checkpoint.config, checkpoint.tensors)
        record = {"fault": fault, "arguments": list(arguments), "seed": seed, "drafter": str(drafter)}
        (into / "fault.json").write_text(json.dumps(record, indent=1))
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise
    return into

"""Reading a checkpoint folder: its config, the header of each safetensors file, and a digest of it all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError

__all__ = ["Checkpoint", "Tensor", "read"]

_INDEX = "model.safetensors.index.json"
_FULL_DIGEST_LIMIT = 4 << 30
"""Above this many bytes a digest of all data would cost minutes; headers, sizes and config stand in, and it says so."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, as its header declares it. `dtype` in safetensors' spelling (BF16, F32, I64, ...)."""

    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder. `digest` is `sha256:...` over all bytes, or `sha256-headers:...` for very large ones."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    size: int
    digest: str


def read(folder: Path) -> Checkpoint:
    """Read config and headers; tensor data is only hashed.

    Raises:
        CheckpointError: the folder, its config, its index or one of its files cannot be read.

    """
    config_path = folder / "config.json"
    config = _json_object(config_path)
    files = _files(folder)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _header(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is also in {tensors[name].file}", remedy="remove one of the two files"
                )
            tensors[name] = tensor
    size = sum(path.stat().st_size for path in files)
    return Checkpoint(folder, config, tensors, size, _digest(config_path, files, tensors, size))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file", remedy="give a folder with config.json beside the weights"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return data


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        mapping = _json_object(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise CheckpointError(f"{index}: has no weight_map")
        files = sorted({folder / str(name) for name in mapping.values()})
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise CheckpointError(f"{index}: names absent files: {', '.join(absent)}", remedy="complete the download")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: no *.safetensors files",
            remedy="convert pickled checkpoints (.bin, .pt) to safetensors; pickles are not opened, they run code",
        )
    return files


def _header(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- imports numpy

    try:
        with safe_open(path, framework="np") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 -- a handle, not a dict
            return {name: Tensor(tuple(part.get_shape()), part.get_dtype(), path.name) for name, part in slices.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file: {error}", remedy="copy or download it again"
        ) from error


def _digest(config: Path, files: list[Path], tensors: Mapping[str, Tensor], size: int) -> str:
    digest = hashlib.sha256(config.read_bytes())
    if size > _FULL_DIGEST_LIMIT:
        listing = [(name, tensor.shape, tensor.dtype, tensor.file) for name, tensor in sorted(tensors.items())]
        digest.update(json.dumps([listing, [(path.name, path.stat().st_size) for path in files]]).encode())
        return f"sha256-headers:{digest.hexdigest()}"
    for path in files:
        with path.open("rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"

"""Record one load of one model: what became of every checkpoint key, and what filled every tensor of the model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .lineage import Lineage, storage_id
from .regions import NOTHING, Share, View, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

_SAMPLES = 64
"""Elements of each tensor that are compared before and after the load, to notice writes on threads we do not see, and
again while serving, to notice what changed it since."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, the type that shows an element's bits, those of a NaN included."""

_INDEX = "model.safetensors.index.json"
"""The index whose files alone engines read where there is one: others, such as Mistral's consolidated.safetensors, hold
the same again (`filter_duplicate_safetensors_files` in vLLM 0.32.0 and SGLang 0.5.23, model_loader/weight_utils.py)."""


def headers(folder: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Return key -> header entry of a folder's safetensors files, and why that is incomplete ("" if it is not)."""
    path = Path(folder)
    if not path.is_dir():
        return {}, f"{folder} is not a folder here: the checkpoint's own list of keys is unknown"
    files, index = sorted(path.glob("*.safetensors")), path / _INDEX
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in named]
    if not files:
        return {}, f"{folder} holds no safetensors file: the checkpoint's own list of keys is unknown"
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        found.update(header)
    return found, ""


def walk(model: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and tensor of every parameter and buffer, under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, "parameter", parameter
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            scratch = name in module._non_persistent_buffers_set  # noqa: SLF001 -- torch has no public name for it
            yield (f"{path}.{name}" if path else name), ("scratch" if scratch else "buffer"), buffer


def attributes(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and tensor of the tensors that modules hold as plain attributes, one container deep."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") and name in ("_parameters", "_buffers", "_modules"):
                continue
            items = (
                value.items()
                if isinstance(value, dict)
                else enumerate(value)
                if isinstance(value, (list, tuple))
                else ()
            )
            prefix = f"{path}.{name}" if path else name
            if isinstance(value, torch.Tensor):
                yield prefix, value
            for key, item in items:
                if isinstance(item, torch.Tensor):
                    yield f"{prefix}[{key}]", item


def fingerprint(tensor: Any) -> list[int] | None:
    """Return the bits of a few elements of a tensor as integers, or None where that is not possible.

    The places are spread by the golden ratio, so that they keep to no row or column, whatever the shape.
    """
    try:
        if tensor.is_meta:
            return None
        bits, count = tensor.detach().view(_INTEGERS[tensor.element_size()]), tensor.numel()
        places = sorted({int(count * ((0.5 + i * 0.6180339887498949) % 1)) for i in range(_SAMPLES)}) if count else []
        index = torch.tensor(places, dtype=torch.int64, device=tensor.device)
        chosen = bits.reshape(-1)[index] if bits.is_contiguous() else bits[torch.unravel_index(index, bits.shape)]
        return [int(value) for value in chosen.tolist()]
    except (RuntimeError, NotImplementedError, KeyError):
        return None


class LoadRecorder:
    """Wraps one call of a loader. Use: `with recorder: loader.load_weights(...)`, then `recorder.facts()`."""

    def __init__(self, model: Any, folder: str, fault: Callable[[str, BaseException], None]) -> None:
        self._model = model
        self._lineage = Lineage(lambda error: fault("following a tensor", error))
        self._offered: dict[str, int] = {}
        self._headers, missing = headers(folder)
        self._limits = {missing} if missing else set()
        self._before: dict[int, Any] = {}
        self.tapped = False
        self.error = ""
        for _, _, tensor in walk(self._model):
            identity = storage_id(tensor)
            if identity is not None:
                # the reference keeps the identity from being given to another storage meanwhile
                self._before[identity] = (StorageWeakRef(tensor.untyped_storage()), fingerprint(tensor))

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        original = getattr(self._model, "load_weights", None)
        if original is not None:

            def load_weights(weights: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
                self.tapped = True
                return original(self.tap(weights), *args, **kwargs)

            self._model.load_weights = load_weights
        self._lineage.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._lineage.__exit__(kind, error, trace)
        vars(self._model).pop("load_weights", None)
        self.seconds = time.monotonic() - self._started
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"

    def tap(self, weights: Iterable[Any]) -> Iterator[Any]:
        """Pass an iterator of (key, tensor) on, and mark each tensor with its key."""
        for item in weights:
            key, tensor = item[0], item[1]
            self._offered[key] = self._offered.get(key, 0) + 1
            if isinstance(tensor, torch.Tensor):
                self._lineage.offer(key, tensor)
            else:
                self._limits.add(f"{key}: offered as {type(tensor).__name__}, which cannot be followed")
            yield item

    def facts(self) -> dict[str, Any]:
        """Return the load as the evidence file has it. Call it right after the load, before weights are repacked."""
        rows = [self._tensor(name, kind, tensor) for name, kind, tensor in walk(self._model)]
        registered = {storage_id(tensor) for _, _, tensor in walk(self._model)}
        for name, tensor in attributes(self._model):
            if storage_id(tensor) not in registered and self._lineage.keys(tensor):
                rows.append(self._tensor(name, "attribute", tensor))
        same: dict[Any, list[str]] = {}
        for row in rows:
            if row["at"] is not None:
                same.setdefault(row["at"], []).append(row["name"])
        landed: dict[str, list[str]] = {}
        shares: dict[str, Share] = {}
        for row in rows:
            gather(shares, row.pop("shares").items())
            at = row.pop("at")
            row["aliases"] = [name for name in same.get(at, []) if name != row["name"]]
            for key in row["keys"]:
                landed.setdefault(key, []).append(row["name"])
        replaced = set().union(*(row.pop("ever") for row in rows)) - set(landed) if rows else set()
        keys = [
            {
                "name": key,
                "in_files": key in self._headers,
                "shape": self._headers.get(key, {}).get("shape", []),
                "dtype": self._headers.get(key, {}).get("dtype", ""),
                "offered": self._offered.get(key, 0),
                "landed": landed.get(key, []),
                "read_as_values": key in self._lineage.read_as_values,
                "overwritten": key in replaced,
                "size": shares[key].size if key in shares else 0,
                "taken": shares[key].pieces if key in shares else [],
            }
            for key in sorted({*self._headers, *self._offered})
        ]
        if not self.tapped:
            self._limits.add("the engine's loader did not call the model's load_weights: no key could be followed")
        return {
            "tapped": self.tapped,
            "error": self.error,
            "seconds": self.seconds,
            "operations": self._lineage.operations,
            "parameters": rows,
            "keys": keys,
            "limits": sorted(self._limits | self._lineage.limits),
        }

    def _tensor(self, name: str, kind: str, tensor: Any) -> dict[str, Any]:
        view = View.of(tensor)
        identity = storage_id(tensor)
        regions = self._lineage.regions(tensor)
        count = regions.count(view) if regions else None
        writes, rewritten = regions.writes(view) if regions else (0, 0)
        before = self._before.get(identity) if identity is not None else None
        unseen = not writes and count is None and before is not None and fingerprint(tensor) != before[1]
        if identity is None:
            self._limits.add(f"{name}: a {type(tensor).__name__} has no storage to follow")
        return {
            "name": name,
            "kind": kind,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "elements": view.elements,
            "written": count.written if count else 0,
            "filled": count.filled if count else 0,
            "writes": writes,
            "rewritten": rewritten,
            "keys": sorted(count.keys if count else NOTHING),
            "exact": count.exact if count else identity is not None,
            "unseen_change": unseen,
            "at": None if identity is None or not view.elements else (identity, view.offset, view.size, view.stride),
            "ever": regions.ever if regions else set(),
            "shares": {key: self._lineage.share(tensor, key) for key in (count.keys if count else NOTHING)},
            "after": "not compared",
            "after_detail": "",
        }

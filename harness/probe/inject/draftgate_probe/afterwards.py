"""Hold what a model serves with against what was loaded into it: some elements of each tensor, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .loading import attributes, fingerprint, walk

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

UNKNOWN = {"after": "not compared", "after_detail": ""}
"""What is said of a tensor before the model has served."""


@dataclasses.dataclass(frozen=True)
class _Look:
    """One tensor at one time. `sample` is None where its elements cannot be read."""

    dtype: str
    shape: tuple[int, ...]
    sample: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"


class Afterwards:
    """Look at a model when its weights are loaded (made), `ready`, and serving (`rows`).

    Between the first two the engine lets each layer's own method repack its tensors (`process_weights_after_loading`
    of a layer's `quant_method`, unquantised ones included, or of the layer: vLLM 0.32.0, model_loader/utils.py;
    SGLang 0.5.23, model_loader/loader.py). Then nothing may change them any more.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self._model = model
        self._names = frozenset(names)
        self._loaded = self._look()
        self._ready = self._loaded
        self._methods: dict[str, str] = {}

    def ready(self) -> None:
        """Say that the engine's loader has returned the model."""
        self._ready = self._look()
        for path, module in self._model.named_modules(remove_duplicate=False):
            method = getattr(module, "quant_method", module)
            if hasattr(method, "process_weights_after_loading"):
                self._methods[path] = type(method).__qualname__

    def rows(self, lent: Container[str]) -> dict[str, dict[str, str]]:
        """Return for each tensor whether it still holds what was loaded; `lent` are those that are the target's."""
        now = self._look()
        return {name: UNKNOWN | self._row(name, now.get(name), lent) for name in sorted(self._names)}

    def _row(self, name: str, now: _Look | None, lent: Container[str]) -> dict[str, str]:
        loaded, ready = self._loaded.get(name), self._ready.get(name)
        if name in lent:
            return {"after": "the target's"}
        if loaded is None or any(look is not None and look.sample is None for look in (loaded, ready, now)):
            return {"after": "cannot be read"}
        if now != ready:
            return {"after": "changed", "after_detail": f"while serving: {_step(ready, now)}"}
        if ready == loaded:
            return {"after": "same"}
        method = self._methods.get(name.partition("[")[0].rpartition(".")[0])
        if method is None:
            return {"after": "changed", "after_detail": f"before the model was ready: {_step(loaded, ready)}"}
        return {"after": "repacked", "after_detail": f"{method}: {_step(loaded, ready)}"}

    def _look(self) -> dict[str, _Look]:
        found = {}
        for name, tensor in [*((name, tensor) for name, _, tensor in walk(self._model)), *attributes(self._model)]:
            if name in self._names:
                sample = fingerprint(tensor)
                dtype = str(tensor.dtype).removeprefix("torch.")
                found[name] = _Look(dtype, tuple(tensor.shape), None if sample is None else tuple(sample))
        return found


def _step(before: _Look | None, after: _Look | None) -> str:
    if before is None or after is None:
        return f"{before or 'nothing'} to {after or 'nothing'}"
    values = " of other values" if (before.dtype, before.shape) == (after.dtype, after.shape) else ""
    return f"{before} to {after}{values}"

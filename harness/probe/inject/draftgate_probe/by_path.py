"""Attach the probe to an SGLang that has no plugins, by the path alone: once it has imported its model loader.

Called by `by_path/sitecustomize.py`, which Python imports at start-up of each process that has that folder on its path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_WHEN = "sglang.srt.model_loader.loader"
"""Imported before the first model is loaded in every release; it imports the configs' module itself."""


def plugin_attaches() -> bool:
    """Say whether this SGLang has plugins and can see ours (then it is the plugin loader's word that counts)."""
    ours = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "draftgate_probe"]
    return bool(ours) and importlib.util.find_spec("sglang.srt.plugins") is not None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module, by the other finders, and attaches the probe when it has been executed."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of that module, with a loader that attaches; None for every other."""
        if fullname != _WHEN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if not plugin_attaches():
                from .attach_sglang import register  # noqa: PLC0415 -- imports torch

                register()

        loader.exec_module = exec_module
        return spec


def start(file: str) -> None:
    """Wait for SGLang's model loader in this process, and run the `sitecustomize` that the given one hides.

    Only one further along the path: two such files that each looked everywhere else would run each other for ever.
    """
    if os.environ.get("DRAFTGATE_PROBE_DIR"):
        sys.meta_path.insert(0, _AfterImport())
    here = Path(file).resolve().parent
    places = [number for number, entry in enumerate(sys.path) if Path(entry).resolve() == here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[places[-1] + 1 :]) if places else None
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

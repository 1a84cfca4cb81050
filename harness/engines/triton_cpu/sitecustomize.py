# noqa: INP001 -- no package: this folder goes on an engine's PYTHONPATH, and a walk over harness must not import it
"""Let vLLM's V2 model runner start on a CPU, with its Triton kernels run by Triton's interpreter.

Python imports the first `sitecustomize` on its path at start-up. Put this file's folder on PYTHONPATH of the engine,
and set

    DRAFTGATE_TRITON_CPU=1      this file does nothing of its own unless it is set
    TRITON_INTERPRET=1          Triton's interpreter, which needs no backend
    CUDA_VISIBLE_DEVICES=""     vLLM then accepts that no Triton driver is active

Why it is needed: where its version says "cpu", vLLM 0.32.0 (vllm/triton_utils/importing.py) takes Triton as usable
only if `triton.backends.backends` has an entry "cpu", and without Triton the V2 runner is not chosen and cannot be
imported. Triton 3.9.0 (from PyPI) has no such backend. The interpreter never asks for one: of the entry, only its name
and `driver.is_active()` are read. Nothing else of Triton or of vLLM is changed.

This file runs in the engine's environment, in every process that the engine starts: standard library only, nothing
imported from the harness. A `sitecustomize` further along the path is run as well, so that this one hides none.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

_MODULE = "triton.backends"


class _InterpreterDriver:
    """What stands in the place of a backend's driver: never active, so Triton's own choice of a driver is as before."""

    @staticmethod
    def is_active() -> bool:
        return False


class _Finder:
    """Finds `triton.backends` as everyone else does, and has the entry added once the module has run."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # once is enough, and the search below must not meet it
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_add(module: types.ModuleType) -> None:
            run(module)
            # A Triton that has a CPU backend of its own keeps it.
            module.backends.setdefault("cpu", types.SimpleNamespace(driver=_InterpreterDriver, compiler=None))

        spec.loader.exec_module = run_and_add  # type: ignore[method-assign]
        return spec


def _chain() -> None:
    """Run the `sitecustomize` that this one hides, if there is one further along the path.

    Only further along: two such files that each looked everywhere else would run each other for ever.
    """
    here = Path(__file__).resolve().parent
    places = [number for number, entry in enumerate(sys.path) if Path(entry).resolve() == here]
    if not places:
        return
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[places[-1] + 1 :])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("DRAFTGATE_TRITON_CPU") == "1":
    sys.meta_path.insert(0, _Finder())
_chain()

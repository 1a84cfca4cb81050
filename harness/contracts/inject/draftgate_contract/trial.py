"""One trial: build a release's model for one config and load one synthetic checkpoint into it, under two witnesses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from draftgate_probe.config import ConfigReads
from draftgate_probe.journal import Journal
from draftgate_probe.loading import LoadRecorder
from safetensors import safe_open

from . import dye, logs, stubs

if TYPE_CHECKING:
    from collections.abc import Iterator


class Engine(Protocol):
    """What differs between engines: how a drafter's model is made from its folder."""

    name: str

    def build(self, drafter: str, target: str) -> tuple[Any, list[Any]]:
        """Return the model, its weights not loaded, and the config objects that are the drafter's."""
        ...


class Refused(Exception):  # noqa: N818 -- an outcome: what was seen proves nothing
    """The trial says nothing about the release: a stand-in took part, or the witnesses disagree."""


def run(engine: Engine, folder: Path, target: Path, scratch: Path) -> dict[str, Any]:
    """Run one trial and return it as the result file has it.

    Keys that make the load raise are found by loading each key alone; the others are then loaded together.
    """
    keys = _keys(folder)
    result: dict[str, Any] = {"error": "", "class": "", "keys": {}, "parameters": [], "config_reads": {}, "said": []}
    reads = _Reads(engine.name, folder, scratch)
    try:
        with logs.heard() as said, reads:
            model, configs = _build(engine, folder, target)
            reads.claim(configs)
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 -- whatever a release raises is what we want to know
        message = logs.plain(error).replace(str(folder), "FOLDER")
        return {**result, "error": f"{type(error).__name__}: {message}", "config_reads": reads.found()}
    result |= {"class": f"{type(model).__module__}.{type(model).__qualname__}", "config_reads": reads.found()}
    result["said"] = sorted({logs.plain(line) for line in said if line.startswith(("WARNING", "ERROR"))})
    loaded = _load(engine, folder, target, keys)
    raising: dict[str, str] = {}
    if loaded["error"]:
        alone = {key: _attempt(_build(engine, folder, target)[0], _weights(folder, [key])) for key in keys}
        raising = {key: error for key, error in alone.items() if error}
        if not raising:
            return {**result, "error": f"together only: {loaded['error']}"}
        loaded = _load(engine, folder, target, [key for key in keys if key not in raising])
        if loaded["error"]:
            return {**result, "error": f"without the keys that raise alone: {loaded['error']}"}
    result["keys"] = {key: _fate(key, loaded, raising) for key in keys}
    result["parameters"] = loaded["parameters"]
    return result


def _keys(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def _fate(key: str, loaded: dict[str, Any], raising: dict[str, str]) -> dict[str, Any]:
    if key in raising:
        return {"fate": "raises", "into": [], "said": [logs.plain(raising[key])]}
    seen = loaded["keys"][key]
    fate = "used" if seen["landed"] else "read" if seen["read_as_values"] else "dropped"
    said = [logs.plain(line) for line in logs.naming(loaded["said"], key)]
    return {"fate": fate, "into": seen["landed"], "said": said}


def _build(engine: Engine, folder: Path, target: Path) -> tuple[Any, list[Any]]:
    """Build the model. Raises Refused if a stand-in took part."""
    stubs.touched.clear()
    model, configs = engine.build(str(folder), str(target))
    took_part = sorted(set(stubs.touched)) + stubs.in_tree(model)
    if took_part:
        raise Refused(f"stand-ins took part in building the model: {', '.join(took_part)}")
    return model, configs


def _load(engine: Engine, folder: Path, target: Path, keys: list[str]) -> dict[str, Any]:
    """Load `keys` twice, followed and dyed. Raises Refused if the two disagree or a stand-in took part."""
    model, _ = _build(engine, folder, target)
    faults: list[str] = []
    recorder = LoadRecorder(model, str(folder), lambda where, error: faults.append(f"{where}: {error!r}"))
    error = ""
    with logs.heard() as said:
        error = _attempt(model, _weights(folder, keys), recorder)
    facts = recorder.facts()
    constants = dye.dyes(keys)
    dyed, _ = _build(engine, folder, target)
    dye.paint(dyed)
    dyed_error = _attempt(dyed, dye.dyed(_weights(folder, keys), constants))
    if stubs.touched:
        raise Refused(f"stand-ins took part in loading: {', '.join(sorted(set(stubs.touched)))}")
    if faults or not facts["tapped"] or facts["limits"]:
        raise Refused(f"the load could not be followed: {'; '.join([*faults, *facts['limits']])}")
    if bool(error) != bool(dyed_error):
        raise Refused(f"followed, the load ended with {error or 'success'!r}; dyed, with {dyed_error or 'success'!r}")
    blind = {key for key, tensor in _weights(folder, keys) if tensor.dtype is torch.bool}
    wrong = [] if error else dye.disagreements(facts["parameters"], dye.read(dyed, constants), blind)
    if wrong:
        raise Refused(f"the two witnesses disagree: {'; '.join(wrong)}")
    wanted = ("name", "kind", "shape", "dtype", "elements", "written", "filled", "keys", "aliases")
    return {
        "error": error,
        "said": said,
        "keys": {row["name"]: row for row in facts["keys"]},
        "parameters": [{name: row[name] for name in wanted} for row in facts["parameters"] if row["kind"] != "scratch"],
    }


def _attempt(model: Any, weights: Iterator[tuple[str, Any]], recorder: LoadRecorder | None = None) -> str:
    """Load, and return what it raised ("" for nothing)."""
    try:
        with torch.no_grad():
            if recorder is None:
                model.load_weights(weights)
            else:
                with recorder:
                    model.load_weights(weights)
    except Exception as error:  # noqa: BLE001 -- whatever a release raises is what we want to know
        return f"{type(error).__name__}: {error}"
    return ""


def _weights(folder: Path, keys: list[str]) -> Iterator[tuple[str, Any]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for key in keys:
            yield key, file.get_tensor(key)


class _Reads:
    """Config reads while the model is built, through the probe's recorder."""

    def __init__(self, engine: str, drafter: Path, scratch: Path) -> None:
        self._folder = scratch / f"reads-{drafter.name}"
        self._folder.mkdir(parents=True)
        self._journal = Journal(self._folder, "", str(drafter), engine, "")

    def __enter__(self) -> Self:
        from transformers import PretrainedConfig  # noqa: PLC0415 -- the engine chooses when it is imported

        self._reads = ConfigReads(self._journal, PretrainedConfig)
        self._reads.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self._reads.remove()

    def claim(self, configs: list[Any]) -> None:
        """Say which config objects are the drafter's."""
        for config in configs:
            self._reads.claim(config)

    def found(self) -> dict[str, list[str]]:
        """Return config key -> the engine's modules that read it. Raises Refused if recording failed."""
        if self._journal.faults:
            raise Refused(f"recording config reads failed: {'; '.join(self._journal.faults)}")
        files = list(self._folder.glob("config-*.json"))
        rows = [row for file in files for row in json.loads(file.read_text())["reads"]]
        readers = {row["path"]: sorted(r for r in row["readers"] if not r.startswith("draftgate_")) for row in rows}
        return {path: names for path, names in sorted(readers.items()) if names}


def quiet() -> None:
    """Keep the engine's own chatter off this process's standard error; what matters is heard by `logs`."""
    logging.getLogger().addHandler(logging.NullHandler())

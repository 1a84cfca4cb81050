"""Start the probe in an engine's processes, and read back what it saw."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import EvidenceError
from harness.probe.facts import (
    Absent,
    After,
    Capture,
    ConfigKey,
    Evidence,
    Fate,
    Key,
    Load,
    Parameter,
    Place,
    Projection,
    Proposal,
    Serving,
    Stray,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "FEATURES",
    "FORMAT",
    "PLUGIN",
    "Absent",
    "Capture",
    "ConfigKey",
    "Evidence",
    "Fate",
    "Key",
    "Load",
    "Parameter",
    "Place",
    "Projection",
    "Proposal",
    "Serving",
    "Stray",
    "environment",
    "read",
    "read_loads",
]

FORMAT = 1
"""Version of the evidence files that this reader understands."""

PLUGIN = "draftgate_probe"
"""Entry-point name of the probe: to be added to VLLM_PLUGINS or SGLANG_PLUGINS where a user has set one."""

FEATURES = "features"
"""The folder, inside the evidence's, of the features that were kept."""

T = TypeVar("T", Load, Serving)

_INJECT = Path(__file__).parent / "inject"


def environment(folder: Path, target: str, drafter: str, *, engine: str, features: bool = False) -> dict[str, str]:
    """Return the variables to add to the engine's environment so that the probe writes into `folder`.

    `PYTHONPATH` is what to prepend, not the whole variable. `target` and `drafter` must be spelled as they are
    given to the engine. For SGLang the path has a second entry, which does nothing where plugins exist. With `features`
    the probe also keeps what reaches the drafter, for `harness.probe.features.read`. Creates the folder; raises
    EvidenceError if it already holds evidence of another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise EvidenceError(f"{folder} is not empty", remedy="give each server start an evidence folder of its own")
    return {
        "PYTHONPATH": os.pathsep.join([str(_INJECT), *([str(_INJECT / "by_path")] if engine == "sglang" else [])]),
        "DRAFTGATE_PROBE_DIR": str(folder.resolve()),
        "DRAFTGATE_PROBE_TARGET": target,
        "DRAFTGATE_PROBE_DRAFTER": drafter,
        **({"DRAFTGATE_PROBE_FEATURES": str(folder.resolve() / FEATURES)} if features else {}),
    }


def read(folder: Path) -> Evidence:
    """Return the evidence of one run, merged over ranks and processes.

    Raises EvidenceError, naming the file and the reason, if anything is missing, partial, damaged or contradicts
    itself, or if a hook of the probe could not be attached or failed: such evidence must not be read as "nothing
    seen". Every rank must have loaded the target, every rank of the last pipeline stage the drafter, and each of
    these must have seen the drafter at work to the end (`Serving.complete`), which takes `serving.ENOUGH` (3) real
    proposals after start-up: send a few short prompts first.
    """
    files = _files(folder)
    loads = _loads(folder, files)
    for load in loads:
        if load.error:
            raise EvidenceError(
                f"{folder}: loading the {load.role} raised in process {load.place.pid}: {load.error}",
                remedy="read_loads() returns what had been seen until then",
            )
    for role in ("target", "drafter"):
        _all_ranks(folder, role, [load.place for load in loads if load.role == role])
    found = [_parse(folder, record, _serving) for record in files if record["stage"] == "serving"]
    servings = tuple(sorted(found, key=lambda serving: _order(serving.place)))
    drafting = {load.place.pid for load in loads if load.role == "drafter"}
    for pid in sorted(drafting - {serving.place.pid for serving in servings}):
        raise EvidenceError(
            f"{folder}: process {pid} loaded the drafter, but there is no serving-{pid}.json",
            remedy="see the engine's log for 'draftgate probe'",
        )
    for serving in servings:
        if not serving.complete:
            raise EvidenceError(
                f"{folder}: rank {serving.place.rank} saw {len(serving.proposals)} real proposals of the drafter and "
                f"{serving.dummy_proposals} dummy ones, too few to finish",
                remedy="send prompts of which at least three drafting steps come, then read again; if requests were "
                "answered without drafting, the engine is not speculating",
            )
    config, absent = _config(folder, files)
    first = files[0]
    return Evidence(
        first["engine"],
        first["engine_version"],
        first.get("engine_path", ""),
        first["target"],
        first["drafter"],
        loads,
        servings,
        config,
        absent,
    )


def read_loads(folder: Path) -> tuple[Load, ...]:
    """Return only the loads, raising ones included: all there is from an engine that died while starting.

    Raises EvidenceError where the probe was not in any process or one of its hooks failed.
    """
    return _loads(folder, _files(folder))


def _files(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder, with no fault and of one run."""
    records: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*.json")):
        try:
            record = json.loads(file.read_text())
            version, _ = record["format"], record["stage"]
        except (ValueError, KeyError, TypeError) as error:
            raise EvidenceError(f"{file}: not an evidence file: {error}") from error
        if version != FORMAT:
            raise EvidenceError(f"{file}: format {version}, this reader knows {FORMAT}")
        records.append({**record, "name": file.name})
    if not records:
        raise EvidenceError(
            f"{folder}: no evidence at all: the engine loaded the probe in none of its processes",
            remedy=f"a VLLM_PLUGINS or SGLANG_PLUGINS that is set must name {PLUGIN}; PYTHONPATH must reach the engine",
        )
    for record in records:
        if record["stage"] == "process" and record["faults"]:
            raise EvidenceError(
                f"{folder}: the probe failed in process {record['pid']}: " + "; ".join(record["faults"]),
                remedy="the engine's internals differ from what the probe knows: extend harness/probe/inject",
            )
    for name in ("engine", "engine_version", "engine_path", "target", "drafter"):
        values = sorted({str(record.get(name)) for record in records})
        if len(values) > 1:
            raise EvidenceError(f"{folder}: files of different runs: {name} is {' and '.join(values)}")
    for pid in {record["pid"] for record in records} - {r["pid"] for r in records if r["stage"] == "process"}:
        raise EvidenceError(f"{folder}: process {pid} left evidence, but process-{pid}.json is missing")
    return records


def _loads(folder: Path, files: Iterable[dict[str, Any]]) -> tuple[Load, ...]:
    loads = [_parse(folder, record, _load) for record in files if record["stage"].startswith("load-")]
    if not loads:
        raise EvidenceError(f"{folder}: the probe was attached, but saw no model being loaded")
    return tuple(sorted(loads, key=lambda load: (_order(load.place), load.role)))


def _order(place: Place) -> tuple[int, int, int]:
    return (place.dp_rank, place.rank, place.pid)


def _all_ranks(folder: Path, role: str, places: list[Place]) -> None:
    if not places:
        raise EvidenceError(f"{folder}: no process loaded a {role}", remedy="was speculation on?")
    sizes = {place.world_size for place in places}
    if len(sizes) > 1:
        raise EvidenceError(
            f"{folder}: processes that loaded the {role} disagree about the world size: {sorted(sizes)}"
        )
    stages = places[0].pp_size
    seen = {place.rank for place in places}
    last_stage_only = role == "drafter" and stages > 1
    missing = set() if last_stage_only else set(range(places[0].world_size)) - seen
    if last_stage_only and len(seen) * stages < places[0].world_size:
        raise EvidenceError(f"{folder}: the {role} was loaded on ranks {sorted(seen)} only, of {places[0].world_size}")
    if missing:
        raise EvidenceError(f"{folder}: no evidence of the {role}'s load from ranks {sorted(missing)}")


def _place(record: dict[str, Any]) -> Place:
    return Place(pid=record["pid"], **record["place"])


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def _parse(folder: Path, record: dict[str, Any], make: Callable[[dict[str, Any]], T]) -> T:
    """Return the facts in one record; what it lacks or misstates is an EvidenceError that names its file."""
    try:
        return make(record)
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{folder / record['name']}: lacks or misstates a field: {error}") from error


def _load(record: dict[str, Any]) -> Load:
    parameters = tuple(Parameter(**_tuples(row)) for row in record["parameters"])
    for parameter in parameters:
        After(parameter.after)
        if not 0 <= parameter.written + parameter.filled <= parameter.elements:
            raise ValueError(
                f"{parameter.name}: {parameter.written} written and {parameter.filled} filled of {parameter.elements}"
            )
    return Load(
        role=record["role"],
        place=_place(record),
        path=record["path"],
        model_class=record["model_class"],
        loader=record["loader"],
        tapped=record["tapped"],
        error=record["error"],
        seconds=record["seconds"],
        parameters=parameters,
        keys=tuple(_key(row) for row in record["keys"]),
        limits=tuple(record["limits"]),
    )


def _key(row: dict[str, Any]) -> Key:
    taken = row["taken"]
    return Key(**{**_tuples(row), "taken": None if taken is None else tuple(tuple(map(int, piece)) for piece in taken)})


def _serving(record: dict[str, Any]) -> Serving:
    facts = {field.name: record[field.name] for field in dataclasses.fields(Serving)}
    proposals = tuple(
        Proposal(
            **{
                **_tuples(row),
                "captures": tuple(Capture(**_tuples(item)) for item in row["captures"]),
                "strays": tuple(
                    Stray(item["row"], tuple(item["own"]), tuple(map(tuple, item["held"]))) for item in row["strays"]
                ),
            }
        )
        for row in record["proposals"]
    )
    projection = record["projection"]
    return Serving(
        **{
            **_tuples(facts),
            "place": _place(record),
            "projection": projection and Projection(**projection),
            "proposals": proposals,
            "shared": tuple((mine, theirs) for mine, theirs in record["shared"]),
        }
    )


_RENAMED = (("torch_dtype", "dtype"), ("rope_scaling", "rope_parameters"), ("rope_theta", "rope_parameters.rope_theta"))
"""Keys that transformers (5.x, configuration_utils.py, modeling_rope_utils.py) stores under another name."""

_TRANSLATORS = ("vllm.transformers_utils.configs.", "sglang.srt.utils.hf_transformers.")
"""Modules that build a config object: vLLM's out of the file's dict, SGLang's (0.5.23, `HfModelConfigParser.parse`) by
going through all attributes. Their reading of a key that they hand on under the same name is copying: whether the
engine honours it shows in the reads of the attribute elsewhere."""


def _names(path: str, top: set[str]) -> set[str]:
    """Return the paths under which a key of the file can be read.

    A wrapper dict's keys (`transformer_layer_config.hidden_size` in a speculators config) become attributes of the
    config object itself, unless the file has a key of that name at the top as well.
    """
    names = {path}
    for _ in range(2):  # the path itself, then what is left of it without a wrapper
        for old, new in _RENAMED:
            if path == old or path.startswith(old + "."):
                names.add(new + path[len(old) :])
        path = path.partition(".")[2]
        if not path or path.partition(".")[0] in top:
            break
        names.add(path)
    return names


def _config(folder: Path, files: list[dict[str, Any]]) -> tuple[tuple[ConfigKey, ...], tuple[Absent, ...]]:
    records = [record for record in files if record["stage"] == "config"]
    leaves = next((record["file"] for record in records if record["file"]), None)
    if leaves is None:
        raise EvidenceError(f"{folder}: no process recorded its reads of the drafter's config")
    reads: dict[str, tuple[set[str], set[str]]] = {}
    missing: dict[str, set[str]] = {}
    for row in (row for record in records for row in record["reads"]):
        if row["there"]:
            readers, seen = reads.setdefault(row["path"], (set(), set()))
            readers.update(row["readers"])
            seen.update(row["seen"])
        else:
            missing.setdefault(row["path"], set()).update(row["readers"])
    attributes = {name for record in records for name in record["attributes"]}
    top = {leaf["path"].partition(".")[0] for leaf in leaves}
    keys = []
    for leaf in leaves:
        hits = [reads[name] for name in _names(leaf["path"], top) if name in reads]
        who = tuple(sorted(set().union(*(hit[0] for hit in hits))))
        what = tuple(sorted(set().union(*(hit[1] for hit in hits))))
        handed_on = leaf["path"].rpartition(".")[2] in attributes
        honoured = any(not (handed_on and reader.startswith(_TRANSLATORS)) for reader in who)
        keys.append(ConfigKey(leaf["path"], leaf["value"], honoured, who, what))
    absent = tuple(
        Absent(path, tuple(sorted(readers))) for path, readers in sorted(missing.items()) if path not in reads
    )
    return tuple(keys), absent

"""Derive a release's contract: run its own model class and `load_weights` on every trial, and accept what it proves.

A release whose own code cannot be run here, or that fails its native drafter, is unknown. It is never fine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness.probe
from harness.canary.faults import NOT_LOADED
from harness.contracts import trials
from harness.contracts.environment import Workplace, engine_release, make
from harness.contracts.model import Condition, ConfigKey, Contract, KeyRow, Parameter, load, render
from harness.contracts.trials import NATIVE, Sizes
from harness.errors import EvidenceError
from harness.files import exclusive, sha256_of, write_atomically
from harness.steps import StepError, run_step

__all__ = ["Unknown", "derive"]

_INJECT = Path(__file__).with_name("inject")
_PROBE = Path(harness.probe.__file__).with_name("inject")
_ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_TF": "0",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Nothing is downloaded and no GPU is looked for."""

_MODES = {"sglang": (False, True), "vllm": (False,)}
"""Whether a GPU is pretended while the release is imported. Modes that pass must agree."""

_FROM_TARGET = re.compile(r"(^|\.)embed_tokens\.weight$")
"""What a drafter need not bring: both engines give it the target's."""


class Unknown(EvidenceError):  # noqa: N818 -- it is a verdict on a release
    """A release's contract cannot be derived here. Says why, and nothing about the release."""

    def __init__(self, release: str, why: str) -> None:
        super().__init__(
            f"{release}: unknown: {why}",
            remedy="judge this release by serving a pair on it: draftgate run --suite weights",
        )


def derive(
    text: str,
    *,
    engines_root: Path,
    root: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Contract:
    """Return the contract of a release such as `sglang==0.5.12`.

    It is kept under `root` by the release's source files and the questions asked, and not derived twice.

    Raises Unknown if the release cannot be run or fails its native drafter, UsageError for a release that means
    nothing, EnvironmentFault if its files cannot be installed.
    """
    engine, release = engine_release(text)
    name = f"{engine}=={release.version}"
    place = make(engine, release, engines_root=engines_root, root=root, progress=progress)
    asked = trials.all_trials()
    kept = root / f"{engine}-{release.version}-{_digest(place, asked)}.json"
    with exclusive(place.folder / ".derive.lock") as held:
        if kept.is_file():
            return load(kept)
        accepted: dict[str, Contract] = {}
        why: dict[str, str] = {}
        for pretend in _MODES[engine]:
            mode = "as on a GPU" if pretend else "as on a CPU"
            progress(f"running the model class of {name}, imported {mode}")
            try:
                accepted[mode] = _compose(place, _ask(place, asked, pretend=pretend, held=held))
            except _Refused as refused:
                why[mode] = str(refused)
                progress(f"imported {mode} it proves nothing: {refused}")
        if not accepted:
            raise Unknown(name, "; ".join(f"imported {mode}: {reason}" for mode, reason in why.items()))
        first, *others = accepted.values()
        if any(not first.same_as(other) for other in others):
            raise Unknown(name, f"imported {' and '.join(accepted)} it behaves differently")
        contract = _with_modes(first, list(accepted))
        write_atomically(kept, render(contract))
        return contract


class _Refused(Exception):  # noqa: N818 -- an outcome of one mode: what was seen proves nothing
    """A run that must not become a contract, and why."""


def _with_modes(contract: Contract, modes: list[str]) -> Contract:
    return dataclasses.replace(contract, made_with={**contract.made_with, "imported": modes})


def _digest(place: Workplace, asked: Iterable[trials.Trial]) -> str:
    """Return what decides a derivation: the release's drafter files, the questions, and the code that asks them."""
    digest = hashlib.sha256(repr([(t.name, t.config, t.shapes) for t in asked]).encode())
    folder = place.site / place.engine
    sources = [*folder.rglob("models/*eagle*.py"), *_INJECT.rglob("*.py"), *_PROBE.rglob("*.py"), Path(__file__)]
    for file in sorted(sources):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _ask(place: Workplace, asked: list[trials.Trial], *, pretend: bool, held: int) -> dict[str, Any]:
    """Run every trial in the release's interpreter and return what it wrote. Raises _Refused."""
    with tempfile.TemporaryDirectory(prefix="draftgate-contract-") as scratch:
        folder = Path(scratch)
        ids = trials.ids_trials()
        request = {
            "engine": place.engine,
            "pretend_gpu": pretend,
            "scratch": str(folder / "scratch"),
            "target": str(trials.target_folder(folder, Sizes.target_hidden)),
            "trials": trials.write(asked, folder),
            "aux": trials.AUX_ASKED,
            "ids": dict(zip(ids, (row["folder"] for row in trials.write(ids.values(), folder / "ids")), strict=True)),
        }
        (folder / "request.json").write_text(json.dumps(request))
        files = [str(folder / "request.json"), str(folder / "result.json")]
        command = [str(place.python), "-m", "draftgate_contract", *files]
        path = ":".join(str(part) for part in (_INJECT, _PROBE, place.site))
        try:
            run_step(command, log=place.folder / "derive.log", held=held, env={**_ENV, "PYTHONPATH": path})
            result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        except (StepError, OSError, ValueError) as error:
            raise _Refused(f"its interpreter ended without a result: {error}") from error
    (place.folder / f"result-{'gpu' if pretend else 'cpu'}.json").write_text(json.dumps(result, indent=1))
    if result["refused"]:
        raise _Refused(result["refused"])
    return result


def _compose(place: Workplace, result: Mapping[str, Any]) -> Contract:
    """Return what one run proves. Raises _Refused if it proves nothing."""
    seen: dict[str, dict[str, Any]] = result["trials"]
    if result["version"].partition("+")[0] != place.release.version.partition("+")[0]:
        raise _Refused(f"the release that ran is {result['version']}, not {place.release.version}")
    _accept(seen["native"], seen["control"])
    places = {name: where for name in seen if (where := _where(name)) is not None and not seen[name]["error"]}
    base = _parameters(seen, "native", tuple(places), Sizes())
    keys = [row for name, (of, prefix) in places.items() for row in _rows(of, prefix, seen[name], base)]
    readers = _readers(seen)
    spelled = _spelled(place)
    return Contract(
        engine=place.engine,
        version=place.release.version,
        asked={"layer": tuple(sorted(trials.LAYER_NAMES)), "top": tuple(sorted(trials.TOP_NAMES))},
        model_class=seen["native"]["class"],
        architectures=result["architectures"],
        aux=result["aux"],
        dialects={name.partition(" ")[2]: _dialect(seen[name]) for name in trials.DIALECT_TRIALS},
        files={name: sha256_of(place.site / name) for name in result["files"]},
        made_with=result["made_with"],
        parameters=tuple(base.values()),
        keys=_merged(keys),
        conditions=tuple(_condition(condition, seen, base, keys) for condition in trials.CONDITIONS),
        config=tuple(
            ConfigKey(key, tuple(readers.get(key, ())), tuple(spelled[key.rpartition(".")[2]]))
            for key in trials.CONFIG_KEYS
        ),
    )


def _accept(native: Mapping[str, Any], control: Mapping[str, Any]) -> None:
    """Refuse a run whose native drafter does not load whole, or that does not miss what is missing."""
    if native["error"]:
        raise _Refused(f"its native drafter does not load: {native['error']}")
    lost = sorted(key for key, row in native["keys"].items() if row["fate"] != "used" and key not in NOT_LOADED)
    unfilled = _unfilled(native)
    # A bias that the class builds and no drafter has is the release's own; a weight that stays empty is a failed run.
    odd = sorted(name for name in unfilled if not _FROM_TARGET.search(name) and not name.endswith(".bias"))
    if lost or odd:
        raise _Refused(f"its native drafter loads in part: keys lost {lost}, parameters unfilled {odd}")
    if control["error"]:
        raise _Refused(f"a drafter without two norms does not load: {control['error']}")
    missed = {name.rpartition("midlayer.")[2].rpartition("layers.0.")[2] for name in _unfilled(control) - unfilled}
    if len(missed) != 2 or not any("hidden_norm" in name for name in missed):
        raise _Refused(f"without hidden_norm and norm it lacks {sorted(missed)}")


def _own(trial: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of what checkpoints fill: parameters, and whatever else a key landed in.

    Other buffers are constants, such as the scales of a quantised KV cache (vllm/model_executor/layers/attention).
    """
    return [row for row in trial["parameters"] if row["kind"] == "parameter" or row["keys"]]


def _unfilled(trial: Mapping[str, Any]) -> set[str]:
    return {row["name"] for row in _own(trial) if row["written"] + row["filled"] < row["elements"]}


def _where(trial: str) -> tuple[str, str] | None:
    """Return whether a trial's names are those of the layer or of the top, and under which prefix; None for others."""
    kind, _, prefix = trial.partition(" ")
    if kind not in ("layer", "top", "legacy") or "when " in prefix:
        return None
    return ("layer" if kind == "layer" else "top"), prefix


def _native(key: str) -> str:
    """Return the native name of a key, whatever prefix it was probed under."""
    for prefix in sorted((*trials.LAYER_PREFIXES, *trials.TOP_PREFIXES), key=len, reverse=True):
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name in trials.LAYER_NAMES and name != "unknown_tensor.weight":
            return f"layers.1.{name}" if prefix.endswith("layers.1.") else NATIVE + name
        if key.startswith(prefix) and name in trials.TOP_NAMES and prefix in trials.TOP_PREFIXES:
            return name
    return key


def _parameters(seen: Mapping[str, Any], owner: str, sources: Sequence[str], sizes: Sizes) -> dict[str, Parameter]:
    """Return the parameters of one trial, with the keys that fill them in it and in `sources`.

    Keys that fill a parameter together in one trial are one way to fill it; another trial may show another.
    """
    ways: dict[str, set[tuple[str, ...]]] = {}
    for trial in (owner, *sources):
        for row in _own(seen[trial]):
            if row["keys"] and row["written"] + row["filled"] >= row["elements"]:
                ways.setdefault(row["name"], set()).add(tuple(sorted(map(_native, row["keys"]))))
    formulas = sizes.formulas()
    return {
        row["name"]: Parameter(
            row["name"],
            tuple(formulas.get(size, str(size)) for size in row["shape"]),
            tuple(sorted(ways.get(row["name"], ()))),
            row["kind"] == "attribute",
        )
        for row in sorted(_own(seen[owner]), key=lambda row: row["name"])
    }


def _rows(of: str, prefix: str, trial: Mapping[str, Any], built: Mapping[str, Parameter]) -> list[KeyRow]:
    """Return one row for each key of a trial."""
    if trial["error"]:
        return []
    rows = []
    for key, seen in trial["keys"].items():
        usual = {name for name, parameter in built.items() if parameter.takes(_native(key))}
        name = key.removeprefix(prefix)
        into = {name: tuple(seen["into"])} if set(seen["into"]) != usual and seen["fate"] == "used" else {}
        rows.append(KeyRow(prefix, of, seen["fate"], (name,), bool(seen["said"]), into))
    return rows


def _merged(rows: Iterable[KeyRow]) -> tuple[KeyRow, ...]:
    """Join the rows of names that fare alike."""
    alike: dict[tuple[str, str, str, bool], list[KeyRow]] = {}
    for row in rows:
        alike.setdefault((row.of, row.prefix, row.fate, row.told), []).append(row)
    return tuple(
        KeyRow(
            prefix,
            of,
            fate,
            tuple(sorted(name for row in group for name in row.names)),
            told,
            {name: into for row in group for name, into in sorted(row.into.items())},
        )
        for (of, prefix, fate, told), group in sorted(alike.items())
    )


def _condition(
    condition: trials.Condition, seen: Mapping[str, Any], base: Mapping[str, Parameter], keys: list[KeyRow]
) -> Condition:
    """Return what a setting changes against the base trials."""
    name = f"when {condition.when}"
    trial = seen[name]
    if trial["error"]:
        return Condition(condition.when, error=trial["error"])
    extras = [extra for extra in (f"layers.0. {name}", f"legacy {name}") if extra in seen and not seen[extra]["error"]]
    built = _parameters(seen, name, extras, condition.sizes)
    # Where nothing new fills a parameter of unchanged shape it is as before.
    sizes = {what: size for size, what in condition.sizes.formulas().items()}
    sizes["vocab"] = condition.sizes.vocab  # it has no formula left where the draft vocabulary is as large
    built = {n: base[n] if n in base and _unchanged(base[n], p, sizes) else p for n, p in built.items()}
    before = {(row.of, row.prefix, row.names[0]): row for row in keys}
    changed = []
    for source in (name, *extras):
        for key, row in seen[source]["keys"].items():
            prefix = next((p for p in (NATIVE, "layers.0.", "layers.1.") if key.startswith(p)), "")
            of = "layer" if prefix else "top"
            one = _rows(of, prefix, {"error": "", "keys": {key: row}}, built)[0]
            old = before.get((of, prefix, one.names[0]))
            if old is None or (old.fate, old.told, old.into) != (one.fate, one.told, one.into):
                changed.append(one)
    adds = tuple(p for n, p in built.items() if base.get(n) != p)
    removes = tuple(sorted(set(base) - set(built)))
    return Condition(condition.when, "", adds, removes, _merged(changed))


def _unchanged(before: Parameter, now: Parameter, sizes: Mapping[str, int]) -> bool:
    """Say whether a parameter is of the shape that its formula gives under these sizes, and filled by nothing new."""
    shape = tuple(str(sizes.get(part, part)) for part in before.shape)
    return shape == tuple(str(sizes.get(part, part)) for part in now.shape) and set(now.ways) <= set(before.ways)


def _dialect(trial: Mapping[str, Any]) -> str:
    """Return how a trainer's config fares: the class it reaches, or what is raised."""
    return f"raises {trial['error']}" if trial["error"] else str(trial["class"])


def _readers(seen: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return config key -> the modules that read it. Those that read every key, the decoy too, copy or print it."""
    found: dict[str, set[str]] = {}
    for trial in seen.values():
        for key, modules in trial["config_reads"].items():
            found.setdefault(key, set()).update(modules)
    copiers = found.get(trials.DECOY, set())
    return {key: sorted(modules - copiers) for key, modules in found.items()}


def _spelled(place: Workplace) -> dict[str, list[str]]:
    """Return for the last part of each config key the release's source files that spell it as a word."""
    words = {key.rpartition(".")[2] for key in trials.CONFIG_KEYS}
    common = {"bias", "hidden_act", "rms_norm_eps", "rope_theta", "num_hidden_layers", "max_position_embeddings"}
    pattern = re.compile(rf"\b({'|'.join(sorted(words - common))})\b")
    found: dict[str, list[str]] = {word: [] for word in words}
    for file in sorted((place.site / place.engine).rglob("*.py")):
        name = str(file.relative_to(place.site))
        if "/test" in name or "multimodal_gen" in name:
            continue
        for word in set(pattern.findall(file.read_text(encoding="utf-8", errors="replace"))):
            found[word].append(name)
    # A word that half the engine spells says nothing about drafters.
    return {word: files if len(files) <= 12 else ["many files"] for word, files in found.items()}

"""A contract: what one engine release does with each name and config key of a drafter. Reading, writing, asking it."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.contracts.config import IDS
from harness.contracts.trials import (
    ABSENT,
    LAYER_NAMES,
    LAYER_PREFIXES,
    NATIVE,
    TOP_NAMES,
    TOP_PREFIXES,
    UNKNOWN,
    Sizes,
)
from harness.errors import EvidenceError

__all__ = [
    "DATA", "NAMELESS", "Condition", "ConfigKey", "Contract", "Fate", "KeyRow", "Parameter", "load", "numbered",
    "render", "shipped", "split", "versions",
]  # fmt: skip

DATA = Path(__file__).with_name("data")
"""The reviewed contracts, one file per release: `<engine>-<version>.json`. Made by `draftgate contract derive`."""

SCHEMA = 1

NAMELESS = "unknown_tensor.weight"
"""Stands for every name that was never heard of."""

_COUNTS = ("num_aux_hidden_states", f"eagle_config.{IDS}", IDS)
"""Where a config may say how many of the target's hidden states `fc` takes, in the order in which engines ask."""


@dataclasses.dataclass(frozen=True)
class KeyRow:
    """Names under one prefix that fare alike. `of`: whether they belong to the decoder `layer` or stand at the `top`.

    fate: `used`, `read` (its values are, and nothing keeps them), `dropped`, `raises`. told: whether anything that the
    release logged, warned or printed named the key. into: name -> parameters, where they are not those that the name
    fills under the native prefix.
    """

    prefix: str
    of: str
    fate: str
    names: tuple[str, ...]
    told: bool = False
    into: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that the class builds. `shape` in sizes of the config.

    ways: each of them some keys, natively named, that fill all of it together. `attribute`: no parameter but a tensor
    that loading its key leaves on the model, as SGLang does with `d2t`.
    """

    name: str
    shape: tuple[str, ...]
    ways: tuple[tuple[str, ...], ...]
    attribute: bool = False

    def takes(self, key: str) -> bool:
        """Say whether a key, natively named, fills any of it."""
        return any(key in way for way in self.ways)


@dataclasses.dataclass(frozen=True)
class Condition:
    """What a setting of the config changes. `error`: the release raises with it. Nothing at all: no effect here."""

    when: str
    error: str = ""
    adds: tuple[Parameter, ...] = ()
    removes: tuple[str, ...] = ()
    keys: tuple[KeyRow, ...] = ()


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """A config key: which modules read it while the drafter was built, and which source files spell its name."""

    key: str
    read_by: tuple[str, ...]
    spelled_in: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Fate:
    """What becomes of one key: `used`, `read`, `dropped`, `raises` or `unknown`, and what it fills."""

    fate: str
    into: tuple[str, ...] = ()
    told: bool = False
    canonical: str = ""


@dataclasses.dataclass(frozen=True)
class Contract:
    """One release's contract for EAGLE-3 drafters of the Llama kind.

    asked: the names that were tried, of the layer and at the top. architectures: architecture -> class, of every EAGLE
    class. dialects: how each trainer's config fares: the class it reaches, or what is raised. aux: what the target
    captures for given layer ids. files: source file -> sha256. made_with: versions and modes of the derivation.
    """

    engine: str
    version: str
    asked: Mapping[str, tuple[str, ...]]
    model_class: str
    architectures: Mapping[str, str]
    aux: Mapping[str, Any]
    dialects: Mapping[str, str]
    files: Mapping[str, str]
    made_with: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    keys: tuple[KeyRow, ...]
    conditions: tuple[Condition, ...]
    config: tuple[ConfigKey, ...]

    @property
    def release(self) -> str:
        """The release as people write it."""
        return f"{self.engine}=={self.version}"

    def same_as(self, other: Contract) -> bool:
        """Say whether two contracts state the same, however they were made."""
        return dataclasses.replace(self, made_with={}) == dataclasses.replace(other, made_with={})

    def holding(self, config: Mapping[str, Any]) -> list[Condition]:
        """Return the conditions that a drafter's config fulfils. Of counts of hidden states, see `hidden_states`."""
        return [
            condition
            for condition in self.conditions
            if condition.when.partition("=")[0] not in _COUNTS and _holds(condition.when, config)
        ]

    def hidden_states(self, config: Mapping[str, Any]) -> int:
        """Return how many of the target's hidden states `fc` takes in the drafter that the release builds.

        It counts by a place if it built another `fc` for four layers there: that was tried, one place at a time. The
        order is that of both engines (vLLM 0.25.1 to 0.32.0, SGLang 0.5.12 to 0.5.23: models/llama_eagle3.py). 0 where
        the value is none that it can count by.
        """
        for path in _COUNTS:
            value = _at(path, config)
            tried = next((each for each in self.conditions if each.when.partition("=")[0] == path), None)
            # One that does not count by it keeps the fc for three there: the condition adds it again.
            if tried is None or tried.adds or tried.error or value is ABSENT or value is None or value == []:
                continue
            if path.endswith(IDS):
                return len(value) if isinstance(value, list) else 0
            return value if isinstance(value, int) else 0
        return Sizes.aux

    def built(self, conditions: Sequence[Condition]) -> dict[str, Parameter]:
        """Return the parameters that the class builds under these conditions, by name."""
        found = {parameter.name: parameter for parameter in self.parameters}
        for condition in conditions:
            for name in condition.removes:
                found.pop(name, None)
            found |= {parameter.name: parameter for parameter in condition.adds}
        return found

    def fate(self, key: str, conditions: Sequence[Condition]) -> Fate:
        """Return what becomes of a key. `unknown` where the release was never asked anything like it."""
        kind, prefix, name = split(key)
        if not prefix.known:
            return self.elsewhere(key, conditions)
        found = self._listed(kind, prefix.listed, name, conditions)
        into = tuple(numbered(prefix.actual(parameter), key) for parameter in found.into)
        return dataclasses.replace(found, into=into, canonical=numbered(found.canonical, key))

    def elsewhere(self, key: str, conditions: Sequence[Condition]) -> Fate:
        """Return what becomes of a key that stands where the release has no place: as under prefixes nobody knows."""
        kind, _, name = split(key)
        fates = {self._listed(kind, stand_in, name, conditions) for stand_in in UNKNOWN[kind]}
        return fates.pop() if len(fates) == 1 else Fate("unknown")

    def _listed(self, kind: str, prefix: str, name: str, conditions: Sequence[Condition]) -> Fate:
        canonical = _canonical(kind, prefix, name)
        changed = [row for condition in reversed(conditions) for row in condition.keys if row.of == kind]
        if not any(row.prefix == prefix for row in changed):
            # Of later layers under `model.`, the first one tells whether that prefix makes a difference.
            later = prefix == "model.layers.1."
            tried, native = ("model.layers.0.", "layers.0.") if later else (prefix, NATIVE if kind == "layer" else "")
            if self._alike(kind, tried, native, canonical, conditions):
                stands_for = "layers.1." if later else native
                changed = [dataclasses.replace(row, prefix=prefix) for row in changed if row.prefix == stands_for]
        for row in [*changed, *self.keys]:
            if (row.of, row.prefix) == (kind, prefix) and name in row.names:
                into = row.into.get(name) or self._filled_by(canonical, conditions)
                return Fate(row.fate, into if row.fate == "used" else (), row.told, canonical)
        return Fate("unknown")

    def _alike(self, kind: str, prefix: str, native: str, canonical: str, conditions: Sequence[Condition]) -> bool:
        """Say whether names fare alike under two prefixes, as far as they fill the module that `canonical` fills.

        `model.` makes no difference to what is inside `model`, and much to an `lm_head` beside it.
        """
        module = self._module(canonical, conditions) or self._module(canonical, ())

        def fares(under: str) -> dict[str, str]:
            rows = [row for row in self.keys if (row.of, row.prefix) == (kind, under)]
            return {
                name: row.fate
                for row in rows
                for name in row.names
                if not module or self._module(_canonical(kind, native, name), ()) in ("", module)
            }

        return fares(prefix) == fares(native)

    def _module(self, canonical: str, conditions: Sequence[Condition]) -> str:
        """Return the outermost module that a key fills something of, "" if it fills nothing."""
        return next((name.partition(".")[0] for name in self._filled_by(canonical, conditions)), "")

    def _filled_by(self, canonical: str, conditions: Sequence[Condition]) -> tuple[str, ...]:
        return tuple(name for name, parameter in self.built(conditions).items() if parameter.takes(canonical))


@dataclasses.dataclass(frozen=True)
class _Prefix:
    """A prefix as a checkpoint has it, and the listed one that stands for it."""

    written: str
    listed: str
    known: bool

    def actual(self, parameter: str) -> str:
        """Return a parameter's name with the written layer number in place of the listed one."""
        listed, written = re.search(r"layers\.(\d+)\.", self.listed), re.search(r"layers\.(\d+)\.", self.written)
        if listed is None or written is None or listed[1] == written[1]:
            return parameter
        return parameter.replace(f"layers.{listed[1]}.", f"layers.{written[1]}.")


_NUMBERED = re.compile(r"\bfc_norm\.([3-9]|[1-9]\d+)\.")
"""Chunks beyond the three that were tried."""


def numbered(name: str, key: str) -> str:
    """Return the name of what `fc_norm.2` stands for where a key is of a later chunk."""
    later = _NUMBERED.search(key)
    return name.replace("fc_norm.2.", later[0]) if later else name


@functools.cache
def split(key: str) -> tuple[str, _Prefix, str]:
    """Split a key into kind (`layer` or `top`), prefix and known name; names never heard of become `NAMELESS`.

    `layers.N.` is listed as `layers.1.` from 1 on, and `fc_norm.N` as `fc_norm.2` from 2 on: later ones are alike.
    """
    key = _NUMBERED.sub("fc_norm.2.", key)
    for kind, names, prefixes in (("layer", LAYER_NAMES, LAYER_PREFIXES), ("top", TOP_NAMES, TOP_PREFIXES)):
        name = max((n for n in names if key == n or key.endswith(f".{n}")), key=len, default=None)
        if name is not None and name != NAMELESS:
            return kind, _prefix(key.removesuffix(name), prefixes), name
    match = re.match(r"(.*?(?:midlayer|layers\.\d+)\.)", key)
    if match:
        return "layer", _prefix(match[1], LAYER_PREFIXES), NAMELESS
    return "top", _prefix("model." if key.startswith("model.") else "", TOP_PREFIXES), NAMELESS


def _prefix(written: str, prefixes: Sequence[str]) -> _Prefix:
    listed = re.sub(r"layers\.([1-9]\d*)\.", "layers.1.", written)
    listed = written if written in prefixes else listed
    return _Prefix(written, listed, listed in prefixes)


def _canonical(kind: str, prefix: str, name: str) -> str:
    if kind == "top":
        return name
    return f"layers.1.{name}" if prefix.endswith("layers.1.") else NATIVE + name


def _at(path: str, config: Mapping[str, Any]) -> Any:
    """Return the value at a dotted path, `ABSENT` if there is none."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _holds(when: str, config: Mapping[str, Any]) -> bool:
    """Say whether a config fulfils a condition. Of sizes the one that was tried stands for all others."""
    path, _, text = when.partition("=")
    wanted: Any = json.loads(text)
    value = _at(path, config)
    if value is ABSENT or wanted == ABSENT:
        return value is ABSENT and bool(wanted == ABSENT)
    if isinstance(wanted, bool) or wanted is None:
        return value is wanted
    if value is None:
        return False
    if path == "draft_vocab_size":
        return bool(value == config.get("vocab_size"))
    if path == "num_hidden_layers":
        return isinstance(value, int) and value > 1
    return True


def versions(engine: str, data: Path = DATA) -> list[str]:
    """Return the releases of an engine that there are contracts of."""
    return sorted(file.stem.partition("-")[2] for file in data.glob(f"{engine}-*.json"))


@functools.cache
def shipped(engine: str, version: str, data: Path = DATA) -> Contract | None:
    """Return the shipped contract of a release; None where there is none: nothing is known of that release.

    Raises EvidenceError if the file cannot be read.
    """
    file = data / f"{engine}-{version}.json"
    return load(file) if file.is_file() else None


def load(file: Path) -> Contract:
    """Read a contract's file. Raises EvidenceError if it is none."""
    try:
        row = json.loads(file.read_text(encoding="utf-8"))
        if row.pop("schema") != SCHEMA:
            raise EvidenceError(f"{file}: is of another schema than {SCHEMA}", remedy="derive the contract again")
        return Contract(
            **{
                **row,
                "asked": {of: tuple(names) for of, names in row["asked"].items()},
                "parameters": tuple(_parameter(each) for each in row["parameters"]),
                "keys": _expanded([_key_row(each) for each in row["keys"]], row["asked"]),
                "conditions": tuple(_condition(each) for each in row["conditions"]),
                "config": tuple(_config_key(each) for each in row["config"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"{file}: is not a contract: {type(error).__name__}: {error}", remedy="derive the contract again"
        ) from error


def _config_key(row: Mapping[str, Any]) -> ConfigKey:
    return ConfigKey(row["key"], tuple(row["read_by"]), tuple(row["spelled_in"]))


def _parameter(row: Mapping[str, Any]) -> Parameter:
    ways = tuple(tuple(way) for way in row["ways"])
    return Parameter(row["name"], tuple(row["shape"]), ways, row.get("attribute", False))


def _key_row(row: Mapping[str, Any]) -> KeyRow:
    into = {name: tuple(names) for name, names in row.get("into", {}).items()}
    return KeyRow(row["prefix"], row["of"], row["fate"], tuple(row["names"]), row.get("told", False), into)


_REST = ("*",)
"""In a file: every name that was tried under the prefix and is in no other row of it."""


def _expanded(rows: list[KeyRow], asked: Mapping[str, Sequence[str]]) -> tuple[KeyRow, ...]:
    named: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        named.setdefault((row.of, row.prefix), set()).update(row.names)
    return tuple(
        dataclasses.replace(row, names=tuple(sorted(set(asked[row.of]) - named[row.of, row.prefix])))
        if row.names == _REST
        else row
        for row in rows
    )


def _contracted(rows: Sequence[KeyRow], asked: Mapping[str, Sequence[str]]) -> list[KeyRow]:
    """Return the rows with the longest of each prefix as `_REST`, where together they cover all that was tried."""
    groups: dict[tuple[str, str], list[KeyRow]] = {}
    for row in rows:
        groups.setdefault((row.of, row.prefix), []).append(row)
    longest = {
        key: max(group, key=lambda row: len(row.names))
        for key, group in groups.items()
        if {name for row in group for name in row.names} == set(asked[key[0]])
    }
    return [dataclasses.replace(r, names=_REST) if longest.get((r.of, r.prefix)) is r else r for r in rows]


def _condition(row: Mapping[str, Any]) -> Condition:
    return Condition(
        row["when"],
        row.get("error", ""),
        tuple(_parameter(each) for each in row.get("adds", ())),
        tuple(row.get("removes", ())),
        tuple(_key_row(each) for each in row.get("keys", ())),
    )


def render(contract: Contract) -> str:
    """Return a contract as its file has it: JSON, one row a line, so that one fact is one line of a diff."""
    short = dataclasses.replace(contract, keys=tuple(_contracted(contract.keys, contract.asked)))
    body = {"schema": SCHEMA, **dataclasses.asdict(short)}
    lines = []
    for key, value in body.items():
        if key == "conditions":
            text = "[\n" + ",\n".join(f"  {_condition_text(each)}" for each in value) + "\n ]"
        elif isinstance(value, (list, tuple)) and value:
            text = "[\n" + ",\n".join(f"  {_row(each)}" for each in value) + "\n ]"
        elif isinstance(value, Mapping) and value:
            text = "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(value.items())) + "\n }"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _row(row: Mapping[str, Any]) -> str:
    """Return a row without what is empty and may be left out."""
    optional = {"told", "into", "attribute"}
    return json.dumps({key: value for key, value in row.items() if value or key not in optional})


def _condition_text(row: Mapping[str, Any]) -> str:
    parts = [f'"when": {json.dumps(row["when"])}']
    parts += [f'"error": {json.dumps(row["error"])}'] if row["error"] else []
    parts += [f'"removes": {json.dumps(row["removes"])}'] if row["removes"] else []
    for key in ("adds", "keys"):
        if row[key]:
            parts.append(f'"{key}": [\n' + ",\n".join(f"    {_row(each)}" for each in row[key]) + "\n   ]")
    return "{" + ",\n   ".join(parts) + "}"

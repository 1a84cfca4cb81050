"""What headers and configs say of a drafter, and what engine releases do with its names. The only door to contracts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from harness.checkpoint import vocabulary
from harness.checkpoint.findings import Finding as Inspected
from harness.checkpoint.read import Checkpoint
from harness.checkpoint.recognise import Recognition, recognise
from harness.contracts import check, model
from harness.contracts.config import effective
from harness.contracts.environment import ENGINES
from harness.diagnose.acceptance import Acceptance, prints_like
from harness.diagnose.symptoms import Symptoms

__all__ = ["Release", "Static", "look"]

_SILENT = ("CHK002", "CHK003")
"""Codes of a release whose contract speaks of another class than the drafter's, or has keys that were not tried."""

_ROUTE = ("CHK101", "CHK102")
"""Codes of one in which the architecture reaches no drafter's class. A config that names none is no ground for that."""

_DEFAULTS = {"rope_theta": 10000, "rope_type": "default"}
"""What both engines take where nothing is given (SGLang 0.5.8 and vLLM 0.11.2, `models/llama.py`)."""


@dataclasses.dataclass(frozen=True)
class Release:
    """What one release does with the drafter.

    `lost` are keys that it drops, `missing` tensors that no key of the checkpoint is, under any name, and that it has
    a parameter for; `raises` keys at which its load raises; `unsure` rotary settings off their defaults of which its
    contract does not say whether they are read. `named`: whether the config names an architecture.
    """

    name: str
    lost: tuple[str, ...]
    missing: tuple[str, ...]
    raises: tuple[str, ...]
    unsure: tuple[str, ...]
    named: bool
    findings: tuple[check.Finding, ...]

    @property
    def lost_layer(self) -> tuple[str, ...]:
        """The lost keys that belong to the decoder layer."""
        return tuple(key for key in self.lost if model.split(key)[0] == "layer")

    @property
    def silence(self) -> check.Finding | None:
        """Why its contract does not speak of the drafter; None where it does."""
        return next(iter(self.of(*_SILENT) or (self.of(*_ROUTE) if self.named else ())), None)

    def of(self, *codes: str) -> tuple[check.Finding, ...]:
        """Return the findings with one of these codes."""
        return tuple(finding for finding in self.findings if finding.code in codes)


@dataclasses.dataclass(frozen=True)
class Static:
    """A drafter, what was recognised, and the releases that may serve it.

    `exact`: `releases` is the one that serves. `between`: the one that serves lies between some of them, so where they
    agree it does as they do, most likely. Otherwise they are all that may be it, but for `silent`: releases whose
    contract does not speak of this drafter, since it reaches another class, or none, or has keys that were not tried.
    """

    drafter: Checkpoint
    target: Checkpoint | None
    about: Recognition
    inspected: tuple[Inspected, ...]
    releases: tuple[Release, ...]
    silent: tuple[Release, ...]
    exact: bool
    between: bool

    def every(self, releases: Collection[object]) -> bool:
        """Whether these are all releases that may serve: then what holds of them holds of the one that does."""
        return len(releases) == len(self.releases) and not self.silent

    @property
    def is_eagle3(self) -> bool:
        """Whether it reads auxiliary hidden states."""
        return self.about.method in ("eagle3", "p-eagle")

    @property
    def fc(self) -> tuple[int, ...] | None:
        """The shape of `fc.weight`, [hidden, n_aux x target hidden]."""
        tensor = next((t for name, t in self.drafter.tensors.items() if model.split(name)[2] == "fc.weight"), None)
        return tuple(tensor.shape) if tensor is not None and len(tensor.shape) == 2 else None


def look(drafter: Checkpoint, target: Checkpoint | None, symptoms: Symptoms, acceptance: Acceptance) -> Static:
    """Say what can be said without starting anything. Raises CheckpointError if a tensor cannot be read."""
    about, findings = recognise(drafter)
    _, more = vocabulary.judge(drafter, about)
    contracts, exact, between = _releases(symptoms, acceptance.counts_root)
    if about.method not in ("eagle3", "p-eagle"):
        contracts, exact, between = (), False, False
    other = check.other_embedding(drafter, target, contracts)
    asked = [_ask(drafter, target, contract, other) for contract in contracts]
    speaking = tuple(release for release in asked if release.silence is None)
    silent = tuple(release for release in asked if release.silence is not None)
    every = (*findings, *more)
    return Static(drafter, target, about, every, speaking, silent, exact=exact, between=between and not silent)


def _ask(
    drafter: Checkpoint, target: Checkpoint | None, contract: model.Contract, other_embedding: bool | None
) -> Release:
    report = check.check(drafter, target, contract, other_embedding=other_embedding)
    by_code = {code: [name for f in report.findings if f.code == code for name in f.names] for code in check.CODES}
    have = {model.split(key)[2] for key in drafter.tensors}
    built = contract.built(contract.holding(effective(drafter.config)))
    missing: set[str] = set()
    for name in by_code["CHK301"]:
        ways = built[name].ways if name in built else ()
        lacking = [[part for part in way if model.split(part)[2] not in have] for way in ways]
        fewest = min(lacking, key=len) if lacking else [name]
        missing.update(fewest)
    return Release(
        contract.release,
        tuple(by_code["CHK201"] + by_code["CHK202"]),
        tuple(sorted(missing)),
        tuple(by_code["CHK203"]),
        _unsure(effective(drafter.config), contract),
        bool(drafter.config.get("architectures")),
        report.findings,
    )


def _unsure(config: Mapping[str, Any], contract: model.Contract) -> tuple[str, ...]:
    """Return the rotary settings off their defaults that the release's contract does not show its model read.

    transformers 5 writes `rope_parameters` for `rope_theta` and `rope_scaling`. That these are not read either shows
    only that the release takes them in another way.
    """
    read = {row.key for row in contract.config if any(".models." in module for module in row.read_by)}
    top = {key: config.get(key) for key in ("rope_theta", "rope_scaling")}
    parameters = config.get("rope_parameters")
    inner = _off_default(parameters if isinstance(parameters, dict) else {})
    # What stands at the top as well is read there.
    again = "rope_theta" in read and all(
        value == top["rope_theta"] if key == "rope_theta" else top["rope_scaling"] for key, value in inner.items()
    )
    return (
        *(key for key in _off_default(top) if key not in read),
        *(["rope_parameters"] if inner and not again else []),
    )


def _off_default(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None and value != _DEFAULTS.get(key)}


def _releases(symptoms: Symptoms, counts_root: bool | None) -> tuple[tuple[model.Contract, ...], bool, bool]:
    """Return the contracts that speak of the server, whether it is the very release, or lies between them.

    Where the release is not known, those that print an accept rate of the kind that was seen: one that counts the root
    only some SGLang releases print, one after the other.
    """
    if symptoms.engine is not None and symptoms.version is not None:
        engine, text = symptoms.engine.value, symptoms.version.value
        if contract := model.shipped(engine, text):
            return (contract,), True, False
        found = _neighbours(engine, text)
        return found, False, bool(found)
    engines = [symptoms.engine.value] if symptoms.engine else list(ENGINES)
    known = [contract for engine in engines for contract in _shipped(engine)]
    if counts_root is not None:
        alike = [each for each in known if prints_like(each.engine, each.version, counts_root=counts_root)]
        return tuple(alike), False, counts_root and bool(alike)
    return tuple(known), False, False


def _shipped(engine: str) -> list[model.Contract]:
    """Return an engine's contracts, the oldest first."""
    found = [model.shipped(engine, version) for version in sorted(model.versions(engine), key=Version)]
    return [contract for contract in found if contract is not None]


def _neighbours(engine: str, text: str) -> tuple[model.Contract, ...]:
    """Return the contracts next below and next above a version; nothing unless there are both."""
    try:
        version = Version(text)
    except InvalidVersion:
        return ()
    below = [each for each in _shipped(engine) if Version(each.version) < version]
    above = [each for each in _shipped(engine) if Version(each.version) > version]
    return (below[-1], above[0]) if below and above else ()

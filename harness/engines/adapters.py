"""The engines that can be run: an adapter each, and the distributions that hold the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.engines import sglang, vllm
from harness.engines.base import Adapter, EngineIdentity, identify
from harness.engines.releases import EngineRelease
from harness.errors import EnvironmentFault, UsageError

__all__ = ["ADAPTERS", "engine_of", "first_engine", "identify_engine"]

ADAPTERS: Mapping[str, tuple[Adapter, tuple[str, ...]]] = {
    "vllm": (vllm.VllmAdapter(), vllm.DISTRIBUTIONS),
    "sglang": (sglang.SglangAdapter(), sglang.DISTRIBUTIONS),
}
"""By engine: its adapter, and its distributions, the most specific first."""


def engine_of(release: EngineRelease) -> str:
    """Return which engine a release is of. Raises UsageError if it is none, or does not say."""
    if not release.distribution:
        raise UsageError(
            f"{release.git} does not say which engine it is of",
            remedy=f"write NAME @ {release.git}, with the name of its distribution, such as vllm",
        )
    for name, (_, distributions) in ADAPTERS.items():
        if release.distribution in distributions:
            return name
    known = ", ".join(each for _, distributions in ADAPTERS.values() for each in distributions)
    raise UsageError(f"{release.requirement}: {release.distribution} is no engine", remedy=f"one of: {known}")


def identify_engine(name: str, python: Path) -> EngineIdentity:
    """Return the engine `name` that `python` has. Raises EnvironmentFault if it has none or cannot be run."""
    return identify(name, ADAPTERS[name][1], python)


def first_engine(names: Iterable[str], pythons: Iterable[Path]) -> EngineIdentity:
    """Return the first of the engines that one of `pythons` has, each Python asked for all of them in turn.

    Raises EnvironmentFault, naming what each lacks, if there is none.
    """
    wanted, faults = tuple(names), []
    for python in pythons:
        for name in wanted:
            try:
                return identify_engine(name, python)
            except EnvironmentFault as fault:
                faults.append(fault)
    raise EnvironmentFault("; ".join(fault.message for fault in faults), remedy=faults[0].remedy)

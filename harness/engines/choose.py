"""Which engine to run, from what a person named: releases to install, Pythons that have one, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.engines.adapters import engine_of, first_engine, identify_engine
from harness.engines.base import EngineIdentity
from harness.engines.environment import ensure
from harness.engines.releases import EngineRelease, tested_release
from harness.errors import EnvironmentFault, UsageError

__all__ = ["choose"]


def choose(
    name: str,
    *,
    releases: Sequence[EngineRelease],
    pythons: Sequence[Path],
    device: str,
    root: Path,
    progress: Callable[[str], None],
) -> EngineIdentity:
    """Return the engine to run.

    That of the release given for it; else of the first Python given that has it; else of this very Python, if it does;
    else of the release that this version was tested with, in an environment made for it under `root`.

    Raises:
        HarnessError: the environment cannot be made, none of the Pythons given has the engine, or two releases of one
            engine are given.

    """
    given = [release for release in releases if engine_of(release) == name]
    if len(given) > 1:
        both = " and ".join(release.requirement for release in given)
        raise UsageError(f"--engine-env: {both} are both {name}", remedy="give one release of an engine")
    if not given and pythons:
        # not resolved: a virtual environment's Python is a link
        return first_engine([name], [python.absolute() for python in pythons])
    if not given:
        try:
            return identify_engine(name, Path(sys.executable))
        except EnvironmentFault:
            given = [tested_release(name, device)]
            progress(f"no --engine-env for {name}: {given[0].requirement}, which this version was tested with")
    return identify_engine(name, ensure(given[0], root, progress=progress).python)

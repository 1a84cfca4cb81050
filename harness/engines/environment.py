"""Isolated environments, one per engine release: how one is made, and how it is known to be whole.

A virtual environment cannot be moved once it is made, so it is made where it will stay. What marks it as whole is a
stamp that is written, atomically, as the last step. A folder without one is half made: it is removed and made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uv

from harness.engines.releases import EngineRelease, Recipe, canonical, recipe_for
from harness.errors import EnvironmentFault, UsageError
from harness.files import exclusive, sha256_of, write_atomically
from harness.steps import StepError, run_step

__all__ = ["STAMP", "EngineEnvironment", "InstallError", "ensure", "installed_packages"]

STAMP = "draftgate-env.json"
_LOG = "draftgate-install.log"
_SCHEMA = 1
_DESCRIBE = (
    "import json, platform, sys, sysconfig; "
    "print(json.dumps({'version': platform.python_version(), 'short': '%d.%d' % sys.version_info[:2],"
    " 'implementation': sys.implementation.name, 'platform': sysconfig.get_platform()}))"
)


class InstallError(EnvironmentFault):
    """A step of making the environment failed. `requirement` says for what, `step` how."""

    def __init__(self, requirement: str, step: StepError, *, remedy: str) -> None:
        super().__init__(f"could not install {requirement}: {step.message}", remedy=remedy)
        self.requirement = requirement
        self.step = step


@dataclasses.dataclass(frozen=True)
class EngineEnvironment:
    """A whole environment of one engine release.

    `python` starts the engine, `packages` maps every installed distribution (canonical name) to its version.
    """

    python: Path
    release: EngineRelease
    packages: dict[str, str]
    folder: Path
    site_packages: Path


def ensure(
    release: EngineRelease,
    root: Path,
    *,
    python: str | Path = sys.executable,
    recipe: Recipe | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> EngineEnvironment:
    """Return the environment of `release` under `root`, making it first if there is none.

    The folder is named `<distribution>-<version>-<8 digits of a hash>`; the hash covers the recipe, the wheel's
    content and the interpreter. `recipe` is the row of releases.toml unless given. Processes that ask for the same
    environment wait for the first of them. `progress` is told each step in one line.

    Raises InstallError if a requirement cannot be installed, EnvironmentFault if an existing environment is not what
    its stamp says, UsageError if `python` cannot be run.
    """
    recipe = recipe_for(release) if recipe is None else recipe
    interpreter = _describe(python)
    plan = _plan(release, recipe, interpreter)
    folder = root.resolve() / f"{release.distribution}-{release.version}-{_digest(plan)[:8]}"
    environment = EngineEnvironment(
        python=folder / "bin" / "python",
        release=release,
        packages={},
        folder=folder,
        site_packages=folder / "lib" / f"python{interpreter['short']}" / "site-packages",
    )
    with exclusive(
        folder.with_name(f".{folder.name}.lock"),
        waiting=lambda: progress(f"waiting for another process that is making {folder.name}"),
    ) as held:
        if (stamp := _read_stamp(folder)) is None or stamp["plan"] != plan or not environment.python.exists():
            if folder.exists():
                progress(f"removing {folder.name}, which is half made or can no longer be used")
                shutil.rmtree(folder)
            _make(environment, recipe, python, progress, held)
            packages = installed_packages(environment.site_packages)
            _check(environment, recipe, packages)
            write_atomically(
                folder / STAMP,
                json.dumps({"schema": _SCHEMA, "plan": plan, "packages": packages}, indent=1, sort_keys=True) + "\n",
            )
            return dataclasses.replace(environment, packages=packages)
    packages = installed_packages(environment.site_packages)
    if changed := sorted(set(packages.items()) ^ set(stamp["packages"].items())):
        names = ", ".join(sorted({name for name, _ in changed}))
        raise EnvironmentFault(
            f"the environment {folder} was altered after it was made: {names}",
            remedy="remove the folder, and it is made again; install nothing into it",
        )
    return dataclasses.replace(environment, packages=packages)


def installed_packages(site_packages: Path) -> dict[str, str]:
    """Return every distribution under `site_packages` (canonical name) with its version, sorted by name."""
    found = importlib.metadata.distributions(path=[str(site_packages)])
    return dict(sorted((canonical(each.metadata["Name"]), each.version) for each in found))


def _describe(python: str | Path) -> dict[str, str]:
    try:
        # -I: neither the caller's PYTHONPATH nor the working directory may answer for the interpreter.
        output = subprocess.run([str(python), "-I", "-c", _DESCRIBE], check=True, capture_output=True, text=True).stdout
        described: dict[str, str] = json.loads(output)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{python} cannot be used to make an environment: {error}", remedy="name a Python interpreter that runs"
        ) from error
    return described


def _plan(release: EngineRelease, recipe: Recipe, interpreter: dict[str, str]) -> dict[str, Any]:
    """Everything that decides what the environment will hold. Two plans that differ are two folders."""
    wheel = Path(release.wheel)
    return {
        "distribution": release.distribution,
        "version": release.version,
        "wheel": f"sha256:{sha256_of(wheel)}" if release.wheel and wheel.is_file() else release.wheel,
        "torch": recipe.torch,
        "overrides": list(recipe.overrides),
        "excludes": list(recipe.excludes),
        "interpreter": interpreter,
    }


def _digest(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([_SCHEMA, plan], sort_keys=True).encode()).hexdigest()


def _read_stamp(folder: Path) -> dict[str, Any] | None:
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return stamp if isinstance(stamp, dict) and stamp.get("schema") == _SCHEMA else None


def _make(
    environment: EngineEnvironment, recipe: Recipe, python: str | Path, progress: Callable[[str], None], held: int
) -> None:
    folder, release = environment.folder, environment.release
    progress(f"making the virtual environment {folder.name}")
    folder.mkdir()
    _run(environment, "the virtual environment", [str(python), "-m", "venv", str(folder)], recipe, held)
    if recipe.torch:
        torch = f"torch=={recipe.torch}"
        progress(f"installing {torch} with pip")
        _run(environment, torch, [str(environment.python), "-m", "pip", "install", torch], recipe, held)
    # --compile-bytecode covers all of site-packages. Importing is most of an engine's start-up: compile once, here.
    command = [uv.find_uv_bin(), "pip", "install", "--python", str(environment.python), "--compile-bytecode"]
    for flag, lines in (("--override", recipe.overrides), ("--excludes", recipe.excludes)):
        if lines:
            listing = folder / f"draftgate{flag[1:]}.txt"
            listing.write_text("\n".join(lines) + "\n", encoding="utf-8")
            command += [flag, str(listing)]
    progress(f"installing {release.requirement} and what it needs with uv")
    _run(environment, release.requirement, [*command, release.requirement], recipe, held)


def _run(environment: EngineEnvironment, requirement: str, command: list[str], recipe: Recipe, held: int) -> None:
    try:
        run_step(command, log=environment.folder / _LOG, held=held)
    except StepError as error:
        remedy = "check the requirement and the package index that pip and uv are configured to use"
        if recipe.is_empty:
            remedy += (
                "; if it cannot be installed by its own requirements, give it a row in harness/engines/releases.toml"
            )
        raise InstallError(requirement, error, remedy=remedy) from error


def _check(environment: EngineEnvironment, recipe: Recipe, packages: dict[str, str]) -> None:
    """Raise EnvironmentFault unless the installers did what was asked of them. They exit 0 in either case."""
    release = environment.release
    wrong = []
    if (version := packages.get(release.distribution)) != release.version:
        wrong.append(f"{release.distribution} is {version or 'not there'}, not {release.version}")
    # A build of the pinned version carries a local label (2.13.0+cpu).
    if recipe.torch and (version := packages.get("torch", "")).partition("+")[0] != recipe.torch:
        wrong.append(f"torch is {version or 'not there'}, not {recipe.torch}")
    wrong += [
        f"{name} is there, and was to be left out" for name in map(canonical, recipe.excludes) if name in packages
    ]
    if wrong:
        raise EnvironmentFault(
            f"{environment.folder} does not hold what was asked for: {'; '.join(wrong)}",
            remedy=f"read {environment.folder / _LOG}, then mend the release's row in harness/engines/releases.toml",
        )

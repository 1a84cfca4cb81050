"""Whether an installed engine is the engine that its project published.

A CPU build of vLLM is a third party's. What it runs must be vLLM all the same: each of its Python files must equal that
of the official wheel, but for the differences that releases.toml lists, content and reason. The official wheel is some
300 MB and only its RECORD (the hash of each file) is needed, so that alone is read, by HTTP range requests.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import enum
import hashlib
import importlib.metadata
import io
import json
import tempfile
import urllib.parse
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import requests

from harness.engines.environment import EngineEnvironment
from harness.engines.releases import Recipe, canonical, recipe_for
from harness.errors import EnvironmentFault
from harness.files import exclusive, write_atomically
from harness.steps import StepError, run_step

__all__ = ["CACHE", "Outcome", "Provenance", "as_installed", "verify"]

CACHE = "draftgate-official.json"
_LOG = "draftgate-provenance.log"
_SCHEMA = 1
_CHUNK = 1 << 18
_TIMEOUT = (10.0, 60.0)
"""Seconds to connect, and between bytes."""


class Outcome(enum.StrEnum):
    """What is known about the origin of an installed engine."""

    VERIFIED = "verified"
    DIFFERS = "differs"
    UNVERIFIED = "unverified"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """How the installed Python files compare with the official ones; every file that does not fit is named.

    official: the requirement compared with, such as vllm==0.32.0. source: the wheel its hashes come from, and how.
    compared: official Python files looked for. identical: how many are installed unchanged.
    expected: file or folder -> reason, for the differences that releases.toml lists and that were found exactly so.
    differing, missing, extra: Python files that differ, are not there, or are not in the official wheel, unlisted.
    edited: files of any kind that are not as the installed distribution's own RECORD says: changed after installation.
    """

    outcome: Outcome
    reason: str
    official: str
    source: str = ""
    compared: int = 0
    identical: int = 0
    expected: Mapping[str, str] = dataclasses.field(default_factory=dict)
    differing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()


class _Unavailable(Exception):  # noqa: N818 -- a state, not an error: it ends as the reason of an UNVERIFIED outcome
    """The official hashes cannot be had."""


def verify(
    environment: EngineEnvironment, *, recipe: Recipe | None = None, progress: Callable[[str], None] = lambda _: None
) -> Provenance:
    """Compare the engine installed in `environment` with its official release, and with its own RECORD.

    The official hashes are kept in the environment's folder; the installed files are read anew each time. Without a
    package index the outcome is UNVERIFIED, with the reason. `recipe` is the row of releases.toml unless given.

    Raises EnvironmentFault if the distribution is not installed there.
    """
    recipe = recipe_for(environment.release) if recipe is None else recipe
    release = environment.release
    # An official wheel for another device carries a local version (0.32.0+cpu); the index has the public one.
    official = f"{recipe.official or release.distribution}=={release.version.partition('+')[0]}"
    own = _own_record(release.distribution, environment.site_packages)
    edited = _edited(own, environment.site_packages)
    try:
        with exclusive(environment.folder / f".{CACHE}.lock") as held:
            record = _official_record(environment, official, progress, held)
    except _Unavailable as error:
        outcome = Outcome.DIFFERS if edited else Outcome.UNVERIFIED
        reason = f"the Python files of {official} cannot be compared: {error}"
        return Provenance(outcome, reason, official, edited=edited)
    return _compare(environment, recipe, official, record, own, edited)


def _compare(
    environment: EngineEnvironment,
    recipe: Recipe,
    official: str,
    record: dict[str, Any],
    own: Mapping[str, str],
    edited: tuple[str, ...],
) -> Provenance:
    site, wanted = environment.site_packages, cast("dict[str, str]", record["files"])
    listed = {each.file: each for each in recipe.differences}
    expected: dict[str, str] = {}
    differing, missing, identical = [], [], 0
    for name, official_hash in wanted.items():
        found = _hash(site / name, official_hash)
        if found == official_hash:
            identical += 1
        elif not found:
            under = next((each for each in recipe.absences if name.startswith(each.under)), None)
            if under is None:
                missing.append(name)
            else:
                expected[under.under] = under.reason
        elif name in listed and _hash(site / name, "sha256=") == _as_record(bytes.fromhex(listed[name].sha256)):
            expected[name] = listed[name].reason
        else:
            differing.append(name)
    tops = {name.partition("/")[0] for name in wanted}
    installed = {str(file.relative_to(site)) for top in tops for file in (site / top).rglob("*.py")}
    extra = sorted((installed | {name for name in own if name.endswith(".py")}) - set(wanted))
    faults = [
        f"{len(files)} {what} ({files[0]}{', ...' if len(files) > 1 else ''})"
        for what, files in (
            ("differ", differing),
            ("are missing", missing),
            ("are not in it", extra),
            ("were changed after installation", edited),
        )
        if files
    ]
    return Provenance(
        outcome=Outcome.DIFFERS if faults else Outcome.VERIFIED,
        reason=f"against {official}: {'; '.join(faults)}" if faults else "",
        official=official,
        source=record["source"],
        compared=len(wanted),
        identical=identical,
        expected=expected,
        differing=tuple(differing),
        missing=tuple(missing),
        extra=tuple(extra),
        edited=edited,
    )


def _as_record(digest: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _hash(path: Path, like: str) -> str:
    """Return the hash of a file as a RECORD writes it, by the algorithm of `like`; "" if there is no such file."""
    algorithm = like.partition("=")[0]
    try:
        with path.open("rb") as handle:
            return _as_record(hashlib.file_digest(handle, algorithm).digest(), algorithm)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def as_installed(distribution: str, site_packages: Path) -> tuple[int, tuple[str, ...]]:
    """Return how many files of an installed distribution its RECORD has hashes of, and which are not as it says.

    0 where it is not, or was installed in place (PEP 660): then RECORD lists none of its Python files.
    """
    try:
        own = _own_record(distribution, site_packages)
    except EnvironmentFault:
        return 0, ()
    packaged = {name: value for name, value in own.items() if ".dist-info/" not in name and not name.startswith("../")}
    if not any(name.endswith(".py") and "/" in name for name in packaged):
        return 0, ()
    return len(packaged), _edited(packaged, site_packages)


def _edited(own: Mapping[str, str], site_packages: Path) -> tuple[str, ...]:
    return tuple(name for name, wanted in own.items() if _hash(site_packages / name, wanted) != wanted)


def _own_record(name: str, site_packages: Path) -> dict[str, str]:
    """Return the files of the installed distribution with their hashes, as its own RECORD lists them."""
    for each in importlib.metadata.distributions(path=[str(site_packages)]):
        if canonical(each.metadata["Name"]) == name:
            # RECORD itself and compiled files have no hash.
            return {str(file): f"{file.hash.mode}={file.hash.value}" for file in each.files or () if file.hash}
    raise EnvironmentFault(
        f"{name} is not installed in {site_packages}", remedy="remove the environment, and it is made again"
    )


def _official_record(
    environment: EngineEnvironment, official: str, progress: Callable[[str], None], held: int
) -> dict[str, Any]:
    """Return the official Python files with their hashes, from the environment's folder or from the index."""
    cache = environment.folder / CACHE
    try:
        record: dict[str, Any] = json.loads(cache.read_text(encoding="utf-8"))
        if (record["schema"], record["official"]) == (_SCHEMA, official):
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or of no use: it is fetched
    progress(f"reading the hashes of the official {official}")
    with tempfile.TemporaryDirectory(dir=environment.folder, prefix=".official-") as scratch:
        files, source = _fetch(environment, official, Path(scratch), held)
    record = {"schema": _SCHEMA, "official": official, "source": source, "files": files}
    write_atomically(cache, json.dumps(record, indent=1) + "\n")
    return record


def _fetch(environment: EngineEnvironment, official: str, scratch: Path, held: int) -> tuple[dict[str, str], str]:
    """Read the RECORD of the official wheel that the configured index offers. Raises _Unavailable."""
    log, report = environment.folder / _LOG, scratch / "report.json"
    pip = [str(environment.python), "-m", "pip"]
    wanted = ["--no-deps", "--only-binary", ":all:", official]
    try:
        # pip finds the wheel, with the index and mirror it is configured for. It fetches no more than the metadata.
        command = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report), *wanted]
        run_step(command, log=log, held=held)
        download = json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]
        url = urllib.parse.urlsplit(download["url"])
        name = urllib.parse.unquote(url.path).rpartition("/")[2]
        if url.scheme == "file":
            with Path(urllib.parse.unquote(url.path)).open("rb") as wheel:
                return _python_files(wheel), f"{name}, a local file"
        try:
            with _RangedFile(download["url"]) as remote:
                return _python_files(cast("BinaryIO", io.BufferedReader(remote, _CHUNK))), f"{name}, by range requests"
        except requests.RequestException:
            # No range requests, or credentials that only pip has: have pip bring the whole wheel, once.
            run_step([*pip, "download", "--quiet", "--dest", str(scratch), *wanted], log=log, held=held)
            with (scratch / name).open("rb") as wheel:
                return _python_files(wheel), f"{name}, downloaded"
    except StepError as error:
        raise _Unavailable(f"pip cannot get it\n{error.tail}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
        raise _Unavailable(f"{type(error).__name__}: {error}") from error


def _python_files(wheel: BinaryIO) -> dict[str, str]:
    """Return name -> hash of each Python file in the RECORD of a wheel. Raises ValueError or zipfile.BadZipFile."""
    with zipfile.ZipFile(wheel) as archive:
        records = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
        if len(records) != 1:
            raise ValueError(f"the wheel holds {len(records)} RECORD files")
        rows = csv.reader(archive.read(records[0]).decode("utf-8").splitlines())
    files = {row[0]: row[1] for row in rows if row and row[0].endswith(".py")}
    if not files:
        raise ValueError("the wheel's RECORD lists no Python file")
    if unhashed := [
        name for name, value in files.items() if value.partition("=")[0] not in hashlib.algorithms_available
    ]:
        raise ValueError(f"the wheel's RECORD has no usable hash of {unhashed[0]}")
    return files


class _RangedFile(io.RawIOBase):
    """A file on a server, read by range requests. Raises requests.RequestException where the server has none."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._session = requests.Session()
        self._url = url
        self._position = 0
        self._size = 1
        self._size = int(self._request(0, 1).headers["Content-Range"].rpartition("/")[2])

    def close(self) -> None:
        self._session.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._position)
        if length <= 0:
            return 0
        content = self._request(self._position, length).content
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _request(self, start: int, length: int) -> requests.Response:
        # identity: a compressed answer would be a range of something else.
        headers = {"Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
        response = self._session.get(self._url, headers=headers, timeout=_TIMEOUT, stream=True)
        with response:
            response.raise_for_status()
            if response.status_code != requests.codes.partial_content:
                raise requests.RequestException(f"no range requests: status {response.status_code}")
            content = response.content
        if len(content) != length:
            raise requests.RequestException(f"{len(content)} bytes of {length} arrived")
        return response

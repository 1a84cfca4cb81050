"""Which files a checkpoint consists of: from a file, a folder, an index, a Hugging Face cache, or a repository's name.

Never contacts a network. Follows no link out of the checkpoint, except from a snapshot of a Hugging Face cache into the
blobs of the same repository, which is how that cache is laid out (huggingface_hub 2.4.0, `file_download.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import msgspec

from harness.checkpoint.header import PICKLES, refuse_pickle
from harness.checkpoint.strict_json import JsonError, Scanner, shorten
from harness.errors import CheckpointError

__all__ = ["Files", "Index", "explain_index", "json_object", "locate"]

INDEX = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_CONFIG_LIMIT = 16 << 20
_INDEX_LIMIT = 256 << 20
"""Bytes. An index takes about 100 bytes a tensor."""
_PIECE = 1 << 15

Index: TypeAlias = dict[str, set[str]]
"""Names of tensors, by the file that an index says they are in."""


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a checkpoint. `index_file` is None where there is none.

    `unlisted` are weight files of the folder that the index does not name. `repository` and `revision` are set for a
    Hugging Face cache.
    """

    folder: Path
    shards: tuple[Path, ...]
    config: Path | None
    index_file: Path | None = None
    unlisted: tuple[str, ...] = ()
    repository: str = ""
    revision: str = ""


def locate(where: str | os.PathLike[str]) -> tuple[Files, Index | None]:
    """Find the files of a checkpoint, and read its index if it has one.

    `where` is a .safetensors file, its index, a folder with either, a folder `models--ORG--NAME` of a Hugging Face
    cache, or the name ORG/NAME of a repository that the cache holds.

    Raises:
        CheckpointError: there is no checkpoint, it is pickled, its index is wrong, or a file lies outside of it.

    """
    try:
        return _locate(where)
    except (OSError, RuntimeError) as error:  # the latter: a link to itself, a home of nobody
        raise CheckpointError(
            f"{shorten(os.fspath(where), 300)}: cannot be read: {error}", remedy="check the path and its permissions"
        ) from error


def _locate(where: str | os.PathLike[str]) -> tuple[Files, Index | None]:
    path = Path(where).expanduser()
    if path.is_dir():
        return _cached(path) if _is_cache(path) else _folder(path)
    if path.exists():
        return _file(path)
    cached = _cache_root() / f"models--{os.fspath(where).replace('/', '--')}"
    if _REPOSITORY.fullmatch(os.fspath(where)) and cached.is_dir():
        return _cached(cached)
    raise CheckpointError(
        f"{where}: no such file or folder, and no such repository in the cache {_cache_root()}",
        remedy="give a .safetensors file, a checkpoint's folder, or ORG/NAME of a repository that was downloaded",
    )


def json_object(path: Path) -> dict[str, Any]:
    """Read a small JSON file that holds an object.

    Raises:
        CheckpointError: it cannot be read, is not JSON, is not an object, or has a key twice; with the offset.

    """
    try:
        value = _strict(_content(path, _CONFIG_LIMIT))
    except JsonError as error:
        raise CheckpointError(
            f"{path}: byte {error.offset}: cannot be read as JSON: {error.why}", remedy="repair or download it again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object", remedy="download it again")
    return value


def _content(path: Path, limit: int) -> bytes:
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "no such file"
            raise CheckpointError(f"{path}: {what}", remedy="give a folder with config.json beside the weights")
        with path.open("rb") as handle:
            raw = handle.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", remedy="check its permissions") from error
    if len(raw) > limit:
        raise CheckpointError(f"{path}: byte {limit}: larger than {limit} bytes", remedy="this is not what it claims")
    return raw


def _file(path: Path) -> tuple[Files, Index | None]:
    """Return a checkpoint of the one file that was named; its folder is asked for nothing but the config."""
    refuse_pickle(path)
    if path.name.endswith(_INDEX_SUFFIX):
        return _indexed(path.parent, path)
    return Files(path.parent, (path,), _config(path.parent)), None


def _folder(folder: Path) -> tuple[Files, Index | None]:
    indices = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX_SUFFIX))
    if (folder / INDEX) in indices:
        return _indexed(folder, folder / INDEX)
    if len(indices) > 1:
        names = ", ".join(path.name for path in indices)
        raise CheckpointError(f"{folder}: several indices: {names}", remedy="name one of them instead of the folder")
    if indices:
        return _indexed(folder, indices[0])
    shards = _weights(folder)
    if not shards:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        for name in pickled:
            refuse_pickle(folder / name)
        raise CheckpointError(
            f"{folder}: no *.safetensors files",
            remedy="give a folder with safetensors files; convert pickled checkpoints first",
        )
    return Files(folder, tuple(_contained(folder, path.name) for path in shards), _config(folder)), None


def _weights(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


def _config(folder: Path) -> Path | None:
    path = folder / "config.json"
    return _contained(folder, path.name) if os.path.lexists(path) else None


def _indexed(folder: Path, file: Path) -> tuple[Files, Index | None]:
    index = _read_index(_contained(folder, file.name))
    names = sorted(index)
    for name in names:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise CheckpointError(
                f"{file}: names a file outside of its folder: {shorten(name)}", remedy="do not use this checkpoint"
            )
        if parts.suffix != ".safetensors" or parts.as_posix() != name or not name.isprintable():
            raise CheckpointError(
                f"{file}: names {shorten(name)}, not a .safetensors file", remedy="write the index again, or remove it"
            )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{file}: names absent files: {shorten(', '.join(absent), 300)}", remedy="complete the download"
        )
    shards = tuple(_contained(folder, name) for name in names)
    unlisted = tuple(path.name for path in _weights(folder) if path.name not in names)
    return Files(folder, shards, _config(folder), file, unlisted), index


_WEIGHT_MAP = re.compile(rb'"weight_map"[ \t\n\r]*:[ \t\n\r]*\{')
_REST_LIMIT = 1 << 20
"""Bytes of an index beside its map, which are read in Python."""
_STRINGS: msgspec.json.Decoder[dict[str, str]] = msgspec.json.Decoder(dict[str, str])


def _read_index(file: Path) -> Index:
    found = _quick_index(_content(file, _INDEX_LIMIT)) or explain_index(file)
    if not found:
        raise CheckpointError(f"{file}: has no weight_map", remedy="write the index again, or remove it")
    return found


def _quick_index(raw: bytes) -> Index | None:
    """Decode an index whose last key is its map, or return None for `explain_index` to read, or refuse, it.

    A piece at a time: one table of 200,000 names does not fit a processor's cache, and takes three times as long. Equal
    keys show in the number of quotation marks, which nothing escapes, unless they name two files; then one of those
    does not have the tensor, or both have it, which `read` refuses.
    """
    match = _WEIGHT_MAP.search(raw)
    if match is None or b"\\" in raw:
        return None
    begin, end = match.end(), raw.rfind(b"}", match.end(), raw.rfind(b"}"))
    rest = raw[:begin] + raw[end:]
    found: dict[str, set[str]] = collections.defaultdict(set)
    try:
        if end < 0 or len(rest) > _REST_LIMIT:
            return None
        _strict(rest)
        for piece in _pieces(raw, begin, end):
            names = _STRINGS.decode(piece)
            for place in (places := set(names.values())):
                found[place].update(names if len(places) == 1 else [name for name in names if names[name] == place])
    except (msgspec.DecodeError, JsonError):
        return None
    return found if raw.count(b'"', begin, end) == 4 * sum(map(len, found.values())) else None


def _strict(raw: bytes) -> Any:
    scanner = Scanner(raw)
    value = scanner.value()
    scanner.end()
    return value


def _pieces(raw: bytes, begin: int, end: int) -> Iterator[bytes]:
    """Cut the members of a JSON object into objects of some 32 kB. One that is cut within a string is no JSON."""
    while (cut := raw.find(b'",', begin + _PIECE, end)) >= 0:
        yield b"{" + raw[begin : cut + 1] + b"}"
        begin = cut + 2
    yield b"{" + raw[begin:end] + b"}"


def explain_index(file: Path) -> Index:
    """Read an index byte by byte. Raises `CheckpointError` with the offset."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    try:
        scanner = Scanner(_content(file, _INDEX_LIMIT))
        for key, _ in scanner.members():
            if key == "weight_map":
                for name, _ in scanner.members():
                    found[scanner.string()].add(name)
            else:
                scanner.value()
        scanner.end()
    except JsonError as error:
        raise CheckpointError(
            f"{file}: byte {error.offset}: {error.why}", remedy="write the index again, or remove it"
        ) from None
    return found


def _contained(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder. Raises `CheckpointError` when it is a link to somewhere else."""
    path = folder / name
    root = folder.resolve()
    real = path.resolve()
    if not real.is_relative_to(root) and not any(real.is_relative_to(blobs) for blobs in _blobs(root)):
        raise CheckpointError(
            f"{path}: is a link out of the checkpoint, to {real}",
            remedy="name the file itself, or copy it into the folder",
        )
    return path


def _blobs(folder: Path) -> list[Path]:
    """Return where the snapshot of a Hugging Face cache that this folder is in keeps its files; else nothing."""
    return [
        (place.parent.parent / "blobs").resolve()
        for place in (folder, *folder.parents)
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--")
    ]


_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")


def _cache_root() -> Path:
    """Return the folder of the cache, by the rules of huggingface_hub 2.4.0 (`constants.py`)."""
    general = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(general, "huggingface"))  # noqa: PTH118 -- expanded below
    hub = os.path.join(os.path.expandvars(home), "hub")  # noqa: PTH118
    found = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", hub))
    return Path(os.path.expandvars(found)).expanduser()


def _is_cache(path: Path) -> bool:
    return path.name.startswith("models--") and (path / "snapshots").is_dir()


def _cached(folder: Path) -> tuple[Files, Index | None]:
    """Return the snapshot that `refs/main` names, or the only one."""
    repository = folder.name.removeprefix("models--").replace("--", "/")
    snapshots = folder / "snapshots"
    known = sorted(path.name for path in snapshots.iterdir()) if snapshots.is_dir() else []
    ref = folder / "refs" / "main"
    if ref.is_file():
        revision = _content(ref, 4096).decode("utf-8", "replace").strip()
        if revision not in known:
            raise CheckpointError(
                f"{ref}: names the revision {shorten(revision)}, of which there is no snapshot",
                remedy="download it again, or name one of the folders in snapshots",
            )
    elif len(known) == 1:
        [revision] = known
    else:
        raise CheckpointError(
            f"{folder}: no refs/main, and {len(known)} snapshots", remedy="name one of the folders in snapshots"
        )
    files, index = _folder(snapshots / revision)
    return dataclasses.replace(files, repository=repository, revision=revision), index

"""Which files a checkpoint consists of: from a file, a folder, an index, a Hugging Face cache, or a repository's name.

Never contacts a network. Follows no link out of the checkpoint, except from a snapshot of a Hugging Face cache into the
blobs of the same repository, which is how that cache is laid out (huggingface_hub 2.4.0, `file_download.py`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from harness.checkpoint.header import PICKLES, refuse_pickle
from harness.checkpoint.strict_json import JsonError, Scanner, shorten
from harness.errors import CheckpointError

__all__ = ["Files", "json_object", "locate"]

INDEX = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_CONFIG_LIMIT = 16 << 20
_INDEX_LIMIT = 256 << 20
"""Bytes. An index takes about 100 bytes a tensor."""


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a checkpoint. `index` maps tensor names to file names; None where there is no index.

    `unlisted` are weight files of the folder that the index does not name. `repository` and `revision` are set for a
    Hugging Face cache.
    """

    folder: Path
    shards: tuple[Path, ...]
    config: Path | None
    index_file: Path | None = None
    index: Mapping[str, str] | None = None
    unlisted: tuple[str, ...] = ()
    repository: str = ""
    revision: str = ""


def locate(where: str | os.PathLike[str]) -> Files:
    """Find the files of a checkpoint.

    `where` is a .safetensors file, its index, a folder with either, a folder `models--ORG--NAME` of a Hugging Face
    cache, or the name ORG/NAME of a repository that the cache holds.

    Raises:
        CheckpointError: there is no checkpoint, it is pickled, its index is wrong, or a file lies outside of it.

    """
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
        found = Scanner(_content(path, _CONFIG_LIMIT))
        value = found.value()
        found.end()
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


def _file(path: Path) -> Files:
    """Return a checkpoint of the one file that was named; its folder is asked for nothing but the config."""
    refuse_pickle(path)
    if path.name.endswith(_INDEX_SUFFIX):
        return _indexed(path.parent, path)
    return Files(path.parent, (path,), _config(path.parent))


def _folder(folder: Path) -> Files:
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
    return Files(folder, tuple(_contained(folder, path.name) for path in shards), _config(folder))


def _weights(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


def _config(folder: Path) -> Path | None:
    path = folder / "config.json"
    return _contained(folder, path.name) if os.path.lexists(path) else None


def _indexed(folder: Path, file: Path) -> Files:
    mapping = _weight_map(_contained(folder, file.name))
    names = sorted(set(mapping.values()))
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
    return Files(folder, shards, _config(folder), file, mapping, unlisted)


class _Index(msgspec.Struct):
    weight_map: msgspec.Raw


def _weight_map(file: Path) -> dict[str, str]:
    raw = _content(file, _INDEX_LIMIT)
    mapping = _quick_map(raw)
    if mapping is None:
        mapping = _careful_map(raw, file)
    if not mapping:
        raise CheckpointError(f"{file}: has no weight_map", remedy="write the index again, or remove it")
    return mapping


def _quick_map(raw: bytes) -> dict[str, str] | None:
    """Decode an index, or return None for `_careful_map`. Equal keys show in the number of quotation marks."""
    if b"\\" in raw or raw.count(b'"weight_map"') != 1:
        return None
    try:
        part = bytes(msgspec.json.decode(raw, type=_Index).weight_map)
        mapping = msgspec.json.decode(part, type=dict[str, str])
    except (msgspec.DecodeError, RecursionError):
        return None
    return mapping if part.count(b'"') == 4 * len(mapping) else None


def _careful_map(raw: bytes, file: Path) -> dict[str, str]:
    mapping: dict[str, str] = {}
    try:
        scanner = Scanner(raw)
        for key, _ in scanner.members():
            if key == "weight_map":
                mapping = {name: scanner.string() for name, _ in scanner.members()}
            else:
                scanner.value()
        scanner.end()
    except JsonError as error:
        raise CheckpointError(
            f"{file}: byte {error.offset}: {error.why}", remedy="write the index again, or remove it"
        ) from None
    return mapping


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


def _cached(folder: Path) -> Files:
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
    return dataclasses.replace(_folder(snapshots / revision), repository=repository, revision=revision)

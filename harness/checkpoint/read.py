"""Reading a checkpoint: its config, the header of each of its files, and a digest of it all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.checkpoint.families import Family, group
from harness.checkpoint.header import Shard, Tensor, read_header
from harness.checkpoint.locate import Files, json_object, locate
from harness.checkpoint.strict_json import shorten
from harness.errors import CheckpointError

__all__ = ["Checkpoint", "read"]

_FULL_DIGEST_LIMIT = 4 << 30
"""Above this many bytes a digest of all data would cost minutes; headers, sizes and config stand in, and it says so."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, of which headers and config are in memory and no data.

    `config` is empty where there is no config.json (`files.config` is None then). `shards` are in the order of their
    names. `missing_in_index` are tensors that a shard has and the index does not name: engines load them all the same.
    """

    files: Files
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    missing_in_index: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.files.folder

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name, in the order of shards and headers."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        """All tensors, those that differ only in numbers as one; the largest first."""
        return group(shard.tensors for shard in self.shards)

    def find(self, name: str) -> Tensor | None:
        """Return a tensor, or None. Unlike `tensors`, it makes no table of all names first."""
        return next((shard.tensors[name] for shard in self.shards if name in shard.tensors), None)

    def shard_of(self, name: str) -> Shard:
        """Return the file that has a tensor. Raises `KeyError`."""
        for shard in self.shards:
            if name in shard.tensors:
                return shard
        raise KeyError(name)

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(shard.size for shard in self.shards)

    @functools.cached_property
    def digest(self) -> str:
        """`sha256:...` over config and all data, or `sha256-headers:...` for more than 4 GiB. Reads the files, once."""
        digest = hashlib.sha256(self.files.config.read_bytes() if self.files.config else b"")
        if self.size > _FULL_DIGEST_LIMIT:
            listing = sorted(
                (name, tensor.shape, tensor.dtype, shard.path.name)
                for shard in self.shards
                for name, tensor in shard.tensors.items()
            )
            sizes = [(shard.path.name, shard.size) for shard in self.shards]
            digest.update(json.dumps([listing, sizes]).encode())
            return f"sha256-headers:{digest.hexdigest()}"
        for shard in self.shards:
            with shard.path.open("rb") as handle:
                while block := handle.read(1 << 22):
                    digest.update(block)
        return f"sha256:{digest.hexdigest()}"


def read(where: str | os.PathLike[str], *, config_optional: bool = False) -> Checkpoint:
    """Read a checkpoint's config and headers. `where` is what `locate` takes; no tensor's data is read.

    200,000 tensors take a few tenths of a second and 150 MB.

    Raises:
        CheckpointError: naming the file, and the offset in it.

    """
    files = locate(where)
    if files.config is None and not config_optional:
        raise CheckpointError(
            f"{files.folder / 'config.json'}: no such file", remedy="give a folder with config.json beside the weights"
        )
    config = json_object(files.config) if files.config else {}
    with _collector_paused():
        shards = tuple(read_header(path) for path in files.shards)
        if files.index is None:
            _require_distinct(shards)
            return Checkpoint(files, config, shards)
        return Checkpoint(files, config, shards, _compare(files, files.index, shards))


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Let the garbage collector not look at a million new objects, none of which is in a cycle, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _require_distinct(shards: tuple[Shard, ...]) -> None:
    if len(shards) == 1:
        return
    seen: set[str] = set()
    for shard in shards:
        if not seen.isdisjoint(shard.tensors):
            name = next(name for name in shard.tensors if name in seen)
            other = next(other.path.name for other in shards if name in other.tensors)
            raise CheckpointError(
                f"{shard.path}: tensor {shorten(name)} is also in {other}", remedy="remove one of the two files"
            )
        seen.update(shard.tensors)


def _compare(files: Files, index: Mapping[str, str], shards: tuple[Shard, ...]) -> tuple[str, ...]:
    """Return the tensors that the index does not name. Raises `CheckpointError` where it is wrong about a tensor."""
    tensors = {shard.path.relative_to(files.folder).as_posix(): shard.tensors for shard in shards}
    agreed = 0
    strays: dict[str, str] = {}
    for own, names in tensors.items():
        places = list(map(index.get, names))
        same = places.count(own)
        agreed += same
        if same != len(places):
            strays |= {name: own for name, place in zip(names, places, strict=True) if place != own}
    if agreed != len(index):
        name, place = next((name, place) for name, place in index.items() if name not in tensors[place])
        there = f"; {strays[name]} has it" if name in strays else ""
        raise CheckpointError(
            f"{files.index_file}: says that tensor {shorten(name)} is in {place}, which does not have it{there}",
            remedy="download the index and its files again, from one revision",
        )
    for name, own in strays.items():
        if name in index:
            raise CheckpointError(
                f"{files.folder / own}: tensor {shorten(name)} is also in {index[name]}, where the index expects it",
                remedy="remove it from one of the two files, or download them again",
            )
    return tuple(strays)

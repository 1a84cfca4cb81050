"""Reading a checkpoint: its config, the header of each of its files, and a digest of it all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.digest import digest
from harness.checkpoint.families import Families, Family
from harness.checkpoint.header import Shard, Tensor, read_header
from harness.checkpoint.locate import Files, explain_index, json_object, locate
from harness.checkpoint.strict_json import shorten
from harness.errors import CheckpointError

__all__ = ["Checkpoint", "read"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, of which headers and config are in memory and no data.

    `config` is empty where there is no config.json (`files.config` is None then). `shards` are in the order of their
    names. `families` are all tensors, those that differ only in numbers as one, the largest first. `missing_in_index`
    are tensors that a shard has and the index does not name: engines load them all the same.
    """

    files: Files
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    families: tuple[Family, ...]
    missing_in_index: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.files.folder

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name, in the order of shards and headers."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}

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
        """The digest of config and data (`harness.checkpoint.digest`). Reads files, once. Raises CheckpointError."""
        return digest(self.files.config, self.shards)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from looking at half a million new tuples, none of which is in a cycle.

    It takes a seventh of the reading. Freezing and unfreezing hands them to the oldest generation unseen; without it,
    the collector would look at all of them as soon as it is back.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.enable()


@_collector_paused()
def read(where: str | os.PathLike[str], *, config_optional: bool = False) -> Checkpoint:
    """Read a checkpoint's config and headers. `where` is what `locate` takes; no tensor's data is read.

    200,000 tensors take a few tenths of a second and 150 MB.

    Raises:
        CheckpointError: naming the file, and the offset in it.

    """
    files, index = locate(where)
    if files.config is None and not config_optional:
        raise CheckpointError(
            f"{files.folder / 'config.json'}: no such file", remedy="give a folder with config.json beside the weights"
        )
    config = json_object(files.config) if files.config else {}
    shards: list[Shard] = []
    families = Families()
    seen: set[str] = set()
    unlisted: list[str] = []
    # All that is asked of a file is asked while its names are in the processor's cache.
    for path in files.shards:
        shard = read_header(path)
        shards.append(shard)
        families.add(shard.tensors)
        before = len(seen)
        seen.update(shard.tensors)
        if len(seen) != before + len(shard.tensors):
            raise _twice(shards)
        # `pop`: what the index said of this file is done with, and the next one takes its memory.
        named = shard.tensors.keys() if index is None else index.pop(path.relative_to(files.folder).as_posix())
        if named != shard.tensors.keys():
            if absent := named - shard.tensors.keys():
                raise _absent(files, shard, min(absent))
            unlisted += [name for name in shard.tensors if name not in named]
    return Checkpoint(files, config, tuple(shards), families.all(), tuple(unlisted))


def _twice(shards: Sequence[Shard]) -> CheckpointError:
    """Return what is wrong if the last file has a tensor that another one has, too."""
    *others, last = shards
    name, other = next((name, other) for name in last.tensors for other in others if name in other.tensors)
    return CheckpointError(
        f"{last.path}: tensor {shorten(name)} is also in {other.path.name}", remedy="remove one of the two files"
    )


def _absent(files: Files, shard: Shard, name: str) -> CheckpointError:
    """Return what is wrong if the index names a tensor that its file does not have."""
    assert files.index_file is not None  # noqa: S101 -- an index named it
    explain_index(files.index_file)  # raises if the name is there twice, and says where
    own = shard.path.relative_to(files.folder)
    there = next((f"; {path.name} has it" for path in files.shards if name in read_header(path).tensors), "")
    return CheckpointError(
        f"{files.index_file}: says that tensor {shorten(name)} is in {own}, which does not have it{there}",
        remedy="download the index and its files again, from one revision",
    )

"""Everything that `draftgate inspect` says about a checkpoint, as facts and findings."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness.checkpoint import vocabulary
from harness.checkpoint.findings import Finding, Severity
from harness.checkpoint.header import Shard, Tensor
from harness.checkpoint.read import Checkpoint, read
from harness.checkpoint.recognise import Recognition, recognise

if TYPE_CHECKING:
    from harness.checkpoint.statistics import Statistics

__all__ = ["SCHEMA", "Filter", "Inspection", "inspect"]

SCHEMA = 1
"""Of `Inspection.as_json`. Raised when a key changes its meaning or goes; new keys may come without."""


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which tensors are meant: any of the globs, any of the dtypes, at least so many bytes. Empty means all."""

    keys: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    min_size: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.dtypes or self.min_size)

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor is meant."""
        return (
            (not self.keys or any(fnmatch.fnmatchcase(name, key) for key in self.keys))
            and (not self.dtypes or tensor.dtype in self.dtypes)
            and tensor.nbytes >= self.min_size
        )


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found. `statistics` is by tensor name, and empty unless asked for."""

    checkpoint: Checkpoint
    recognition: Recognition
    mapping: vocabulary.Mapping | None
    statistics: Mapping[str, Statistics]
    findings: tuple[Finding, ...]
    only: Filter = Filter()

    @property
    def failed(self) -> bool:
        """Whether there is an error among the findings."""
        return any(finding.severity == Severity.ERROR for finding in self.findings)

    def tensors(self) -> Iterator[tuple[str, Tensor, Shard]]:
        """Yield the tensors that the filter takes, in the order of shards and headers."""
        return _selected(self.checkpoint, self.only)

    def totals(self) -> dict[str, Any]:
        """Return numbers of tensors, elements and bytes, in all and by dtype; of the whole checkpoint."""
        by_dtype: dict[str, dict[str, int]] = {}
        for family in self.checkpoint.families:
            row = by_dtype.setdefault(family.dtype, {"tensors": 0, "elements": 0, "bytes": 0})
            row["tensors"] += family.count
            row["elements"] += family.count * math.prod(family.shape)
            row["bytes"] += family.nbytes
        total = {key: sum(row[key] for row in by_dtype.values()) for key in ("tensors", "elements", "bytes")}
        return {**total, "by_dtype": by_dtype}

    def as_json(self) -> dict[str, Any]:
        """Return the document of `--json`, which docs/inspect.md describes."""
        files = self.checkpoint.files
        return {
            "schema": SCHEMA,
            "folder": str(files.folder),
            "repository": files.repository or None,
            "revision": files.revision or None,
            "index": files.index_file.name if files.index_file else None,
            "files": [
                {
                    "name": str(shard.path.relative_to(files.folder)),
                    "bytes": shard.size,
                    "data_start": shard.data_start,
                    "tensors": len(shard.tensors),
                    "metadata": dict(shard.metadata),
                }
                for shard in self.checkpoint.shards
            ],
            "config": dict(self.checkpoint.config) if files.config else None,
            "recognition": dataclasses.asdict(self.recognition),
            "mapping": dataclasses.asdict(self.mapping) if self.mapping else None,
            "totals": self.totals(),
            "tensors": [
                {
                    "name": name,
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "bytes": tensor.nbytes,
                    "file": str(shard.path.relative_to(files.folder)),
                    "offset": shard.data_start + tensor.data_offsets[0],
                    **({"statistics": dataclasses.asdict(self.statistics[name])} if name in self.statistics else {}),
                }
                for name, tensor, shard in self.tensors()
            ],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "failed": self.failed,
        }


def inspect(where: str | os.PathLike[str], *, stats: bool = False, only: Filter | None = None) -> Inspection:
    """Read a checkpoint's headers, config, `d2t` and `t2d`; with `stats` also the data of what `only` takes.

    Raises:
        CheckpointError: it cannot be read.

    """
    only = only or Filter()
    checkpoint = read(where, config_optional=True)
    recognition, findings = recognise(checkpoint)
    mapping, more = vocabulary.judge(checkpoint, recognition)
    measured, doubts = _measure(checkpoint, only) if stats else ({}, [])
    every = (*_judge_files(checkpoint), *findings, *more, *doubts)
    return Inspection(checkpoint, recognition, mapping, measured, every, only)


def _selected(checkpoint: Checkpoint, only: Filter) -> Iterator[tuple[str, Tensor, Shard]]:
    for shard in checkpoint.shards:
        for name, tensor in shard.tensors.items():
            if only.takes(name, tensor):
                yield name, tensor, shard


def _measure(checkpoint: Checkpoint, only: Filter) -> tuple[dict[str, Statistics], list[Finding]]:
    from harness.checkpoint import statistics  # noqa: PLC0415 -- numpy, only when asked for

    measured: dict[str, Statistics] = {}
    findings: list[Finding] = []
    for name, tensor, shard in _selected(checkpoint, only):
        measured[name] = statistics.measure(shard, name)
        findings += statistics.judge(name, tensor.dtype, measured[name])
    return measured, findings


def _judge_files(checkpoint: Checkpoint) -> Iterator[Finding]:
    files = checkpoint.files
    if not any(shard.tensors for shard in checkpoint.shards):
        yield Finding("INS001", Severity.ERROR, str(files.folder), "no tensors at all", "export it again")
    if files.config is None:
        yield Finding(
            "INS002",
            Severity.WARNING,
            str(files.folder),
            "no config.json: method and sizes are told from the tensors alone",
            "put it beside the weights",
        )
    if files.unlisted:
        yield Finding(
            "INS003",
            Severity.WARNING,
            str(files.index_file),
            f"does not name {', '.join(files.unlisted)}: left-over files, which some loaders read all the same",
            "remove them, or write the index again",
        )
    if checkpoint.missing_in_index:
        some = ", ".join(map(ascii, checkpoint.missing_in_index[:3]))
        yield Finding(
            "INS004",
            Severity.WARNING,
            str(files.index_file),
            f"does not name {len(checkpoint.missing_in_index)} tensors of its files: {some}",
            "write the index again",
        )

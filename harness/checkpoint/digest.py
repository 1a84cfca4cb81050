"""A digest of a checkpoint: of all bytes, or of a bounded sample of them where all would take minutes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from harness.checkpoint.header import Shard
from harness.errors import CheckpointError

__all__ = ["digest"]

_FULL_LIMIT = 4 << 30
"""Bytes of weight files up to which all are read. Above it samples stand in, and the digest's name says so."""

_SAMPLE = 4096
"""Bytes of one sample: what a disk reads at once, and 2,048 elements of bfloat16."""

_SPREAD = 1 << 12
"""Samples spread evenly over all data: one in every 150 MB of a checkpoint of 600 GB."""

_TENSORS = 1 << 17
"""Samples from the middle of tensors, the largest first. With those spread that is 550 MB, whatever the size."""

_READERS = 16
"""Files read at once: on a network disk it is the latency of each read that takes the time."""


def digest(config: Path | None, shards: Sequence[Shard]) -> str:
    """Return `sha256:...` over config and all data or, above 4 GiB of weight files, `sha256-samples:...`.

    The latter is over config, every tensor's name, shape, dtype and file, the files' sizes, and samples of the data: of
    each tensor the middle (of the largest 131,072 if there are more), and 4,096 places from the first byte to the last.
    A tensor that was trained differs in nearly every sample. A change of a few bytes between two samples is not seen.

    Raises:
        CheckpointError: a file cannot be read, or became shorter.

    """
    try:
        head = config.read_bytes() if config else b""
    except OSError as error:
        raise _unreadable(config, error) from error
    made = hashlib.sha256(head)
    if sum(shard.size for shard in shards) <= _FULL_LIMIT:
        for shard in shards:
            _read(shard, ((place, 1 << 22) for place in range(0, shard.size, 1 << 22)), made.update)
        return f"sha256:{made.hexdigest()}"
    listing = sorted(
        (name, tensor.shape, tensor.dtype, shard.path.name)
        for shard in shards
        for name, tensor in shard.tensors.items()
    )
    made.update(json.dumps([listing, [(shard.path.name, shard.size) for shard in shards]]).encode())
    for part in _sampled(shards):
        made.update(part)
    return f"sha256-samples:{made.hexdigest()}"


def _sampled(shards: Sequence[Shard]) -> list[bytes]:
    """Return the sha256 of each file's samples."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 -- only large checkpoints need it

    sizes = [(tensor.nbytes, name) for shard in shards for name, tensor in shard.tensors.items()]
    chosen = {name for _, name in sorted(sizes, reverse=True)[:_TENSORS]}
    total = sum(shard.size for shard in shards)

    def sample(shard: Shard) -> bytes:
        made = hashlib.sha256()
        places = sorted(_places(shard, chosen, max(2, round(_SPREAD * shard.size / total))))
        _read(shard, ((place, _SAMPLE) for place in places), made.update)
        return made.digest()

    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(sample, shards))


def _places(shard: Shard, chosen: Collection[str], spread: int) -> set[int]:
    """Return the bytes of a file at which samples begin."""
    first, last = shard.data_start, max(shard.size - _SAMPLE, shard.data_start)
    found = {first + (last - first) * step // (spread - 1) for step in range(spread)}
    for name in shard.tensors.keys() & chosen:
        begin, end = shard.span(name)
        found.add(begin + max(end - begin - _SAMPLE, 0) // 2)
    return found


def _read(shard: Shard, pieces: Iterator[tuple[int, int]], use: Callable[[bytes], None]) -> None:
    """Give `use` the bytes of each (place, length), the last one up to the file's end."""
    try:
        with shard.path.open("rb", buffering=0) as handle:
            for place, length in pieces:
                done, wanted = 0, min(length, shard.size - place)
                while done < wanted:
                    block = os.pread(handle.fileno(), wanted - done, place + done)
                    if not block:
                        raise CheckpointError(
                            f"{shard.path}: byte {place + done}: the file became shorter while it was read",
                            remedy="wait until it is written, then try again",
                        )
                    use(block)
                    done += len(block)
    except OSError as error:
        raise _unreadable(shard.path, error) from error


def _unreadable(path: Path | None, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read: {error.strerror}", remedy="check the path and its permissions")

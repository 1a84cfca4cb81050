"""Writing a conversion: whole or not at all, in bounded memory, every tensor's bytes as they were.

It is written into a folder `.NAME.draftgate-*` beside the destination, which the writer holds a lock on, and renamed
when it is complete and on disk. What a killed writer left has no lock; the next conversion to that destination removes
it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.checkpoint.header import HEADER_LIMIT, Shard, Tensor
from harness.checkpoint.read import Checkpoint, read
from harness.convert.plan import Plan
from harness.errors import CheckpointError, HarnessError, UsageError

__all__ = ["DiskFullError", "files", "require_place", "write"]

_BLOCK = 8 << 20
"""Bytes copied at a time where the kernel does not copy by itself."""
_SPARE = 1 << 20
"""Bytes of free space beyond what is written, for folders and the file system's own records."""
_MARK = ".draftgate-"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".onnx", ".h5", ".msgpack")


class DiskFullError(HarnessError):
    """There is not enough space. Nothing is left behind."""


def require_place(plan: Plan, where: Path, destination: Path) -> None:
    """Raise `UsageError` if the destination is there, inside of the source, or nowhere."""
    if os.path.lexists(destination):
        raise UsageError(f"{destination}: exists", remedy="name a folder that does not exist: nothing is overwritten")
    if not destination.parent.is_dir():
        raise UsageError(f"{destination.parent}: no such folder", remedy="make it first")
    place = destination.parent.resolve() / destination.name
    source = plan.drafter.checkpoint.folder
    roots = [source, source.resolve(), *([where] if where.is_dir() else [])]
    # A snapshot of a Hugging Face cache belongs to its repository's folder.
    roots += [root.parent.parent for root in roots if root.parent.name == "snapshots"]
    inside = next((root for root in roots if place.is_relative_to(root.resolve())), None)
    if inside is not None and not (where.is_file() and where.suffix == ".safetensors"):
        raise UsageError(f"{destination}: is inside of the source {inside}", remedy="name a folder outside of it")


def write(plan: Plan, where: Path, destination: Path) -> Path:
    """Write a conversion. `where` is the source as the person named it. Returns the destination.

    Memory: the headers, and 8 MiB. Raises:
        UsageError: the destination cannot be used.
        DiskFullError: there is not, or no longer, enough space.
        CheckpointError: the source cannot be read, or changed meanwhile.

    """
    require_place(plan, where, destination)
    headers = {shard.path: _Header.of(plan, shard, last=shard is _last(plan)) for shard in _shards(plan)}
    extra = {name: _text(value) for name, value in _json_files(plan).items()}
    copied = _others(plan, where)
    need = sum(header.size for header in headers.values()) + sum(len(text) for text in extra.values())
    need += sum(path.stat().st_size for path in copied)
    try:
        _remove_abandoned(destination)
        _require_space(destination.parent, need)
        with _temporary(destination) as folder:
            for shard in _shards(plan):
                _write_shard(folder / _relative(plan, shard), headers[shard.path], shard)
            for path in copied:
                _copy_file(path, folder / path.name)
            for name, text in extra.items():
                _write_bytes(folder / name, text)
            written = read(folder)
            _require_same(plan, written)
            _sync_folders(folder)
            _move(folder, destination)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"{destination}: the disk ran full; what was written is removed",
                remedy="make room, or name another disk",
            ) from error
        raise HarnessError(
            f"{destination}: cannot be written: {error}", remedy="check the path and permissions"
        ) from error
    return destination


def files(plan: Plan, where: Path) -> list[tuple[str, int]]:
    """Return the files that would be written, with their sizes in bytes."""
    shards = [
        (_relative(plan, shard), _Header.of(plan, shard, last=shard is _last(plan)).size) for shard in _shards(plan)
    ]
    texts = [(name, len(_text(value))) for name, value in _json_files(plan).items()]
    return [*shards, *((path.name, path.stat().st_size) for path in _others(plan, where)), *texts]


def _shards(plan: Plan) -> list[Shard]:
    """Return the files that keep a tensor, or get one."""
    every = plan.drafter.checkpoint.shards
    kept = [shard for shard in every if any(name in plan.names for name in shard.tensors)]
    return kept or list(every[:1])


def _last(plan: Plan) -> Shard:
    return _shards(plan)[-1]


def _relative(plan: Plan, shard: Shard) -> str:
    return shard.path.relative_to(plan.drafter.checkpoint.folder).as_posix()


class _Header:
    """A file's new header. `moves`: runs of data as (from in the old file, to in the new file, bytes)."""

    def __init__(self, raw: bytes, moves: list[tuple[int, int, int]], added: bytes, size: int) -> None:
        self.raw = raw
        self.moves = moves
        self.added = added
        self.size = size

    @classmethod
    def of(cls, plan: Plan, shard: Shard, *, last: bool) -> _Header:
        position = 0
        runs: list[tuple[int, int, int]] = []
        entries: dict[str, Any] = {"__metadata__": dict(shard.metadata)} if shard.metadata else {}
        for old, tensor in sorted(shard.tensors.items(), key=lambda item: item[1].data_offsets):
            if old not in plan.names:
                continue
            entries[plan.names[old]] = _entry(tensor.dtype, tensor.shape, position, tensor.nbytes)
            begin, _ = shard.span(old)
            if runs and runs[-1][0] + runs[-1][2] == begin:
                start, to, size = runs[-1]
                runs[-1] = (start, to, size + tensor.nbytes)
            else:
                runs.append((begin, position, tensor.nbytes))
            position += tensor.nbytes
        added = b""
        for name, (dtype, shape, data) in plan.added.items() if last else ():
            entries[name] = _entry(dtype, shape, position, len(data))
            position += len(data)
            added += data
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # safetensors aligns the data so
        if len(text) > HEADER_LIMIT:
            raise CheckpointError(
                f"{shard.path}: its new header of {len(text)} bytes exceeds the format's limit of {HEADER_LIMIT}",
                remedy="split the file",
            )
        raw = struct.pack("<Q", len(text)) + text
        moves = [(begin, len(raw) + to, size) for begin, to, size in runs if size]
        return cls(raw, moves, added, len(raw) + position)


def _entry(dtype: str, shape: tuple[int, ...], position: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}


def _text(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


class _IndexMetadata(msgspec.Struct):
    metadata: Any = None


def _json_files(plan: Plan) -> dict[str, Mapping[str, Any]]:
    """Return config.json and, where the source has one, the index."""
    found: dict[str, Mapping[str, Any]] = {"config.json": plan.config}
    source = plan.drafter.checkpoint.files
    if source.index_file is None:
        return found
    metadata = msgspec.json.decode(source.index_file.read_bytes(), type=_IndexMetadata).metadata
    total = sum(
        tensor.nbytes
        for shard in plan.drafter.checkpoint.shards
        for name, tensor in shard.tensors.items()
        if name in plan.names
    ) + sum(len(data) for _, _, data in plan.added.values())
    places = {
        plan.names[name]: _relative(plan, shard)
        for shard in _shards(plan)
        for name in shard.tensors
        if name in plan.names
    }
    places |= dict.fromkeys(plan.added, _relative(plan, _last(plan)))
    others = metadata if isinstance(metadata, dict) else {}
    found[source.index_file.name] = {
        "metadata": {**others, "total_size": total},
        "weight_map": dict(sorted(places.items())),
    }
    return found


def _others(plan: Plan, where: Path) -> list[Path]:
    """Return the small files beside the weights that go along: tokenizer, licence, card."""
    if where.is_file() and where.suffix == ".safetensors":
        return []
    source = plan.drafter.checkpoint.files
    folder = source.folder.resolve()
    roots = [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]
    return [
        path
        for path in sorted(source.folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and path.name != "config.json"
        and not path.name.endswith(".safetensors.index.json")
        and any(path.resolve().is_relative_to(root) for root in roots)
    ]


def _require_space(folder: Path, need: int) -> None:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if need + _SPARE > free:
        raise DiskFullError(
            f"{folder}: {need:,} bytes are to be written, {free:,} are free", remedy="make room, or name another disk"
        )


def _remove_abandoned(destination: Path) -> None:
    """Remove what killed writers of this destination left; refuse while another one is at work on it."""
    begin = f".{destination.name}{_MARK}"
    for path in [path for path in destination.parent.iterdir() if path.name.startswith(begin) and path.is_dir()]:
        with contextlib.suppress(FileNotFoundError), _locked(path) as mine:
            if not mine:
                raise UsageError(f"{destination}: another conversion is writing it, in {path}", remedy="wait for it")
            shutil.rmtree(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder, without waiting. Yields whether it is held. The kernel drops a dead process's lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _temporary(destination: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}{_MARK}", dir=destination.parent))
    try:
        with _locked(folder) as mine:
            if not mine or not folder.is_dir():
                raise UsageError(f"{destination}: another conversion is writing it", remedy="wait for it")
            folder.chmod(0o777 & ~_umask())
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_shard(path: Path, header: _Header, shard: Shard) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(source)
        with path.open("xb", buffering=0) as handle:
            out = handle.fileno()
            _put(out, header.raw, 0)
            os.ftruncate(out, header.size)
            for begin, to, size in header.moves:
                _copy(source, out, begin, to, size, shard.path)
            _put(out, header.added, header.size - len(header.added))
            os.fsync(out)
        after = os.fstat(source)
        if before.st_size != shard.size or (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise CheckpointError(f"{shard.path}: changed while it was read", remedy="convert again when it is at rest")
    finally:
        os.close(source)


def _put(out: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(out, view[:_BLOCK], at)
        view, at = view[done:], at + done


def _copy(source: int, out: int, begin: int, to: int, size: int, path: Path) -> None:
    """Copy a range of bytes. Holes of the source stay holes: the new file has its length already."""
    end = begin + size
    shift = to - begin
    while begin < end:
        try:
            begin = os.lseek(source, begin, os.SEEK_DATA)
            stop = min(os.lseek(source, begin, os.SEEK_HOLE), end)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end of the file
                return
            stop = end  # a file system that does not tell
        if begin < end:
            _copy_data(source, out, begin, begin + shift, stop - begin, path)
        begin = stop


def _copy_data(source: int, out: int, begin: int, to: int, size: int, path: Path) -> None:
    by_kernel = True
    while size > 0:
        if by_kernel:
            try:
                done = os.copy_file_range(source, out, min(size, 1 << 30), begin, to)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    raise
                done = 0
            # Between file systems, and on some of them, the kernel does not.
            by_kernel = done > 0
            if not by_kernel:
                continue
        else:
            block = os.pread(source, min(size, _BLOCK), begin)
            if not block:
                raise CheckpointError(f"{path}: became shorter while it was read", remedy="convert again at rest")
            done = os.pwrite(out, block, to)
        begin, to, size = begin + done, to + done, size - done


def _copy_file(source: Path, path: Path) -> None:
    with source.open("rb") as old, path.open("xb") as new:
        shutil.copyfileobj(old, new, _BLOCK)
        new.flush()
        os.fsync(new.fileno())


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("xb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _require_same(plan: Plan, written: Checkpoint) -> None:
    """Raise `HarnessError` unless what was written, read again, is what was planned."""

    def facts(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        return tensor.dtype, tensor.shape

    wanted = {plan.names[old]: facts(t) for old, t in plan.drafter.checkpoint.tensors.items() if old in plan.names}
    wanted |= {name: (dtype, shape) for name, (dtype, shape, _) in plan.added.items()}
    if {name: facts(tensor) for name, tensor in written.tensors.items()} != wanted:
        raise HarnessError(f"{written.folder}: what was written is not what was planned", remedy="report this")


def _sync_folders(folder: Path) -> None:
    for place, _, _ in os.walk(folder, topdown=False):
        _sync(Path(place))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(folder: Path, destination: Path) -> None:
    # A rename replaces an empty folder without a word; a filled one it refuses.
    if os.path.lexists(destination):
        raise UsageError(f"{destination}: was made by somebody else meanwhile", remedy="name another folder")
    folder.rename(destination)
    _sync(destination.parent)

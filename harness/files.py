"""Files that several processes share, and none of them reads half written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["exclusive", "sha256_of", "write_atomically"]


@contextlib.contextmanager
def exclusive(lock: Path, *, waiting: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Hold `lock` against every other process; `waiting` is called once if another one has it.

    Yields the descriptor that holds it. A child that is passed the descriptor goes on holding the lock should its
    parent be killed, so an orphan is waited for. The kernel drops the lock when the last holder ends: none is stale.
    The file itself stays, for removing it would let two processes hold locks on two files of the same name.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a machine that loses power, sees the old file or the whole new one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

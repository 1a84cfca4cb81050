"""Files that several processes share, and none of them reads half written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["exclusive", "new_beside", "sha256_of", "write_atomically"]


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
    """Write `text` so that a reader, or a machine that loses power, sees the old file or the whole new one.

    Who may read and write it stays as it was; a new file is as the umask says.
    """
    made = new_beside(path)
    try:
        with made.open("w", encoding="utf-8") as handle:
            handle.write(text)
            with contextlib.suppress(FileNotFoundError):
                former = stat.S_IMODE(path.stat().st_mode)
                if former != stat.S_IMODE(os.fstat(handle.fileno()).st_mode):
                    os.fchmod(handle.fileno(), former)
            handle.flush()
            os.fsync(handle.fileno())
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def new_beside(path: Path) -> Path:
    """Make an empty file in `path`'s folder, hidden and with a name of its own, to become `path` when it is complete.

    The kernel applies the umask, as to any new file; `tempfile` would make one that only its owner may read.
    """
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    made.touch(exist_ok=False)
    return made


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

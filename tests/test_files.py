"""Locks that outlive their holder's parent, and files that are never half written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.files import exclusive, sha256_of, write_atomically

HOLD = """
import subprocess, sys
from pathlib import Path
from harness.files import exclusive
with exclusive(Path(sys.argv[1])) as held:
    child = subprocess.Popen(["cat"], stdin=0, stdout=subprocess.DEVNULL, pass_fds=(held,))
    print("held", flush=True)
"""
TRY = """
import sys
from collections.abc import Iterator
from pathlib import Path
from harness.files import exclusive
with exclusive(Path(sys.argv[1]), waiting=lambda: print("waiting", flush=True)):
    print("got it", flush=True)
"""


def start(program: str, lock: Path, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(lock)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        **options,
    )


def test_a_lock_is_held_for_as_long_as_a_child_has_it(tmp_path: Path) -> None:
    holder = start(HOLD, tmp_path / "lock", stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    holder.wait()  # the process that took the lock is gone; its child, which reads our pipe, is not
    other = start(TRY, tmp_path / "lock")
    assert other.stdout.readline() == "waiting\n"
    assert other.poll() is None
    holder.stdin.close()
    assert other.stdout.read() == "got it\n"
    assert other.wait() == 0
    holder.stdout.close()
    other.stdout.close()


def test_a_free_lock_does_not_wait(tmp_path: Path) -> None:
    waited: list[bool] = []
    for _ in range(2):
        with exclusive(tmp_path / "new" / "lock", waiting=lambda: waited.append(True)):
            pass
    assert waited == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask of this process for one test."""
    former = os.umask(request.param)
    yield request.param
    os.umask(former)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], indirect=True)
def test_a_new_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int) -> None:
    write_atomically(tmp_path / "file", "text")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("umask", [0o022], indirect=True)
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, umask: int, mode: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode)
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file").startswith("ba7816bf8f01cfea")

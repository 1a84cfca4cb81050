"""Which entries of /dev/shm a server made, so that they can be removed. Standard library only: the guardian runs it."""

from __future__ import annotations

import os
from pathlib import Path

from harness.servers import tree

__all__ = ["SharedMemory"]

# An entry is attributed to the server if one of its processes holds it open or mapped in one of the first looks after
# it appeared. Later looks are not worth reading every process's maps: whoever made an entry holds it at first.
_LOOKS = 10


class SharedMemory:
    """The entries that appeared since construction. `owned` holds the names of those the server's processes held."""

    def __init__(self, folder: Path = Path("/dev/shm")) -> None:  # noqa: S108 -- POSIX shared memory lives there
        self._folder = folder
        self._before = self._list()
        self._looks: dict[tuple[str, int], int] = {}
        self._owned: set[tuple[str, int]] = set()

    def look(self, root: tree.Root, seen: set[tuple[int, int]], *, last: bool = False) -> None:
        """Attribute new entries. `last` also looks again at those that nobody was seen to hold."""
        new = self._list() - self._before - self._owned
        self._looks = {entry: self._looks.get(entry, 0) + 1 for entry in new}
        if not any(last or count <= _LOOKS for count in self._looks.values()):
            return
        held: set[str] = set()
        for member in tree.find(root, seen):
            held |= self._held_by(member.pid)
        self._owned |= {entry for entry in new if entry[0] in held}

    def remove(self) -> tuple[list[str], list[str]]:
        """Remove the server's entries; return the paths removed, and those new ones whose owner nobody saw."""
        present = self._list()
        removed = sorted(name for name, _ in self._owned & present)
        for name in removed:
            (self._folder / name).unlink(missing_ok=True)
        unknown = sorted(name for name, _ in present - self._before - self._owned)
        return [str(self._folder / name) for name in removed], [str(self._folder / name) for name in unknown]

    def _list(self) -> set[tuple[str, int]]:
        """Return (name, inode) of each file: a name that was removed and made again is another entry."""
        try:
            with os.scandir(self._folder) as entries:
                return {(entry.name, entry.inode()) for entry in entries if entry.is_file(follow_symlinks=False)}
        except OSError:  # a container may have none; then nothing can be left in it
            return set()

    def _held_by(self, pid: int) -> set[str]:
        prefix = f"{self._folder}/"
        held: set[str] = set()
        process = Path(f"/proc/{pid}")
        try:
            for link in (process / "fd").iterdir():
                target = str(link.readlink())
                if target.startswith(prefix):
                    held.add(target.removeprefix(prefix))
        except OSError:  # it ended while it was read; what was seen counts
            pass
        try:
            for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
                _, separator, name = line.partition(prefix)
                if separator:
                    held.add(name)
        except OSError:
            pass
        return held

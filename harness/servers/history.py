"""How long servers took to start before: a hint for the display, never evidence."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.servers.spec import ServerSpec

__all__ = ["History"]

_KEPT_TIMES = 10
_KEPT_SPECS = 200


class History:
    """Start-up times in `path`, a JSON object of spec key to {name, seconds}, newest last.

    Written atomically under a lock, so that concurrent runs lose nothing. A file that is damaged or cannot be written
    costs the hint, not the run.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Use `path`, by default `draftgate/startup-times.json` below XDG_CACHE_HOME (else ~/.cache)."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = path or cache / "draftgate" / "startup-times.json"

    def usual_s(self, spec: ServerSpec) -> float | None:
        """Return the median time of this very spec, else of those of its name, else None. In seconds."""
        data = self._read()
        times = data.get(spec.key, {}).get("seconds", [])
        if not times:  # a key changes with every path in the command; the name tells kindred starts
            times = [value for entry in data.values() if entry["name"] == spec.name for value in entry["seconds"]]
        return statistics.median(times) if times else None

    def record(self, spec: ServerSpec, seconds: float) -> None:
        """Add a start that took `seconds`."""
        with contextlib.suppress(OSError):  # a read-only or full cache
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                data = self._read()
                times = data.pop(spec.key, {}).get("seconds", [])
                data[spec.key] = {"name": spec.name, "seconds": [*times, round(seconds, 3)][-_KEPT_TIMES:]}
                self._write(dict(list(data.items())[-_KEPT_SPECS:]))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return {key: entry for key, entry in data.items() if _is_sound(entry)} if isinstance(data, dict) else {}

    def _write(self, data: dict[str, Any]) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(data, file)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _is_sound(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("seconds"), list)
        and all(isinstance(value, int | float) for value in entry["seconds"])
    )

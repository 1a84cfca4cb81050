"""Where one process of the engine writes its evidence, and its faults: one JSON file per stage, replaced atomically."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT = 1
"""Version of the files; docs/evidence.md."""


class Journal:
    """The evidence folder as one process sees it. A fault never reaches the engine; it makes the run INVALID."""

    def __init__(
        self, folder: Path, target: str, drafter: str, engine: str, engine_version: str, engine_path: str = ""
    ) -> None:
        self.folder = folder
        self.target = target
        self.drafter = drafter
        self.engine = engine
        self.engine_version = engine_version
        self.engine_path = engine_path
        self.faults: list[str] = []
        self.attached: list[str] = []

    @classmethod
    def from_environment(cls, engine: str, engine_version: str, engine_path: str) -> Journal | None:
        """Return the journal the harness asked for, or None: then the probe does nothing at all.

        `engine_path` is the folder that the engine's package was imported from.
        """
        folder = os.environ.get("DRAFTGATE_PROBE_DIR")
        if not folder:
            return None
        target = os.environ.get("DRAFTGATE_PROBE_TARGET", "")
        drafter = os.environ.get("DRAFTGATE_PROBE_DRAFTER", "")
        return cls(Path(folder), target, drafter, engine, engine_version, engine_path)

    def is_drafter(self, path: object) -> bool:
        """Say whether a path given to the engine is the drafter's (and not the target's as well)."""
        if not self.drafter or self.drafter == self.target:
            return False
        return str(path) == self.drafter or os.path.realpath(str(path)) == os.path.realpath(self.drafter)

    def write(self, stage: str, body: dict[str, Any], suffix: str = "") -> None:
        """Write this process's file for one stage, replacing the previous one as a whole."""
        record = {
            "format": FORMAT,
            "stage": stage,
            "pid": os.getpid(),
            "engine": self.engine,
            "engine_version": self.engine_version,
            "engine_path": self.engine_path,
            "target": self.target,
            "drafter": self.drafter,
            **body,
        }
        name = f"{stage}-{os.getpid()}{suffix}.json"
        scratch = self.folder / f".{name}.tmp"
        try:
            scratch.write_text(json.dumps(record, default=repr))
            scratch.replace(self.folder / name)
        except OSError as error:
            # The reader misses the file and says so; the engine must not suffer for it.
            print(f"draftgate probe: cannot write {name}: {error}", file=sys.stderr)

    def fault(self, where: str, error: BaseException) -> None:
        """Record that the probe itself failed: whatever it wrote must not be trusted."""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        frames = traceback.extract_tb(error.__traceback__)
        at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        fault = f"{where}: {text}{at}"
        if fault not in self.faults:
            self.faults.append(fault)
            self.write_process()

    def write_process(self) -> None:
        """Say that this process has the probe in it, what it hooked and what failed."""
        self.write("process", {"argv": sys.argv[:4], "attached": self.attached, "faults": self.faults})

    def attach(self, what: str, hook: Callable[[], None]) -> None:
        """Install one hook; if it cannot be installed, record that as a fault."""
        try:
            hook()
        except Exception as error:  # noqa: BLE001 -- the engine must start whatever our hook does
            self.fault(f"cannot attach {what}", error)
        else:
            self.attached.append(what)

    def guard(self, where: str, step: Callable[[], None]) -> None:
        """Run one step of the recorder; an exception becomes a fault, never the engine's problem."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 -- as above
            self.fault(where, error)

"""Record which keys of the drafter's config the engine's code reads, in this process.

Every instance of the config library's base class is watched, because an engine wraps and copies a drafter's config
before anyone can say whose it is; whose each one was is decided when the evidence is written.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .journal import Journal

_NOT_THE_ENGINE = {
    "transformers", "huggingface_hub", "copy", "copyreg", "dataclasses", "pickle", "cloudpickle", "json", "pydantic",
    "pprint", "reprlib", "inspect", "typing", "functools", "draftgate_probe",
}  # fmt: skip
"""Top-level modules whose reads are copying, checking or printing, not honouring a key."""

_DEBOUNCE = 0.3
"""Seconds after the last new read until the file is rewritten."""

_MARKER_EVERY = 64
"""Reads between two looks for another process's word that the evidence is complete."""


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every leaf; dicts inside lists count their position."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for position, item in enumerate(value):
            yield from flatten(item, f"{path}.{position}")
    else:
        yield path, value


class TracedDict(dict):  # type: ignore[type-arg]  # a config's dict holds anything
    """A nested dict of a config that reports reads by key. It pickles and copies as a plain dict."""

    def __init__(self, value: dict[str, Any], path: str, note: Any) -> None:
        super().__init__(
            {key: traced(item, f"{path}.{key}" if path else str(key), note) for key, item in value.items()}
        )
        self._path = path
        self._note = note

    def _seen(self, key: object, *, there: bool) -> None:
        if not torch.compiler.is_compiling():
            path = f"{self._path}.{key}" if self._path else str(key)
            self._note(path, dict.get(self, key), there, sys._getframe(2))  # noqa: SLF001 -- who asks is the fact

    def __getitem__(self, key: Any) -> Any:
        self._seen(key, there=key in self.keys())
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As dict.get, and noted."""
        self._seen(key, there=key in self.keys())
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As dict.pop, and noted."""
        self._seen(key, there=key in self.keys())
        return super().pop(key, *default)

    def __contains__(self, key: object) -> bool:
        there = super().__contains__(key)
        if not there:  # finding it is followed by a read; not finding it is the fact
            self._seen(key, there=False)
        return there

    def plain(self) -> dict[str, Any]:
        """Return an untraced copy."""
        return {key: item.plain() if isinstance(item, TracedDict) else item for key, item in self.items()}

    def __reduce__(self) -> Any:
        return (dict, (self.plain(),))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __copy__(self) -> Any:
        return self.plain()

    def copy(self) -> Any:
        """As dict.copy: a plain one."""
        return self.plain()


def traced(value: Any, path: str, note: Any) -> Any:
    """Return a value with the dicts in it traced."""
    if type(value) is dict:
        return TracedDict(value, path, note)
    if type(value) is list and any(type(item) is dict for item in value):
        return [traced(item, f"{path}.{position}", note) for position, item in enumerate(value)]
    return value


class ConfigReads:
    """The reads of one process, until `remove`."""

    def __init__(self, journal: Journal, base: Any) -> None:
        """Watch instances of `base`: transformers' PretrainedConfig."""
        self._journal = journal
        self._base = base
        self._original: Any = None
        self._original_dict: Any = None
        self._watched: dict[int, Any] = {}  # id -> the config object, kept alive so that the id stays its own
        self._mine: set[int] = set()
        self._reads: dict[tuple[int, str], tuple[set[str], set[str], bool]] = {}
        self._count = 0
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._file = self._read_file()

    def _read_file(self) -> dict[str, Any]:
        file = Path(self._journal.drafter) / "config.json"
        return dict(json.loads(file.read_text())) if file.is_file() else {}

    def learn_file(self, found: dict[str, Any]) -> None:
        """Take the file's contents from the config library, where the drafter is not a folder (a hub name)."""
        if not self._file:
            self._file = json.loads(json.dumps(found, default=repr))

    def forked(self) -> None:
        """Begin anew in a forked child: the parent's reads are the parent's evidence."""
        self._lock = threading.RLock()
        self._timer = None
        self._reads = {}

    def install(self) -> None:
        """Begin to watch."""
        reads, journal, original = self, self._journal, self._base.__getattribute__

        def __getattribute__(config: Any, name: str) -> Any:  # noqa: N807 -- it becomes the method
            if name.startswith("_") or torch.compiler.is_compiling():
                return original(config, name)
            try:
                value = original(config, name)
            except AttributeError:
                reads.note_attribute(config, name, None, there=False, frame=sys._getframe(1))  # noqa: SLF001 -- as above
                raise
            return reads.note_attribute(config, name, value, there=True, frame=sys._getframe(1))  # noqa: SLF001 -- as above

        self._original = original
        self._base.__getattribute__ = __getattribute__
        unbound = self._base.__dict__["get_config_dict"].__func__
        self._original_dict = self._base.__dict__["get_config_dict"]

        def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
            path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            found, rest = unbound(cls, *args, **kwargs)
            if journal.is_drafter(path):
                reads.learn_file(found)
                found = traced(found, "", reads.note_raw)
            return found, rest

        self._base.get_config_dict = classmethod(get_config_dict)

    def remove(self) -> None:
        """Stop watching and write what was seen."""
        if self._original is not None:
            self._base.__getattribute__ = self._original
            self._base.get_config_dict = self._original_dict
            self._original = None
        self.write()
        self._watched.clear()

    def _is_target(self, held: dict[str, Any]) -> bool:
        return str(held.get("_name_or_path", "")) == self._journal.target != self._journal.drafter

    def claim(self, config: Any) -> None:
        """Say that a config object is the drafter's, with the configs it is made of."""
        if not isinstance(config, self._base) or id(config) in self._mine:
            return
        self._watched[id(config)] = config
        self._mine.add(id(config))
        for value in list(vars(config).values()):
            self.claim(value)

    def note_raw(self, path: str, value: Any, there: bool, frame: Any) -> None:
        """Note a read of the file's own dict, before any config object was made of it."""
        self._note(0, path, value, there=there, frame=frame)

    def note_attribute(self, config: Any, name: str, value: Any, *, there: bool, frame: Any) -> Any:
        """Note a read of an attribute; returns the value, a nested dict of a drafter's config as a traced one."""
        if self._original is None:
            return value
        try:
            held = object.__getattribute__(config, "__dict__")
            name = object.__getattribute__(config, "attribute_map").get(name, name)
            if name in held or not there:
                self._watched.setdefault(id(config), config)
                if type(value) is dict and held.get(name) is value and not self._is_target(held):
                    value = held[name] = TracedDict(value, name, self._noter(id(config)))
                self._note(id(config), name, value, there=there, frame=frame)
        except Exception as error:  # noqa: BLE001 -- a read of a config must work whatever we do
            self._journal.fault("recording a config read", error)
        return value

    def _noter(self, owner: int) -> Any:
        def note(path: str, value: Any, there: bool, frame: Any) -> None:
            self._note(owner, path, value, there=there, frame=frame)

        return note

    def _note(self, owner: int, path: str, value: Any, *, there: bool, frame: Any) -> None:
        reader = self._reader(frame)
        if reader.partition(".")[0] in _NOT_THE_ENGINE:
            return
        with self._lock:
            self._count += 1
            if self._count % _MARKER_EVERY == 0 and any(self._journal.folder.glob("complete-*")):
                self.remove()
                return
            readers, seen, _ = self._reads.get((owner, path), (set(), set(), there))
            text = repr(value.plain() if isinstance(value, TracedDict) else value)[:200]
            if reader in readers and text in seen:
                return
            self._reads[(owner, path)] = ({*readers, reader}, {*seen, text} if there else seen, there)
            self._schedule()

    def _reader(self, frame: Any) -> str:
        """Return the module that asks: the caller, or the caller of the config library's property that asks."""
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            name = frame.f_code.co_name
            through = module.partition(".")[0] in {"transformers", "draftgate_probe"}
            if not through or not (name == "__getattribute__" or self._is_property(frame, name)):
                return module
            frame = frame.f_back
        return ""

    def _is_property(self, frame: Any, name: str) -> bool:
        owner = frame.f_locals.get("self")
        return isinstance(owner, self._base) and isinstance(getattr(type(owner), name, None), property)

    def _schedule(self) -> None:
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(_DEBOUNCE, self.write)
            self._timer.daemon = True
            self._timer.start()

    def write(self) -> None:
        """Write the reads of the drafter's configs so far."""
        with self._lock:
            for config in list(self._watched.values()):
                if self._journal.is_drafter(vars(config).get("_name_or_path", "")):
                    self.claim(config)
            reads: dict[str, dict[str, Any]] = {}
            for (owner, path), (readers, seen, there) in self._reads.items():
                if owner and owner not in self._mine:
                    continue
                row = reads.setdefault(path, {"path": path, "readers": [], "seen": [], "there": False})
                row["readers"] = sorted({*row["readers"], *readers})
                row["seen"] = sorted({*row["seen"], *seen})
                row["there"] = row["there"] or there
            leaves = [{"path": path, "value": value} for path, value in flatten(self._file)]
            held = {name for config in self._watched.values() if id(config) in self._mine for name in vars(config)}
            body = {"file": leaves, "attributes": sorted(held), "reads": list(reads.values())}
            self._journal.write("config", body)

"""A baseline as a text file: TOML, one fact a line, in one order, so that a difference reads well in a review."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.baseline.model import SCHEMA, Baseline, CaseFacts
from harness.errors import UsageError

__all__ = ["content", "parse", "path_of", "read", "read_all", "render"]

_HEADER = "# A reference of draftgate, written by `draftgate bless` and not by hand. See docs/baselines.md.\n"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_REMEDY = "take the file back from version control, or delete it and bless a run again"


def path_of(folder: Path, case: CaseFacts) -> Path:
    """Return the file of a case: its pair, engine, runner and device class in the name."""
    parts = (case.pair, case.engine, case.runner, case.device)
    return folder / ("--".join(re.sub(r"[^A-Za-z0-9._+]+", "-", part).strip("-.") for part in parts) + ".toml")


def render(baseline: Baseline) -> str:
    """Return the file's text: the same for the same baseline, byte for byte."""
    return _HEADER + "".join(_table("", msgspec.to_builtins(baseline, str_keys=True)))


def _table(name: str, data: Mapping[str, Any]) -> Iterator[str]:
    if name:
        yield f"\n[{name}]\n"
    for key, value in data.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{_key(key)} = {_value(value)}\n"
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _table(f"{name}.{_key(key)}" if name else _key(key), value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        if any(isinstance(item, str) for item in value):
            return "[\n" + "".join(f"    {_string(item)},\n" for item in value) + "]"
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value, allow_nan=False)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped, and lone surrogates, which are no text.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read(path: Path) -> Baseline:
    """Return the baseline that a file holds.

    Raises:
        UsageError: it cannot be read, is not TOML, is of another schema, has an unknown, missing or wrong key, or
            contradicts itself. The message names the file and the key.

    """
    return parse(content(path), str(path))


def content(path: Path) -> str:
    """Return a file's text. Raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}", remedy=_REMEDY) from error


def read_all(folder: Path) -> dict[Path, Baseline]:
    """Return every baseline of a folder. Raises UsageError if there is no such folder, or as `read` does."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of baselines", remedy="make one: `draftgate bless RUN --yes`")
    return {path: read(path) for path in sorted(folder.glob("*.toml"))}


def parse(text: str, source: str) -> Baseline:
    """Return the baseline in a text; `source` names it in errors. Raises UsageError as `read` does."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: is not TOML: {error}", remedy=_REMEDY) from error
    schema = data.get("schema")
    if type(schema) is not int:
        raise UsageError(f"{source}: schema is {schema!r}, not a number", remedy=_REMEDY)
    if schema != SCHEMA:
        remedy = "update draftgate" if schema > SCHEMA else "delete the file and bless a run again"
        raise UsageError(f"{source}: is of schema {schema}, and this draftgate reads {SCHEMA}", remedy=remedy)
    for key, number in _numbers("", data):
        if not math.isfinite(number):
            raise UsageError(f"{source}: {key} is {number}, which measures nothing", remedy=_REMEDY)
    try:
        baseline = msgspec.convert(data, Baseline, str_keys=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {str(error).replace('$.', '')}", remedy=_REMEDY) from error
    for key, problem in baseline.faults():
        raise UsageError(f"{source}: {key} {problem}", remedy=_REMEDY)
    return baseline


def _numbers(name: str, data: Any) -> Iterator[tuple[str, float]]:
    """Yield each floating-point number with its key."""
    if isinstance(data, float):
        yield name, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from _numbers(f"{name}.{key}" if name else key, value)
    elif isinstance(data, list):
        for value in data:
            yield from _numbers(name, value)

"""The reviewed table of causes and of the tests that separate them."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

from harness.errors import UsageError

__all__ = ["FILE", "Cause", "Test", "load"]

FILE = Path(__file__).with_name("causes.toml")


@dataclasses.dataclass(frozen=True)
class Test:
    """A way to learn more. `cost`: 0 nothing to run, 1 seconds without an engine, 2 a server's start, 3 hours."""

    name: str
    what: str
    command: str
    cost: int


@dataclasses.dataclass(frozen=True)
class Cause:
    """A known cause: why it shows as it does, what excludes and confirms it, which tests tell, and what helps."""

    code: str
    title: str
    why: str
    excluded: str
    confirmed: str
    tests: tuple[str, ...]
    remedy: str


@functools.cache
def load(path: Path = FILE) -> tuple[tuple[Cause, ...], Mapping[str, Test]]:
    """Return the causes in the order to look, and the tests by name.

    Raises:
        UsageError: a row lacks a key, has one too many, or names a test that is not there.

    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        tests = {name: Test(name, **row) for name, row in data.pop("test").items()}
        causes = tuple(Cause(code, **{**row, "tests": tuple(row["tests"])}) for code, row in data.items())
    except (TypeError, KeyError) as error:
        raise UsageError(f"{path}: a row lacks a key or has one too many: {error}") from error
    unknown = {name for cause in causes for name in cause.tests} - set(tests)
    if unknown:
        raise UsageError(f"{path}: no such test: {', '.join(sorted(unknown))}")
    return causes, tests

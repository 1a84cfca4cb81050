"""Everything a loader says while it runs: log records, warnings, and what it prints."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Printed(io.StringIO):
    """Keeps what is printed. Some code wants the stream's descriptor, to hand it to another program."""

    def fileno(self) -> int:
        """Return that of the process's own standard error."""
        return 2


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what is said into the list that is yielded. Loggers that do not propagate are heard as well."""
    said: list[str] = []
    original = logging.Logger.handle

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        said.append(f"{record.levelname} {record.name}: {record.getMessage()}")
        original(logger, record)

    printed = _Printed()
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)  # what a server runs at
    setattr(logging.Logger, "handle", handle)  # noqa: B010 -- a method is replaced, which assignment may not
    try:
        with (
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            yield said
    finally:
        setattr(logging.Logger, "handle", original)  # noqa: B010 -- as above
        root.setLevel(level)
        said += [f"WARNING {item.category.__name__}: {item.message}" for item in warned]
        said += [line for line in printed.getvalue().splitlines() if line.strip()]


def naming(said: list[str], key: str) -> list[str]:
    """Return what was said about one key: lines that hold its name, or all but the first part of its name."""
    return sorted({line for line in said if key in line})


def plain(value: Any) -> str:
    """Return a message on one line, cut to a length that a data file can hold."""
    return " ".join(str(value).split())[:300]

"""Show what a starting server is doing, for how long, and how long that usually takes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from harness.servers.history import History
from harness.servers.spec import ServerSpec

__all__ = ["Progress", "Row"]

_HEARTBEAT_S = 15.0


class Row(Protocol):
    """One starting server in the display."""

    def update(self, label: str) -> None:
        """Say what the server is doing now. Called several times a second, whether or not it changed."""


class Progress:
    """Shows starting servers on `stream`: live rows if it is a terminal, else plain lines.

    Pass a stream that reaches the person: under pytest's capture a duplicate of the terminal's, not `sys.stderr`.
    `history` knows, and is told, how long starts take. Safe to use from several threads.
    """

    def __init__(self, stream: TextIO, history: History) -> None:
        self._history = history
        self._view: _Live | _Lines = _Live(stream) if stream.isatty() else _Lines(stream)

    @contextlib.contextmanager
    def row(self, spec: ServerSpec) -> Iterator[Row]:
        """Show the start of `spec` while the context lasts; leaving it without an error means that it is ready."""
        begun = time.monotonic()
        usual_s = self._history.usual_s(spec)
        usual = f", usually {usual_s:.0f} s" if usual_s is not None else ""
        with self._view.row(spec.name, usual) as row:
            yield row
        self._history.record(spec, time.monotonic() - begun)


class _Lines:
    """A line when a server starts, changes phase, is ready or fails, and a heartbeat in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def row(self, name: str, usual: str) -> Iterator[Row]:
        row = _LineRow(self, name)
        row.say(f"starting{usual}")
        try:
            yield row
        except BaseException as error:
            row.say(f"failed: {type(error).__name__}")
            raise
        row.say("ready")

    def write(self, line: str) -> None:
        with self._lock:
            self._stream.write(f"{line}\n")
            self._stream.flush()


class _LineRow:
    def __init__(self, lines: _Lines, name: str) -> None:
        self._lines = lines
        self._name = name
        self._begun = self._said = time.monotonic()
        self._label: str | None = None

    def update(self, label: str) -> None:
        if label != self._label:
            self._label = label
            self.say(label)
        elif time.monotonic() - self._said >= _HEARTBEAT_S:
            self.say(f"still {label}")

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        self._lines.write(f"server {self._name}: {text} ({self._said - self._begun:.0f} s)")


class _Live:
    """One row a server, redrawn in place; a line stays behind for each that is ready or has failed."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._lock = threading.Lock()
        self._rows = 0
        self._display: RichProgress | None = None

    @contextlib.contextmanager
    def row(self, name: str, usual: str) -> Iterator[Row]:
        begun = time.monotonic()
        display, task = self._add(name, usual)
        outcome = "ready"
        try:
            yield _LiveRow(display, task)
        except BaseException as error:
            outcome = f"failed: {type(error).__name__}"
            raise
        finally:
            self._remove(display, task, f"server {name}: {outcome} ({time.monotonic() - begun:.0f} s)")

    def _add(self, name: str, usual: str) -> tuple[RichProgress, TaskID]:
        with self._lock:
            if self._display is None:
                self._display = RichProgress(
                    SpinnerColumn(),
                    TextColumn("server {task.fields[server]}: {task.description}", markup=False),
                    TimeElapsedColumn(),
                    TextColumn("{task.fields[usual]}", markup=False),
                    console=self._console,
                    transient=True,
                    # The streams are pytest's to redirect.
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._display.start()
            self._rows += 1
            return self._display, self._display.add_task("starting", total=None, server=name, usual=usual.lstrip(", "))

    def _remove(self, display: RichProgress, task: TaskID, last_words: str) -> None:
        with self._lock:
            display.remove_task(task)
            self._console.print(last_words, markup=False, highlight=False)
            self._rows -= 1
            if self._rows == 0:
                display.stop()
                self._display = None


class _LiveRow:
    def __init__(self, display: RichProgress, task: TaskID) -> None:
        self._display = display
        self._task = task

    def update(self, label: str) -> None:
        self._display.update(self._task, description=label)

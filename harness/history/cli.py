"""The commands `draftgate history` and `draftgate merge`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.history.store import Concluded, Measured

__all__ = ["add_parsers", "run_history", "run_merge"]

_FILTERS = ("pair", "engine", "suite")


def add_parsers(commands: Any) -> None:
    """Add both commands to argparse's subparsers."""
    history = commands.add_parser(
        "history",
        help="trends over runs, and the version with which a figure changed its level",
        description="Prints verdicts and figures of all runs in the history file, ordered by engine version, then "
        "time, and names the first version after each step.",
    )
    for name in _FILTERS:
        history.add_argument(f"--{name}", metavar="NAME", help=f"only this {name}")
    history.add_argument(
        "--metric", metavar="NAME",
        help="only this figure: accept_length, acceptance[.POSITION], speed_up[.CONCURRENCY], startup_s[.spec]",
    )  # fmt: skip
    history.add_argument("--json", action="store_true", help="the document that docs/history.md describes")
    place = history.add_mutually_exclusive_group()
    place.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="the folder of the runs (default: runs)"
    )
    place.add_argument("--db", type=Path, metavar="FILE", help="another history file than DIR/history.sqlite")
    history.add_argument(
        "--add", action="append", default=[], type=Path, metavar="RUN",
        help="first add this run, a folder or its record.json; may be given again",
    )  # fmt: skip
    merge = commands.add_parser(
        "merge",
        help="join the records of sharded or remote runs into one run",
        description="Unites the cases of several runs in a new run folder and prints its table. Exit status: that of "
        "the worst verdict.",
    )
    merge.add_argument("out", type=Path, metavar="OUT", help="the run folder to make")
    merge.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its record.json")


def run_history(arguments: argparse.Namespace) -> int:
    """Carry out `draftgate history`. Raises UsageError."""
    from harness.history import facts, show, store, trend  # noqa: PLC0415 -- keeps other commands quick
    from harness.report.text import one_line  # noqa: PLC0415 -- as above

    path = arguments.db or arguments.runs / store.FILE_NAME
    for run in [facts.read(run) for run in arguments.add]:
        print(f"draftgate: {one_line(run.id)}: {store.add(path, run)}", file=sys.stderr)
    kept = store.runs(path)
    concluded, measured = _filtered(store.concluded(path), store.measured(path), arguments)
    if arguments.metric is not None:
        wanted = [each for each in measured if arguments.metric in (each.metric, each.metric.partition(".")[0])]
        _found("--metric", arguments.metric, bool(wanted), (each.metric for each in measured))
        concluded, measured = [], wanted
    series, verdicts = trend.series(measured), trend.verdicts(concluded)
    try:
        if arguments.json:
            show.write_json(kept, verdicts, series, sys.stdout)
        else:
            show.write_text(verdicts, series, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`; the interpreter would complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _filtered(
    concluded: Sequence[Concluded], measured: Sequence[Measured], arguments: argparse.Namespace
) -> tuple[Sequence[Concluded], Sequence[Measured]]:
    """Return what the filters leave of both. It is enough that one is left: a verdict may be without a figure."""
    for name in _FILTERS:
        wanted = getattr(arguments, name)
        if wanted is not None:
            there = [getattr(row, name) for row in (*concluded, *measured)]
            _found(f"--{name}", wanted, wanted in there, there)
            concluded = [row for row in concluded if getattr(row, name) == wanted]
            measured = [row for row in measured if getattr(row, name) == wanted]
    return concluded, measured


def _found(flag: str, wanted: str, found: bool, there: Iterable[str]) -> None:
    from harness.report.text import one_line  # noqa: PLC0415 -- keeps other commands quick

    if not found:
        names = ", ".join(one_line(name) for name in sorted({*there}))
        raise UsageError(f"{flag} {one_line(wanted)}: no run has it", remedy=f"give one of: {names or 'none'}")


def run_merge(arguments: argparse.Namespace) -> int:
    """Carry out `draftgate merge`; return the exit status of the merged verdict. Raises UsageError."""
    from harness.history.merge import merge  # noqa: PLC0415 -- keeps other commands quick
    from harness.report.record import exit_status  # noqa: PLC0415 -- as above
    from harness.report.table import print_table  # noqa: PLC0415 -- as above
    from harness.report.text import one_line  # noqa: PLC0415 -- as above
    from harness.verdict import Verdict  # noqa: PLC0415 -- as above

    merged = merge(arguments.out, arguments.run)
    print_table(merged.record, sys.stdout)
    for note in merged.notes:
        print(f"note: {one_line(note)}")
    print(f"record: {one_line(str(merged.run.path / 'record.json'))}")
    return exit_status(Verdict(merged.record["verdict"]))

"""The command `draftgate compare`: what an upgrade of the engine changes, from two records."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from harness.errors import UsageError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `compare` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "compare",
        help="say what became worse, better or different from one engine version to another",
        description="Takes the records of two runs of the same pairs and compares everything in them, case by case. "
        "Starts nothing. Exit status: 0 nothing is worse, 1 something is, 2 bad input, 3 not comparable, or evidence "
        "is missing on one side.",
    )
    parser.add_argument(
        "old", type=Path, metavar="OLD_RECORD", help="record.json of the old version, or its run folder"
    )
    parser.add_argument("new", type=Path, metavar="NEW_RECORD", help="the same of the new version")
    parser.add_argument("--json", action="store_true", help="the document that docs/upgrade.md describes")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed `compare` command and return the exit status. Raises `UsageError`."""
    from harness.report.record import exit_status  # noqa: PLC0415 -- keeps other commands quick
    from harness.upgrade import show  # noqa: PLC0415 -- as above
    from harness.upgrade.compare import compare_records  # noqa: PLC0415 -- as above
    from harness.verdict import worst  # noqa: PLC0415 -- as above

    judgements = compare_records(_record(arguments.old), _record(arguments.new))
    try:
        (show.write_json if arguments.json else show.write_text)(judgements, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`; the interpreter would complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_status(worst([judgement.verdict for judgement in judgements.values()]))


def _record(path: Path) -> dict[str, Any]:
    """Return a run's record. Raises UsageError for what is none, of another schema, or of a run that was cut short."""
    from harness.report.record import read, record_path  # noqa: PLC0415 -- keeps other commands quick

    file = record_path(path)
    record, _ = read(path)
    try:
        cases, complete = record["cases"], record["complete"]
    except KeyError as error:
        raise UsageError(
            f"{file}: is no run record: {error!r}", remedy="give the record.json that `draftgate run` wrote"
        ) from error
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise UsageError(
            f"{file}: `cases` is no list of cases", remedy="give the record.json that `draftgate run` wrote"
        )
    if complete is not True:
        raise UsageError(f"{file}: the run was cut short (`complete` is {complete!r})", remedy="run it again")
    return record

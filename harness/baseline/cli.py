"""The command `draftgate bless`: make a run's measurements the reference that later runs are held against."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `bless` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "bless",
        help="make a run the reference that later runs are held against (`draftgate run ... --baseline DIR`)",
        description="Shows what each case of a run would change in the baselines, and writes it with --yes: all of it "
        "or, if anything is refused, nothing. Exit status: 0 the baselines are as the run says, 1 refused, 2 bad "
        "input, 3 something would be written and --yes was not given.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, or its record.json")
    parser.add_argument(
        "--case", action="append", default=[], metavar="ID", help="bless this case only (repeatable; default: all)"
    )
    parser.add_argument(
        "--baselines", type=Path, default=Path("baselines"), metavar="DIR", help="where they lie (default: baselines)"
    )
    parser.add_argument("--yes", action="store_true", help="write")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--replace",
        action="store_true",
        help="let it succeed a baseline of another checkpoint, prompt set, K, dtype or the like",
    )
    how.add_argument("--ratchet", action="store_true", help="baselines may only rise: refuse what is worse")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed `bless` command and return the exit status. Raises `UsageError`."""
    from harness.baseline import blessing  # noqa: PLC0415 -- imports numpy; keeps other commands quick

    name, record = blessing.read_run(arguments.run)
    made, refused = blessing.bless(
        name,
        record,
        arguments.baselines,
        cases=arguments.case,
        replace=arguments.replace,
        ratchet=arguments.ratchet,
    )
    for each in made:
        state = "unchanged" if each.text == each.former else "changed" if each.former else "new"
        print(f"{each.path}: {each.kept or state}")
        for change in each.changes:
            print(f"  {change}")
        if each.pending:
            print(each.diff())
    if refused:
        for refusal in refused:
            print(f"draftgate: {refusal}", file=sys.stderr)
        print("draftgate: nothing was written", file=sys.stderr)
        return 1
    pending = [each for each in made if each.pending]
    if pending and not arguments.yes:
        print(f"draftgate: {len(pending)} not written: give --yes to write", file=sys.stderr)
        return 3
    blessing.write(pending, arguments.baselines)
    for each in pending:
        print(f"{each.path}: written")
    return 0

"""The command `draftgate report`: a run's report, made again from its record."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.report.publish import Trends

__all__ = ["add_parser", "run"]

_FORMATS = ("html", "markdown", "github", "json")


def add_parser(subparsers: Any) -> None:
    """Add `report` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "report",
        help="make a run's report again from its record: HTML, Markdown, GitHub annotations or JSON",
        description="html: one file that needs nothing else, by default report.html in the run's folder. markdown: for "
        "a pull request. github: ::error and ::warning lines, and the Markdown is appended to $GITHUB_STEP_SUMMARY "
        "where that is set. json: the record itself. All but html go to the standard output by default. Exit status: "
        "0, whatever the verdict; 2 no such record.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its record.json")
    parser.add_argument("--format", choices=_FORMATS, default="html", help="default: html")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write it")


def run(arguments: argparse.Namespace, trends: Trends) -> int:
    """Write the report. Raises UsageError where there is no record, or none of this version's, or no way to write."""
    from harness.report.record import read, record_path  # noqa: PLC0415 -- keeps other commands quick

    path = record_path(arguments.run)
    record, text = read(path)
    try:
        made = text if arguments.format == "json" else _render(record, arguments.format, path.resolve().parent, trends)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        from harness.report.text import terminal  # noqa: PLC0415 -- as above

        raise UsageError(
            f"{path}: has not the form of a run record: {terminal(f'{type(error).__name__}: {error}')}",
            remedy="give the record.json that `draftgate run` wrote, as it wrote it",
        ) from error
    output = arguments.output
    if output is None and arguments.format == "html":
        from harness.report.publish import PAGE  # noqa: PLC0415 -- keeps other commands quick

        output = path.with_name(PAGE)
    if output is None:
        sys.stdout.write(made)
        return 0
    try:
        output.write_text(made, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{output}: {error.strerror}", remedy="give -o a file in a folder that can be written"
        ) from error
    print(output)
    return 0


def _render(record: dict[str, Any], form: str, folder: Path, trends: Trends) -> str:
    if form == "html":
        from harness.report.page import render  # noqa: PLC0415 -- imports jinja2
        from harness.report.publish import over_time  # noqa: PLC0415 -- keeps other formats quick

        figures, fault = over_time(trends, folder, record)
        if fault:
            print(fault, file=sys.stderr)
        return render(record, figures)
    if form == "markdown":
        from harness.report.markdown import render as markdown  # noqa: PLC0415 -- keeps other formats quick

        return markdown(record)
    from harness.report.publish import annotate, append_step_summary  # noqa: PLC0415 -- keeps other formats quick

    if os.environ.get("GITHUB_STEP_SUMMARY"):
        append_step_summary(record, os.environ)
    return "".join(f"{line}\n" for line in annotate(record))

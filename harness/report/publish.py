"""What a run leaves for people beside its record: the page, and on GitHub the job's summary and annotations.

None of it changes a verdict: what cannot be made is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.files import write_atomically
from harness.github import command
from harness.report.summary import summarise
from harness.report.text import one_line, terminal, visible
from harness.verdict import Verdict

if TYPE_CHECKING:
    from harness.report.plots import Trend

__all__ = ["PAGE", "Trends", "annotate", "append_step_summary", "over_time", "publish"]

Trends = Callable[[Path, Mapping[str, Any]], "Sequence[Trend]"]
"""From a run's folder and record to figures over earlier runs; harness.history has one."""

PAGE = "report.html"
"""Its name in the run folder."""

_MOST = 10
"""Annotations of each kind that GitHub shows for a step."""


def publish(folder: Path, record: Mapping[str, Any], environ: Mapping[str, str], trends: Trends) -> Iterator[str]:
    """Make whatever the run's surroundings ask for; yield the lines to print. Raises nothing."""
    figures, fault = over_time(trends, folder, record)
    if fault:
        yield fault
    yield from _attempt("the report", lambda: _page(folder, record, figures))
    if environ.get("GITHUB_STEP_SUMMARY"):
        yield from _attempt("the summary of the step", lambda: append_step_summary(record, environ))
    if environ.get("GITHUB_ACTIONS") == "true":
        yield from _attempt("annotations", lambda: annotate(record))


def over_time(trends: Trends, folder: Path, record: Mapping[str, Any]) -> tuple[Sequence[Trend], str]:
    """Return the figures over earlier runs, and in a line what kept them away ("" = nothing). Raises nothing."""
    try:
        return trends(folder, record), ""
    except Exception as error:  # noqa: BLE001 -- a page without its history is worth more than none
        return (), terminal(f"draftgate: the report has no figures over time: {one_line(str(error))}")


def annotate(record: Mapping[str, Any]) -> list[str]:
    """Return the workflow commands for what is not green: errors for FAIL and INVALID, warnings for INCONCLUSIVE.

    What does not count, being of the old release of a comparison, has none.
    """
    summary = summarise(record)
    reasons = [reason for reason in summary.reasons if not reason.old]
    lines: dict[str, list[str]] = {"error": [], "warning": []}
    for reason in reasons:
        level = "warning" if reason.verdict is Verdict.INCONCLUSIVE else "error"
        parts = (reason.summary, summary.places(reason), f"cause: {reason.cause}", f"remedy: {reason.remedy}")
        message = "\n".join(visible(part) for part in parts if not part.endswith(": "))
        title = one_line(f"draftgate {reason.verdict} {reason.code}".strip())
        lines[level].append(command(level, message, title=title))
    if not reasons and summary.verdict is not Verdict.PASS:
        lines["error"].append(command("error", summary.sentence, title=f"draftgate {summary.verdict}"))
    for level, made in lines.items():
        if len(made) > _MOST:
            more = f"{len(made) - _MOST + 1} more reasons are in the record"
            lines[level] = [*made[: _MOST - 1], command(level, more, title="draftgate")]
    return [*lines["error"], *lines["warning"]]


def append_step_summary(record: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Append the Markdown to the file that GITHUB_STEP_SUMMARY names; return no lines, for the file is the job's."""
    from harness.report.markdown import render  # noqa: PLC0415 -- only on GitHub

    with Path(environ["GITHUB_STEP_SUMMARY"]).open("a", encoding="utf-8") as handle:
        handle.write(render(record))
    return []


def _page(folder: Path, record: Mapping[str, Any], figures: Sequence[Trend]) -> list[str]:
    from harness.report.page import render  # noqa: PLC0415 -- imports jinja2

    path = folder / PAGE
    write_atomically(path, render(record, figures))
    return [f"report: {path}"]


def _attempt(what: str, make: Callable[[], list[str]]) -> list[str]:
    try:
        return make()
    except Exception as error:  # noqa: BLE001 -- a report that cannot be made must not change what was judged
        return [terminal(f"draftgate: {what} could not be made: {one_line(f'{type(error).__name__}: {error}')}")]

"""The report as Markdown: for a pull request, and for the summary of a job on GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.summary import Reason, Summary, summarise
from harness.report.text import one_line

__all__ = ["render"]

_MOST = 60_000
"""Characters of the whole: a comment on GitHub holds 65,536."""

_FOR_NOTES = 8_000
"""Of these, characters for what was accepted or left out."""

_ROOM, _CELL = 1_000, 60
"""Characters of one text, and of one that is a cell; written as Markdown it has at most twice as many."""

_GLYPHS = {"PASS": "\u2705", "FAIL": "\u274c", "INVALID": "\u26a0\ufe0f", "INCONCLUSIVE": "\u2754"}

_SPECIAL = re.compile(r"[\\`*_\[\]|~$#]")
_LEADING = re.compile(r"^(?:\d{1,9}(?=[.)](?: |$))|(?=[-+=:]))")
"""Up to the mark that makes a line a list, a rule or a heading's underline, or an order to a CI runner."""

_LINKS = re.compile(r"@|#(?=\w)|(?<=\w)://|\b(?:www\.)|\bGH-(?=\d)", re.IGNORECASE)


def render(record: Mapping[str, Any]) -> str:
    """Return the report as Markdown. Raises KeyError, TypeError or ValueError where the record is none."""
    summary = summarise(record)
    head = f"## {_GLYPHS[summary.verdict]} draftgate: {summary.headline}\n\n{_plain(summary.sentence)}\n\n"
    head += "\n".join(_table(summary)) + "\n"
    notes = _first([f"- {_plain(note)}\n" for note in summary.notes], _FOR_NOTES, "notes")
    if notes:
        notes = f"\n### Accepted or left out\n\n{notes}"
    reasons = ["\n" + "\n".join(_reason(summary, reason)) + "\n" for reason in summary.reasons]
    return head + _first(reasons, _MOST - len(head) - len(notes), "reasons") + notes


def _first(blocks: Sequence[str], room: int, what: str) -> str:
    """Return as many blocks as there is room for, from the first on, and say how many more there are."""
    text = ""
    for index, block in enumerate(blocks):
        if len(text) + len(block) > room:
            return f"{text}\n{len(blocks) - index} more {what} are in the record.\n"
        text += block
    return text


def _table(summary: Summary) -> Iterator[str]:
    head = ("pair", "engine version", "runner", *(_plain(suite, _CELL) for suite in summary.suites))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    yield from lines
    room = _MOST // 3
    for row in summary.rows:
        cells = [f"{_GLYPHS[cell]} {cell}" if cell in _GLYPHS else cell for cell in row.cells]
        runner = ", ".join(part for part in (row.runner, row.device) if part) or "-"
        names = (_plain(name, 2 * _CELL) or "-" for name in (row.pair, row.release, runner))
        line = f"| {' | '.join([*names, *cells])} |"
        room -= len(line)
        if room < 0:
            yield f"| and more: {len(summary.rows)} in all |"
            return
        yield line


def _reason(summary: Summary, reason: Reason) -> Iterator[str]:
    code = f" {_plain(reason.code)}" if reason.code else ""
    whose = f" ({reason.label})" if reason.label else ""
    yield f"### {_GLYPHS[reason.verdict]} {reason.verdict}{code}{whose}: {_plain(reason.summary)}"
    yield ""
    yield f"- **Where:** {_plain(summary.places(reason))}"
    for label, value in (
        ("Cause", reason.cause),
        ("Remedy", reason.remedy),
        ("Expected", reason.expected),
        ("Seen", reason.actual),
        ("Known issue", reason.known_issue),
    ):
        if value:
            yield f"- **{label}:** {_plain(value)}"


def _plain(text: str, room: int = _ROOM) -> str:
    """Return text from outside as one line that Markdown shows as it is: no markup, link, mention, list or new cell."""
    line = one_line(text, room)
    while len(shown := _escaped(line)) > 2 * room:
        line = one_line(line, len(line) // 2)
    return shown


def _escaped(line: str) -> str:
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An empty comment is what keeps GitHub from making a link of a mention, an issue's number or an address.
    return _LEADING.sub(r"\g<0>\\", _LINKS.sub(_apart, _SPECIAL.sub(r"\\\g<0>", line)))


def _apart(match: re.Match[str]) -> str:
    found = match.group()
    return f"{found[0]}<!-- -->{found[1:]}" if found in ("@", "#", "://") else f"{found[:-1]}<!-- -->{found[-1]}"

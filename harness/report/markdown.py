"""The report as Markdown: for a pull request, and for the summary of a job on GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.report.summary import Reason, Summary, summarise
from harness.report.text import one_line

__all__ = ["render"]

_MOST = 60_000
"""Characters of the whole: a comment on GitHub holds 65,536."""

_ROOM = 1_000
"""Characters of one text."""

_GLYPHS = {"PASS": "\u2705", "FAIL": "\u274c", "INVALID": "\u26a0\ufe0f", "INCONCLUSIVE": "\u2754"}

_SPECIAL = re.compile(r"[\\`*_\[\]|~$]")
_LINKS = re.compile(r"@|#(?=\w)|(?<=\w)://|\b(?:www\.)|\bGH-(?=\d)", re.IGNORECASE)


def render(record: Mapping[str, Any]) -> str:
    """Return the report as Markdown. Raises KeyError, TypeError or ValueError where the record is none."""
    summary = summarise(record)
    blocks = [
        f"## {_GLYPHS[summary.verdict]} draftgate: {summary.headline}",
        _plain(summary.sentence),
        *_table(summary),
        *("- " + _plain(note) for note in summary.notes),
    ]
    text = "\n\n".join(blocks[:3]) + "\n" + "".join(f"\n{block}" for block in blocks[3:]) + "\n"
    for index, reason in enumerate(summary.reasons):
        block = "\n" + "\n".join(_reason(summary, reason)) + "\n"
        if len(text) + len(block) > _MOST:
            return f"{text}\n{len(summary.reasons) - index} more reasons are in the record.\n"
        text += block
    return text


def _table(summary: Summary) -> Iterator[str]:
    head = ("pair", "engine version", "runner", *map(_plain, summary.suites))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in summary.rows:
        cells = [f"{_GLYPHS[cell]} {cell}" if cell in _GLYPHS else cell for cell in row.cells]
        runner = ", ".join(part for part in (row.runner, row.device) if part) or "-"
        lines.append(f"| {' | '.join([_plain(row.pair), _plain(row.release) or '-', _plain(runner), *cells])} |")
        if sum(map(len, lines)) > _MOST // 3:
            lines.append(f"| and more: {len(summary.rows)} in all |")
            break
    yield "\n".join(lines)


def _reason(summary: Summary, reason: Reason) -> Iterator[str]:
    code = f" {_plain(reason.code)}" if reason.code else ""
    yield f"### {_GLYPHS[reason.verdict]} {reason.verdict}{code}: {_plain(reason.summary)}"
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


def _plain(text: str) -> str:
    """Return text from outside as one line that Markdown shows as it is: no markup, link, mention or new cell."""
    line = one_line(text, _ROOM).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An empty comment is what keeps GitHub from making a link of a mention, an issue's number or an address.
    return _LINKS.sub(_apart, _SPECIAL.sub(r"\\\g<0>", line))


def _apart(match: re.Match[str]) -> str:
    found = match.group()
    return f"{found[0]}<!-- -->{found[1:]}" if found in ("@", "#", "://") else f"{found[:-1]}<!-- -->{found[-1]}"

"""A diagnosis as text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import TextIO

from harness.checkpoint.show import printable
from harness.diagnose.diagnosis import Diagnosis
from harness.diagnose.verdicts import Status

__all__ = ["write_json", "write_text"]

_WIDTH = 116


def write_json(found: Diagnosis, out: TextIO) -> None:
    """Write the document of `--json`."""
    json.dump(found.as_json(), out, indent=1)
    out.write("\n")


def write_text(found: Diagnosis, out: TextIO) -> None:
    """Write what a person reads: the first cause, the rest by status, the next test."""
    out.writelines(line + "\n" for line in _lines(found))


def _lines(found: Diagnosis) -> Iterator[str]:
    yield f"draftgate: {_headline(found)}"
    for text in found.contradictions:
        yield from _wrapped(text, "  contradiction: ")
    for text in found.readings:
        yield from _wrapped(text, "  ")
    for status in Status:
        verdicts = [verdict for verdict in found.verdicts if verdict.status is status]
        if not verdicts:
            continue
        yield ""
        yield status.value.upper()
        for verdict in verdicts:
            yield f"  [{verdict.code}] {verdict.title}"
            for text in verdict.grounds:
                yield from _wrapped(text, "      - ")
            if status in (Status.CONFIRMED, Status.LIKELY):
                yield from _wrapped(verdict.why, "      why:    ")
                yield from _wrapped(verdict.remedy, "      remedy: ")
    yield ""
    if found.next_test is not None:
        test = found.next_test
        yield from _wrapped(f"{test.what} ({test.cost}); it tells of {', '.join(test.separates)}", "next test: ")
        yield f"           {printable(test.command)}"
    elif found.verdicts[0].status is Status.CONFIRMED:
        yield "next: repair the first cause, then measure again: another may hide behind it"


def _headline(found: Diagnosis) -> str:
    left = sum(verdict.status is not Status.EXCLUDED for verdict in found.verdicts)
    if found.contradictions:
        return f"not known: the symptoms contradict each other; {left} causes are open"
    if found.exit_status == 0:
        return "by these figures nothing is wrong with acceptance"
    if found.first is None:
        return f"not known: nothing in these symptoms points to one cause; {left} causes are open"
    return f"{found.first.status}: {found.first.title} [{found.first.code}]"


def _wrapped(text: str, lead: str) -> Iterator[str]:
    shown = printable(" ".join(text.split()))
    yield from textwrap.wrap(
        shown, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip

"""A comparison as a person reads it: what is red and why, then what is better, was red before, or merely differs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import IO

from harness.report.text import terminal
from harness.upgrade.model import Kind
from harness.verdict import Judgement, Verdict, worst

__all__ = ["write_json", "write_text"]

_MOST = 20
"""How many differences of one topic and kind are spelled out; `--json` has all of them."""


def write_text(judgements: Mapping[str, Judgement], file: IO[str]) -> None:
    """Write one block per case: the verdict, red findings with cause and remedy, and the list of differences."""

    def write(line: str) -> None:
        print(terminal(line), file=file)

    write(f"draftgate compare: {_overall(judgements)}")
    for case, judgement in judgements.items():
        measured = judgement.measurements
        versions = f": {measured['engine']} {measured['old']} -> {measured['new']}" if "engine" in measured else ""
        write("")
        write(f"{case}{versions}: {judgement.verdict}")
        red = [finding for finding in judgement.findings if finding.verdict is not Verdict.PASS]
        for finding in sorted(red, key=lambda each: each.verdict is not judgement.verdict):
            for line in finding.as_text().split("\n"):
                write(f"  {line}")
        write(f"  {len(judgement.findings) - len(red)} of {len(judgement.findings)} findings are PASS")
        for kind in (Kind.WORSE, Kind.STILL_RED, Kind.BETTER, Kind.DIFFERENT):
            for line in _changes(kind, [each for each in measured.get("changes", ()) if each["kind"] == kind]):
                write(line)


def _changes(kind: Kind, changes: list[dict[str, str]]) -> Iterator[str]:
    if changes:
        yield f"  {kind}:"
    shown: dict[str, int] = {}
    for each in changes:
        topic = each["topic"]
        shown[topic] = shown.get(topic, 0) + 1
        if shown[topic] <= _MOST:
            yield f"    {topic}: {each['what']}: {each['old'] or 'nothing'} -> {each['new'] or 'nothing'}"
    for topic, count in shown.items():
        if count > _MOST:
            yield f"    {topic}: {count - _MOST} more (--json lists them)"


def write_json(judgements: Mapping[str, Judgement], file: IO[str]) -> None:
    """Write the document that docs/upgrade.md describes."""
    document = {
        "verdict": _overall(judgements),
        "cases": [
            {
                "id": case,
                "verdict": judgement.verdict,
                "findings": [dataclasses.asdict(finding) for finding in judgement.findings],
                **judgement.measurements,
            }
            for case, judgement in judgements.items()
        ],
    }
    json.dump(document, file, indent=1)
    file.write("\n")


def _overall(judgements: Mapping[str, Judgement]) -> Verdict:
    return worst([judgement.verdict for judgement in judgements.values()])

"""The verdict table in the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any

from harness.verdict import Verdict, worst

__all__ = ["SUITES", "UPGRADE", "answer", "print_table", "word"]

SUITES = ("startup", "weights", "aux_hidden", "acceptance", "metrics", "losslessness", "throughput")
"""In the order in which they are run and shown."""

UPGRADE = "upgrade"
"""The suite of a comparison of two releases, after all others, on the new side."""

_STYLE = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow", "INVALID": "bold magenta"}


def print_table(record: Mapping[str, Any], file: IO[str]) -> None:
    """Print one row per case, one column per suite, then the reasons of everything that was not asked or not green."""
    from rich.console import Console  # noqa: PLC0415 -- 60 ms at import
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(file=file, highlight=False, soft_wrap=True, width=None if file.isatty() else 140)
    table = Table(title=f"draftgate: {record['verdict']}", title_justify="left")
    table.add_column("pair / engine / runner", no_wrap=True)
    compares = bool(record.get("comparison"))
    suites = (*SUITES, UPGRADE) if compares else SUITES
    if compares:
        table.add_column("release", no_wrap=True)
    for suite in suites:
        table.add_column(suite, no_wrap=True)
    for case in record["cases"]:
        words = [word(case, suite, record["not_selected"]) for suite in suites]
        release = [Text((case.get("engine") or {}).get("version", "not had"))] if compares else []
        table.add_row(Text(case["id"]), *release, *(Text(word, style=_STYLE.get(word, "dim")) for word in words))
    console.print(table)
    if record.get("comparison"):
        console.print(Text(answer(record)))
    for line in _reasons(record):
        console.print(Text(line))


def answer(record: Mapping[str, Any]) -> str:
    """Return, for a comparison of two releases, whether the new one may be taken, in a line."""
    words = {
        Verdict.PASS: "may be upgraded",
        Verdict.FAIL: "do not upgrade; the red cells say why",
        Verdict.INCONCLUSIVE: "not decided: too little data",
        Verdict.INVALID: "not decided: evidence is missing or contradicts itself",
    }
    sides = record["comparison"]
    return f"from {sides['old']} to {sides['new']}: {words[Verdict(record['verdict'])]}"


def word(case: Mapping[str, Any], suite: str, not_selected: Mapping[str, Collection[str]]) -> str:
    """Return the verdict of a suite on a case of a record, or the words for there being none."""
    verdicts = [Verdict(item["verdict"]) for item in case["judgements"] if item["suite"] == suite]
    if verdicts:
        return worst(verdicts)
    if suite in not_selected.get(case["id"], ()):
        return "not selected"
    return "not asked" if suite in case.get("not_asked", {}) else "not run"


def _reasons(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the run or a cell is not green, then what was accepted, not asked or not selected."""
    for case_id, suites in record["never_judged"].items():
        yield f"{case_id}: INVALID: never judged: {', '.join(suites)}"
    items = [
        (case, item, finding) for case in record["cases"] for item in case["judgements"] for finding in item["findings"]
    ]
    for case, item, finding in items:
        if finding["verdict"] != Verdict.PASS:
            yield f"{case['id']} {item['suite']}: {finding['verdict']} [{finding['code']}] {finding['summary']}"
            labels = (("cause", "cause"), ("remedy", "remedy"), ("known_issue", "known issue"))
            yield from (f"    {label}: {finding[key]}" for key, label in labels if finding[key])
    for case, item, finding in items:
        if finding["verdict"] == Verdict.PASS and finding["known_issue"]:
            yield f"{case['id']} {item['suite']}: {finding['known_issue']}"
    for case in record["cases"]:
        for suite, why in case.get("not_asked", {}).items():
            yield f"{case['id']}: {suite} was not asked: {why}"
    for case_id, suites in record["not_selected"].items():
        yield f"{case_id}: not selected: {', '.join(suites)}"

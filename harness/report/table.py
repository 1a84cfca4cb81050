"""The verdict table in the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any

from harness.report.text import terminal
from harness.verdict import Verdict, worst

__all__ = ["BY_HAND", "NOT_COUNTED", "SUITES", "UPGRADE", "UPGRADE_TESTS", "answer", "print_table", "word"]

SUITES = ("startup", "weights", "aux_hidden", "acceptance", "metrics", "losslessness", "throughput")
"""In the order in which they are run and shown."""

UPGRADE = "upgrade"
"""The suite of a comparison of two releases, after all others, on the new side."""

UPGRADE_TESTS = ("record", "acceptance", "throughput")
"""Its tests, as they are named behind `test_upgrade_`; the last one is asked only where speed means something."""

BY_HAND = "left out by hand"
"""The reason of what a case does not ask because whoever started the run chose tests (`-k`, `-m`, a path)."""

NOT_COUNTED = "of the old release, not counted"
"""What a comparison says of a finding on the release that it leaves behind."""

_STYLE = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow", "INVALID": "bold magenta"}


def print_table(record: Mapping[str, Any], file: IO[str]) -> None:
    """Print one row per case, one column per suite, then the reasons of everything that was not asked or not green."""
    from rich.console import Console  # noqa: PLC0415 -- 60 ms at import
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(file=file, highlight=False, soft_wrap=True, width=None if file.isatty() else 140)

    def shown(text: Any, style: str = "") -> Text:
        return Text(terminal(str(text)), style=style)

    table = Table(title=shown(f"draftgate: {record['verdict']}"), title_justify="left")
    table.add_column("pair / engine / runner", no_wrap=True)
    compares = bool(record.get("comparison"))
    suites = (*SUITES, UPGRADE) if compares else SUITES
    if compares:
        table.add_column("release", no_wrap=True)
    for suite in suites:
        table.add_column(suite, no_wrap=True)
    for case in record["cases"]:
        words = [word(case, suite, record["not_selected"]) for suite in suites]
        release = [shown((case.get("engine") or {}).get("version", "not had"))] if compares else []
        table.add_row(shown(case["id"]), *release, *(shown(word, _STYLE.get(word, "dim")) for word in words))
    console.print(table)
    if record.get("comparison"):
        console.print(shown(answer(record)))
    for line in _reasons(record):
        console.print(shown(line))


def answer(record: Mapping[str, Any]) -> str:
    """Return, for a comparison of two releases, whether the new one may be taken, in a line.

    A PASS is a yes only of a run that came to its end and of which nothing was left out by hand.
    """
    words = {
        Verdict.PASS: "may be upgraded",
        Verdict.FAIL: "do not upgrade; the red cells say why",
        Verdict.INCONCLUSIVE: "not decided: too little data",
        Verdict.INVALID: "not decided: evidence is missing or contradicts itself",
    }
    verdict, sides = Verdict(record["verdict"]), record["comparison"]
    said = words[verdict]
    if verdict is Verdict.PASS and not record.get("complete"):
        said = "not decided: the run did not come to its end"
    elif verdict is Verdict.PASS and (left := list(_by_hand(record))):
        said = f"nothing judged speaks against it; {BY_HAND}: {', '.join(left)}"
    pythons = [
        {_python(case) for case in record["cases"] if case.get("side") == side} - {""} for side in ("old", "new")
    ]
    same = " (the same environment twice)" if pythons[0] & pythons[1] else ""
    return f"from {sides['old']} to {sides['new']}{same}: {said}"


def _python(case: Mapping[str, Any]) -> str:
    return str((case.get("engine") or {}).get("python", ""))


def _by_hand(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was left out by hand: cases, suites, and tests of the suite that compares."""
    for case_id, suites in record["not_selected"].items():
        yield f"{case_id} ({', '.join(suites)})"
    for case in record["cases"]:
        # Without the whole suite its tests need no mention.
        if UPGRADE not in record["not_selected"].get(case["id"], ()):
            found = [what for what, why in case.get("not_asked", {}).items() if why == BY_HAND]
            if found:
                yield f"{case['id']} ({', '.join(found)})"


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
    for case, item, finding in sorted(items, key=lambda each: each[0].get("side") == "old"):
        if finding["verdict"] != Verdict.PASS:
            whose = f" ({NOT_COUNTED})" if case.get("side") == "old" else ""
            yield f"{case['id']} {item['suite']}: {finding['verdict']}{whose} [{finding['code']}] {finding['summary']}"
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

"""What a record comes to: the answer in a sentence, a row per case, and each reason for not being green, once.

Every report is made from this, so that page, Markdown and annotations say the same.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.report.table import NOT_COUNTED, SUITES, UPGRADE, answer, word
from harness.report.text import one_line
from harness.verdict import Verdict, some, worst

__all__ = ["Reason", "Row", "Summary", "summarise"]

_CAUSES_FIRST = ("weights", "aux_hidden", "startup", "acceptance", "losslessness", "throughput")
"""Of several red suites the first of these is nearest to the cause; a suite that is not named here comes last."""

_SHORT = 160
"""Characters up to which a cause has room in the sentence that gives the answer."""

_CLAUSE = 240
"""Characters of that sentence for what was seen."""

_NAME = 60
"""Characters of a name."""

_NAMED, _RELEASES = 3, 6
"""Pairs, also with their engines, and engine versions that are spelt out; of more, how many there are."""

_PLACES = 12
"""Rows, and suites of a row, that are spelt out where a reason holds."""

_SUITES = 24
"""Columns of the table."""

_NOTES = 50
"""Notes of all kinds."""

_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One case. `cells` has the word for each suite, in the order of `Summary.suites`."""

    id: str
    pair: str
    engine: str
    version: str
    runner: str
    device: str
    verdict: Verdict
    cells: tuple[str, ...]
    side: str = ""
    """In a comparison of two releases: "old" or "new"."""

    @property
    def old(self) -> bool:
        """Whether it is what a new release is held against: shown, and no part of the run's verdict."""
        return self.side == "old"

    @property
    def release(self) -> str:
        """Engine and version, and in a comparison of two whose they are, for they may be the same."""
        return f"{self.engine} {self.version}".strip() + (f" ({self.side})" if self.side else "")

    @property
    def name(self) -> str:
        """The case for a reader."""
        return f"{self.pair} on {self.release}" + (f" ({self.runner})" if self.runner else "")


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why cells are not green. `where` pairs the rows' index with the suites; equal findings are one reason."""

    verdict: Verdict
    code: str
    summary: str
    cause: str
    remedy: str
    known_issue: str
    expected: str
    actual: str
    where: tuple[tuple[int, tuple[str, ...]], ...]
    old: bool = False
    """Of findings on the old release of a comparison: no part of the run's verdict."""

    @property
    def label(self) -> str:
        """Whose it is, where that is not the run's."""
        return NOT_COUNTED if self.old else ""


@dataclasses.dataclass(frozen=True)
class Summary:
    """A record for readers. `reasons` are in the order to look, those that do not count last.

    `notes` say what was accepted or left out.
    """

    verdict: Verdict
    complete: bool
    sentence: str
    suites: tuple[str, ...]
    rows: tuple[Row, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]

    @property
    def headline(self) -> str:
        """The verdict; that of a run without an end holds only so far."""
        return self.verdict if self.complete else f"{self.verdict} so far"

    def reason_of(self, row: int, suite: str) -> int | None:
        """Return the index of the first reason for a cell, None if it is green."""
        return self._first.get((row, suite))

    @functools.cached_property
    def _first(self) -> Mapping[tuple[int, str], int]:
        found: dict[tuple[int, str], int] = {}
        for index, reason in enumerate(self.reasons):
            for row, suites in reason.where:
                for suite in suites:
                    found.setdefault((row, suite), index)
        return found

    def places(self, reason: Reason) -> str:
        """Return where a reason holds, in words."""
        shown = [f"{some(suites, _PLACES)} of {self.rows[row].name}" for row, suites in reason.where[:_PLACES]]
        rest = len(reason.where) - len(shown)
        return "; ".join([*shown, f"and {rest} more"] if rest else shown)


def summarise(record: Mapping[str, Any]) -> Summary:
    """Return what a record comes to. Raises KeyError, TypeError or ValueError where it is no record."""
    cases: Sequence[Mapping[str, Any]] = record["cases"]
    not_selected: Mapping[str, Sequence[str]] = record.get("not_selected") or {}
    judged = [item["suite"] for case in cases for item in case["judgements"]]
    compares = (UPGRADE,) if record.get("comparison") else ()
    every = tuple(dict.fromkeys((*SUITES, *compares, *judged)))
    suites = every[:_SUITES]
    missing = _never_judged(record)
    rows = [_row(case, suites, missing, not_selected) for case in cases]
    begun = {row.id for row in rows}
    rows += [
        Row(case_id, one_line(case_id, _NAME), "", "", "", "", Verdict.INVALID, tuple("not run" for _ in suites))
        for case_id in missing
        if case_id not in begun
    ]
    reasons = sorted(_reasons(cases, rows, missing), key=_order)
    verdict = Verdict(record["verdict"])
    complete = bool(record.get("complete"))
    sentence = _sentence(verdict, rows, reasons, complete=complete)
    if compares:
        sentence = f"{_sentence_case(answer(record))}. {sentence}"
    if not complete:
        sentence = f"The run did not come to its end. {sentence}"
    notes = list(_notes(record, rows))
    if len(every) > _SUITES:
        notes.insert(0, f"Not in the table: {len(every) - _SUITES} more suites, which are in the record")
    if len(notes) > _NOTES:
        notes[_NOTES - 1 :] = [f"{len(notes) - _NOTES + 1} more such notes are in the record"]
    return Summary(verdict, complete, sentence, suites, tuple(rows), tuple(reasons), tuple(notes))


def _never_judged(record: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    found = record.get("never_judged") or {}
    # The first records named the cases alone.
    return {name: tuple(found[name]) if isinstance(found, Mapping) else () for name in found}


def _row(
    case: Mapping[str, Any],
    suites: Sequence[str],
    missing: Mapping[str, Sequence[str]],
    not_selected: Mapping[str, Sequence[str]],
) -> Row:
    engine: Mapping[str, Any] = case.get("engine") or {}
    pair: Mapping[str, Any] = case.get("pair") or {}
    verdicts = [Verdict(item["verdict"]) for item in case["judgements"]]
    return Row(
        case["id"],
        one_line(str(pair.get("name") or case["id"]), _NAME),
        one_line(str(engine.get("engine") or ""), _NAME),
        one_line(str(engine.get("version") or ""), _NAME),
        one_line(str(case.get("runner_asked") or ""), _NAME),
        one_line(str(case.get("device") or ""), _NAME),
        worst([*verdicts, Verdict.INVALID] if case["id"] in missing else verdicts),
        tuple(word(case, suite, not_selected) for suite in suites),
        one_line(str(case.get("side") or ""), _NAME),
    )


def _reasons(
    cases: Sequence[Mapping[str, Any]], rows: Sequence[Row], missing: Mapping[str, Sequence[str]]
) -> Iterator[Reason]:
    found: dict[tuple[bool, str, str, str, str], list[tuple[int, str, Mapping[str, Any]]]] = {}
    for index, case in enumerate(cases):
        for item in case["judgements"]:
            for finding in item["findings"]:
                if finding["verdict"] != Verdict.PASS:
                    code, summary, cause, remedy = (
                        str(finding.get(name) or "") for name in ("code", "summary", "cause", "remedy")
                    )
                    key = (rows[index].old, code, summary, cause, remedy)
                    found.setdefault(key, []).append((index, str(item["suite"]), finding))
    for (old, code, summary, cause, remedy), places in found.items():
        first = places[0][2]
        where = tuple(
            (index, tuple(dict.fromkeys(suite for _, suite, _ in group)))
            for index, group in itertools.groupby(places, key=lambda place: place[0])
        )
        yield Reason(
            worst([Verdict(finding["verdict"]) for _, _, finding in places]),
            code,
            summary,
            cause,
            remedy,
            str(first.get("known_issue") or ""),
            str(first.get("expected") or ""),
            str(first.get("actual") or ""),
            where,
            old,
        )
    # What was asked and never judged counts on either side.
    for index, row in enumerate(rows):
        if row.id in missing:
            suites = tuple(missing[row.id])
            yield Reason(
                Verdict.INVALID,
                "",
                "never judged",
                "the run ended before these suites had judged, or their tests were not there",
                "run them again; the terminal of the run says what ended it",
                "",
                "a judgement of every suite that was asked",
                "none",
                ((index, suites or ("every suite",)),),
            )


def _order(reason: Reason) -> tuple[bool, int, int]:
    suites = {suite for _, names in reason.where for suite in names}
    places = [_CAUSES_FIRST.index(suite) for suite in suites if suite in _CAUSES_FIRST]
    return reason.old, -_RANK[reason.verdict], min(places, default=len(_CAUSES_FIRST))


def _sentence(verdict: Verdict, rows: Sequence[Row], reasons: Sequence[Reason], *, complete: bool) -> str:
    if not rows:
        return "Nothing was judged."
    counted = [row for row in rows if not row.old]
    reasons = [reason for reason in reasons if not reason.old]
    if verdict is Verdict.PASS:
        asked = "every suite that was asked" if complete else "what was judged until then"
        passed = _few([row.pair for row in counted], _NAMED, "pairs")
        return f"{passed} passed {asked}, on {_few([row.release for row in counted], _RELEASES, 'engine versions')}."
    if not reasons:
        return f"The run is {verdict}, and no finding says why."
    first = reasons[0]
    row, suites = first.where[0]
    why = f", because {_clause(first.cause)}" if 0 < len(first.cause) <= _SHORT else ""
    says = {Verdict.FAIL: "red", Verdict.INVALID: "not shown either way"}.get(first.verdict, "not decided")
    is_are = "are" if len(suites) > 1 or suites[0] in ("weights", "every suite") else "is"
    head = f"{rows[row].name}: {_clause(_listed(suites))} {is_are} {says}: {_clause(first.summary)}{why}."
    more = len({(index, suite) for each in reasons for index, names in each.where for suite in names}) - len(suites)
    tail = f" {more} more {'cells are' if more > 1 else 'cell is'} not green." if more else ""
    bad = {each.release for each in rows if each.verdict is not Verdict.PASS}
    green = [each.release for each in rows if each.release not in bad]
    return head + tail + (f" Green throughout: {_few(green, _RELEASES, 'engine versions')}." if any(green) else "")


def _clause(text: str) -> str:
    return one_line(text, _CLAUSE).rstrip(".")


def _sentence_case(text: str) -> str:
    clause = _clause(text)
    return clause[:1].upper() + clause[1:]


def _few(names: Iterable[str], most: int, what: str) -> str:
    different = tuple(dict.fromkeys(filter(None, names)))
    return _listed(different) if len(different) <= most else f"{len(different)} {what}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "no engine"


def _notes(record: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was accepted, not asked and not selected; of the same on many cases, one note."""
    names = {row.id: row.name for row in rows}
    found: dict[tuple[str, str, str], list[str]] = {}
    for case in record["cases"]:
        for item in case["judgements"]:
            for finding in item["findings"]:
                if finding["verdict"] == Verdict.PASS and finding.get("known_issue"):
                    key = ("Accepted", str(item["suite"]), f": {one_line(finding['known_issue'])}")
                    found.setdefault(key, []).append(names[case["id"]])
    for case in record["cases"]:
        for suite, why in (case.get("not_asked") or {}).items():
            found.setdefault(("Not asked", suite, f": {one_line(str(why))}"), []).append(names[case["id"]])
    for case_id, suites in (record.get("not_selected") or {}).items():
        name = names.get(case_id, one_line(case_id, _NAME))
        found.setdefault(("Not selected", ", ".join(suites), ""), []).append(name)
    for (what, suite, why), where in found.items():
        yield f"{what}: {suite} of {some(tuple(dict.fromkeys(where)), _NAMED)}{why}"

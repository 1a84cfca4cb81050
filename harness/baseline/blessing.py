"""Making references of a run: what is refused, what would change, and the writing."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.baseline import text
from harness.baseline.compare import accept_change, speed_change
from harness.baseline.measured import accept_counts, baseline_of, measurements
from harness.baseline.model import NEAR_DEAD, Baseline
from harness.errors import EvidenceError, UsageError
from harness.files import exclusive, write_atomically
from harness.measure.sequential import ALPHA
from harness.measure.statistics import Bounds
from harness.report.record import read, record_path
from harness.verdict import Verdict, some

__all__ = ["Blessing", "Refusal", "bless", "read_run", "refusals_of_run", "write"]

_LOCK = ".lock"
"""In the folder of the baselines; whoever writes there holds it. It is empty and stays."""

_EQUAL = 1 - 1e-9
"""New over former that is equal, but for rounding."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a run, or a case of it, becomes no reference, and what to do."""

    subject: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: refused: {self.reason}\n  remedy: {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Blessing:
    """One case that qualifies: the file, its text, the former one's ("" if there is none), and the changes in words.

    `kept` says why the former reference stands under the ratchet; "" if it does not.
    """

    path: Path
    text: str
    former: str
    changes: tuple[str, ...] = ()
    kept: str = ""

    @property
    def pending(self) -> bool:
        """Whether writing would change the file."""
        return not self.kept and self.text != self.former

    def diff(self) -> str:
        """Return the difference to the former reference as a unified diff."""
        names = (f"{self.path.name} (former)" if self.former else "(none)", self.path.name)
        lines = difflib.unified_diff(self.former.splitlines(), self.text.splitlines(), *names, lineterm="")
        return "\n".join(lines)


class _Judgement(msgspec.Struct):
    suite: str
    verdict: str


class _Case(msgspec.Struct):
    id: str
    judgements: list[_Judgement]


class _Record(msgspec.Struct):
    """What blessing needs of a record before it looks into a case."""

    draftgate: str
    machine: dict[str, Any]
    not_selected: dict[str, list[str]]
    never_judged: dict[str, list[str]]
    cases: list[_Case]


def read_run(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the record of a run, given its folder or its record.json.

    Raises UsageError if there is none, it is of another schema, or a key is missing.
    """
    file = record_path(path)
    record, _ = read(path)
    try:
        msgspec.convert(record, _Record)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {str(error).replace('$.', '')}", remedy="run the suites again") from error
    return file.resolve().parent.name, record


def refusals_of_run(name: str, record: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield why nothing of this run becomes a reference."""
    if record.get("complete") is not True:
        yield Refusal(name, "the run did not come to its end", "run the suites to the end")
    red = [
        f"{case['id']} {item['suite']} {item['verdict']}"
        for case in record["cases"]
        for item in case["judgements"]
        if item["verdict"] != Verdict.PASS and not _is_old(case)
    ]
    if red or record.get("verdict") != Verdict.PASS:
        yield Refusal(
            name,
            f"not all of the run is PASS: it is {record.get('verdict')}{'; ' * bool(red)}{some(red, 6)}",
            "mend what is red; a reference is made of what is known to be right",
        )
    for key, why in (("never_judged", "left no judgement"), ("not_selected", "were left out by hand (-k, a path)")):
        for case, suites in record[key].items():
            yield Refusal(f"{name}, {case}", f"suites {why}: {', '.join(suites)}", "run all suites of the case")


def bless(
    name: str, record: Mapping[str, Any], folder: Path, *, cases: Sequence[str] = (), replace: bool, ratchet: bool
) -> tuple[list[Blessing], list[Refusal]]:
    """Return what of a run would be written under `folder`, and what is refused; nothing is written.

    `cases` restricts it to some cases; without it, all but the old side of a comparison are taken. `replace` lets a
    reference succeed one of another checkpoint, prompt set, K or the like. `ratchet` refuses one that is lower beyond
    noise, and lets the former stand where the new one is lower at all, so that no sequence of small steps lowers it.
    Raises UsageError for a case that the run does not have, or a former reference that cannot be read.
    """
    known = [case["id"] for case in record["cases"]]
    if unknown := [case for case in cases if case not in known]:
        raise UsageError(f"--case {unknown[0]}: the run has {', '.join(known) or 'no case'}")
    refused = list(refusals_of_run(name, record))
    sound = not refused
    made: list[Blessing] = []
    for case in record["cases"]:
        if case["id"] not in cases if cases else _is_old(case):
            continue
        subject = f"{name}, {case['id']}"
        if _is_old(case):
            reason = "it is the old side of a comparison, for which the run's verdict does not speak"
            refused.append(Refusal(subject, reason, "run the suites on that release alone"))
            continue
        near_dead = list(_near_dead(subject, case))
        refused += near_dead
        if near_dead or not sound:
            continue
        try:
            baseline = baseline_of(record, case, name)
        except EvidenceError as error:
            refused.append(Refusal(subject, error.message, error.remedy))
            continue
        made_of = text.render(baseline)
        try:
            text.parse(made_of, subject)
        except UsageError as error:
            refused.append(Refusal(subject, f"it could not be read back: {error.message}", "run the suites again"))
            continue
        blessing, why = _against_former(subject, baseline, made_of, folder, replace=replace, ratchet=ratchet)
        refused += why
        if any(each.path == blessing.path for each in made):
            refused.append(
                Refusal(subject, f"another case of the run is for {blessing.path.name}, too", "choose with --case")
            )
        made.append(blessing)
    return made, refused


def _is_old(case: Mapping[str, Any]) -> bool:
    return case.get("side") == "old"


def _near_dead(subject: str, case: Mapping[str, Any]) -> Iterator[Refusal]:
    measured = measurements(case, "acceptance")
    counts = [] if measured is None else list(accept_counts(measured).values())
    steps, accepted = sum(row[0] for row in counts), sum(sum(row[1:]) for row in counts)
    if steps and (length := 1 + accepted / steps) < NEAR_DEAD:
        yield Refusal(
            subject,
            f"accept length {length:.3f} is below {NEAR_DEAD:.2f}: the drafter is dead or nearly so, and a reference "
            "of it would call any drafter good",
            "find out why nothing is accepted: `draftgate diagnose --record RUN/record.json`",
        )


def _against_former(
    subject: str, baseline: Baseline, made_of: str, folder: Path, *, replace: bool, ratchet: bool
) -> tuple[Blessing, list[Refusal]]:
    path = text.path_of(folder, baseline.case)
    if not path.exists():
        return Blessing(path, made_of, ""), []
    former_text = text.content(path)
    former = text.parse(former_text, str(path))
    unlike = baseline.case.differences(former.case) + _lost(former, baseline)
    if unlike:
        refused = [] if replace else [
            Refusal(
                subject,
                f"it does not match {path.name}: {'; '.join(unlike)}",
                "if it is the successor of that reference, say so with --replace",
            )
        ]  # fmt: skip
        return Blessing(path, made_of, former_text, (f"replaces another: {'; '.join(unlike)}",)), refused
    changes = list(_changes(former, baseline))
    words = tuple(f"{what}: {_told(bounds)}" for what, bounds in changes)
    lower = [(what, bounds) for what, bounds in changes if bounds.estimate < _EQUAL]
    if not ratchet or not lower:
        return Blessing(path, made_of, former_text, words), []
    beyond = [f"{what} {_told(bounds)}" for what, bounds in lower if bounds.upper < _EQUAL]
    refused = [
        Refusal(
            subject,
            f"--ratchet: it would lower {what}, more than noise explains",
            "find the regression; without --ratchet a lower reference can be blessed",
        )
        for what in beyond
    ]
    names = ", ".join(what for what, _ in lower)
    kept = "" if beyond else f"--ratchet: {names} would be lower, within noise: the former reference stands"
    return Blessing(path, made_of, former_text, words, kept), refused


def _lost(former: Baseline, new: Baseline) -> list[str]:
    """Return what of the former reference the new one would no longer hold, or hold of another work."""
    told = []
    if former.acceptance.exact and not new.acceptance.exact:
        told.append("acceptance.exact true -> false")
    if former.throughput is not None:
        if new.throughput is None:
            return [*told, "throughput, which the run does not measure"]
        told += new.throughput.differences(former.throughput)
        gone = sorted(former.throughput.log_ratios.keys() - new.throughput.log_ratios.keys())
        told += [f"throughput at concurrency {load}, which the run does not measure" for load in gone]
    if former.acceptance.counts.keys() != new.acceptance.counts.keys():
        told.append("the prompts that were counted")
    return told


def _changes(former: Baseline, new: Baseline) -> Iterator[tuple[str, Bounds]]:
    """Yield how each figure moves, as new over former."""
    yield (
        "accept length",
        accept_change(former.acceptance.counts, new.acceptance.counts, tolerance=0.0, alpha=ALPHA),
    )
    if former.throughput is not None and new.throughput is not None:
        for load, values in former.throughput.log_ratios.items():
            yield f"speed-up at concurrency {load}", speed_change(values, new.throughput.log_ratios[load], alpha=ALPHA)


def _told(bounds: Bounds) -> str:
    change, lower, upper = (value - 1 for value in (bounds.estimate, bounds.lower, bounds.upper))
    word = "worse" if bounds.upper < _EQUAL else "better" if bounds.lower > 2 - _EQUAL else "within noise"
    return f"{change:+.1%} ({lower:+.1%} to {upper:+.1%}: {word})"


def write(blessings: Sequence[Blessing], folder: Path) -> None:
    """Write what is pending under `folder`, each file whole or not at all, one process at a time.

    Raises:
        UsageError: the folder cannot be written, or a file is no longer the former one that was compared with: another
            process has blessed meanwhile. Then nothing is written.

    """
    pending = [blessing for blessing in blessings if blessing.pending]
    if not pending:
        return
    path = folder / _LOCK
    try:
        with exclusive(path):
            for blessing in pending:
                there = text.content(blessing.path) if blessing.path.exists() else ""
                if there != blessing.former:
                    raise UsageError(
                        f"{blessing.path}: another process has written it meanwhile; nothing was written",
                        remedy="bless again: the run is then compared with what is there now",
                    )
            for blessing in pending:
                path = blessing.path
                write_atomically(path, blessing.text)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}", remedy="give --baselines another folder"
        ) from error

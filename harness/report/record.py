"""The run folder and the record assembled from it: what was run, on what, what was measured, what was concluded.

Every process of a run writes its own files, atomically, as soon as it knows something; the record is assembled from
whatever is there. A run that is cut short therefore leaves all that it had learnt, marked `"complete": false`.
The schema is described in docs/record.md.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import harness
from harness.errors import UsageError
from harness.files import write_atomically
from harness.report.device import device_class, machine
from harness.verdict import Judgement, Verdict, worst

__all__ = ["SCHEMA", "RunFolder", "device_class", "exit_status", "machine", "read"]

SCHEMA = 1


def exit_status(verdict: Verdict) -> int:
    """Return the process's exit status for a verdict: 0 pass, 1 fail, 3 inconclusive or invalid."""
    return {Verdict.PASS: 0, Verdict.FAIL: 1}.get(verdict, 3)


def record_path(run: Path) -> Path:
    """Return the record of a run that is named by its folder or by the record itself."""
    return run / "record.json" if run.is_dir() else run


def read(run: Path) -> tuple[dict[str, Any], str]:
    """Return the record of a run, named by its folder or by the record itself, and its text as it stands there.

    Raises:
        UsageError: there is no file, it is no record, or one of another schema.

    """
    path = record_path(run)
    try:
        text = path.read_text(encoding="utf-8")
        # JSON may hold half a surrogate pair, which can be neither printed nor stored. It becomes a question mark.
        record = json.loads(json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace"))
        schema = record["schema"]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="give a run's folder, or its record.json") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path}: is no run record, or not all of one: {type(error).__name__}: {error}",
            remedy="give the folder of a run of `draftgate run`, or copy it again",
        ) from error
    if schema != SCHEMA:
        later = isinstance(schema, int) and schema > SCHEMA
        raise UsageError(
            f"{path}: is of schema {schema!r}, and this draftgate reads {SCHEMA}",
            remedy=f"use the draftgate that wrote it ({record.get('draftgate')})" if later else "run the suites again",
        )
    return record, text


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Safe to use from several processes: no two write the same file."""

    path: Path

    @classmethod
    def create(cls, root: Path) -> RunFolder:
        """Make a new folder under `root`, named by the time and four random digits."""
        stamp = dt.datetime.now(tz=dt.UTC).strftime("%Y%m%d-%H%M%S")
        path = root.resolve() / f"{stamp}-{secrets.token_hex(2)}"
        path.mkdir(parents=True)
        return cls(path)

    def write_selection(self, selected: Mapping[str, Mapping[str, str]]) -> None:
        """Store which tests (name -> suite) of which cases are to run; every process that collects writes the same."""
        _write(self.path / "selection.json", selected)

    def case(self, case_id: str) -> Path:
        """Return the folder of one case, made if need be."""
        folder = self.path / "cases" / case_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def keep_lock(self, digest: str, lock: Path) -> None:
        """Copy the lock of an engine's environment, whose sha256 is `digest`, to `locks/` in this folder."""
        copy = self.path / "locks" / f"{digest[:12]}.txt"
        copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, lock.read_text(encoding="utf-8"))

    def write_run(self, **facts: Any) -> None:
        """Add facts about the run as a whole."""
        path = self.path / "run.json"
        _write(path, _read(path) | facts)

    def write_case(self, case_id: str, /, **facts: Any) -> None:
        """Add facts about a case, of whatever names. Only the one process that runs the case writes them."""
        path = self.case(case_id) / "case.json"
        _write(path, _read(path) | facts)

    def read_case(self, case_id: str) -> dict[str, Any]:
        """Return a case as it will be in the record, with what was concluded so far, and with the run's machine."""
        return {"machine": _read(self.path / "run.json").get("machine"), **_case(self.case(case_id))}

    def write_judgement(self, case_id: str, test: str, judgement: Judgement, *, seconds: float) -> None:
        """Store what one test of a suite concluded, with all that it rests on."""
        folder = self.case(case_id) / "judgements"
        folder.mkdir(exist_ok=True)
        data = {
            "test": test,
            "suite": judgement.suite,
            "verdict": judgement.verdict,
            "seconds": round(seconds, 3),
            "findings": judgement.findings,
            "measurements": judgement.measurements,
        }
        _write(folder / f"{test}.json", data)

    def assemble(self, *, complete: bool, at_least: Iterable[Verdict] = ()) -> dict[str, Any]:
        """Write and return the record of everything in the folder so far.

        What was asked and is in no judgement is `never_judged`, which no run survives as a pass, unless whoever started
        the run chose tests by hand (`-k`, a path): that is `not_selected`. The verdict is no better than `at_least`.
        """
        facts = _read(self.path / "run.json")
        cases = [_case(folder) for folder in sorted((self.path / "cases").glob("*")) if folder.is_dir()]
        # What an upgrade leaves behind is not what it is judged by: the comparison with it is the new side's.
        counted = [case for case in cases if case.get("side") != "old"]
        verdicts = [*at_least, *(Verdict(item["verdict"]) for case in counted for item in case["judgements"])]
        asked = facts.get("asked", {})
        selected = _read(
            self.path / "selection.json", {case: {suite: suite for suite in asked[case]} for case in asked}
        )
        judged = {case["id"]: {item[key] for item in case["judgements"] for key in ("test", "suite")} for case in cases}
        never_judged = _suites(
            {
                case: [suite for test, suite in tests.items() if test not in judged.get(case, ())]
                for case, tests in selected.items()
            }
        )
        if never_judged:
            verdicts.append(Verdict.INVALID)
        record = {
            "schema": SCHEMA,
            "draftgate": harness.__version__,
            "complete": complete,
            "verdict": worst(verdicts),
            **facts,
            "not_selected": _suites(
                {
                    case: [suite for suite in suites if suite not in selected.get(case, {}).values()]
                    for case, suites in asked.items()
                }
            ),
            "never_judged": never_judged,
            "cases": cases,
        }
        _write(self.path / "record.json", record)
        return record


def _suites(cases: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return each case's suites once, less the cases that have none."""
    return {case: list(dict.fromkeys(suites)) for case, suites in cases.items() if suites}


def _read(path: Path, default: Any = None) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default or {}


def _case(folder: Path) -> dict[str, Any]:
    facts = _read(folder / "case.json")
    judgements = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("judgements/*.json"))]
    return {"id": folder.name, **facts, "judgements": judgements}


def _write(path: Path, data: Any) -> None:
    write_atomically(path, json.dumps(data, indent=1, default=_plain, allow_nan=True) + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)

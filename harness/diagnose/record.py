"""Symptoms in a run record: the findings of a case, and the figures it measured, of the checkpoints that it had."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.checkpoint.read import Checkpoint
from harness.diagnose.symptoms import OFF, Fact, RecordFinding, Symptoms, release
from harness.errors import UsageError
from harness.report.record import read as record_in

__all__ = ["Recorded", "read"]

_LAUNCH = ("engine", "version", "algorithm", "flag_tokens")
"""Facts of how the server was launched: they hold whatever checkpoints it had."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What one case of a record says.

    `folders` of its `drafter` and `target` where they are still there; `digests` of both (`Checkpoint.digest`), empty
    where the record has none.
    """

    name: str
    symptoms: Symptoms
    folders: Mapping[str, Path | None]
    digests: Mapping[str, str]

    def of(self, **given: Checkpoint | None) -> tuple[Symptoms, tuple[str, ...]]:
        """Return what the case says of these checkpoints, and which of them are not those of the run.

        What was measured and found with others says nothing of these: only the launch is left of it then. Reads their
        data. Raises CheckpointError if a file cannot be read.
        """
        others = tuple(
            f"the {role} is {checkpoint.digest} ({checkpoint.folder}) and {self.digests[role] or 'not said'} "
            f"({self.name}): what the record measured is not of this checkpoint, or it changed since, and is left out"
            for role, checkpoint in given.items()
            if checkpoint is not None and checkpoint.digest != self.digests[role]
        )
        launch = Symptoms(**{field: getattr(self.symptoms, field) for field in _LAUNCH})
        return launch if others else self.symptoms, others


def read(path: Path, case_id: str = "") -> Recorded:
    """Return what one case of a record says. `case_id` may be empty where the record has one case.

    Raises:
        UsageError: no record, another schema, or no such case.

    """
    case = _case(path, case_id)
    name = f"{path.name}, {case['id']}"
    engine: Mapping[str, Any] = case.get("engine") or {}
    pair: Mapping[str, Any] = case.get("pair") or {}
    judgements: list[Mapping[str, Any]] = case.get("judgements") or []
    by_suite: dict[str, Mapping[str, Any]] = {
        judgement["suite"]: judgement.get("measurements") or {} for judgement in judgements if "suite" in judgement
    }
    findings = tuple(
        RecordFinding(
            finding["code"], finding["verdict"], finding["summary"], finding.get("actual", ""),
            finding.get("remedy", ""), name,
        )
        for judgement in judgements for finding in judgement.get("findings", ())
    )  # fmt: skip
    totals = (by_suite.get("acceptance") or {}).get("totals") or {}
    k = pair.get("k")
    drafts, accepted = totals.get("drafts"), totals.get("accepted")
    speeds = _speeds(by_suite.get("throughput") or {})
    sglang = engine.get("engine") == "sglang"
    method = pair.get("method")
    symptoms = Symptoms(
        engine=Fact(engine["engine"], name) if engine.get("engine") else None,
        version=release(engine.get("version") or "", name),
        algorithm=Fact(str(method or OFF).lower(), name) if "method" in pair else None,
        flag_tokens=Fact(k + 1 if sglang else k, name) if isinstance(k, int) else None,
        accept_length=Fact(1 + accepted / drafts, f"{name}, {drafts} verify steps") if drafts else None,
        steps=Fact(drafts, name) if drafts else None,
        tokens_per_second=Fact(speeds[0], f"{name}, throughput") if speeds else None,
        plain_tokens_per_second=Fact(speeds[1], f"{name}, throughput") if speeds else None,
        findings=findings,
    )
    facts = {role: found if isinstance(found := case.get(role), dict) else {} for role in ("drafter", "target")}
    digests = {role: str(each.get("digest") or "") for role, each in facts.items()}
    return Recorded(name, symptoms, {role: _folder(each) for role, each in facts.items()}, digests)


def _case(path: Path, case_id: str) -> dict[str, Any]:
    try:
        record, _ = record_in(path)
        cases: dict[str, dict[str, Any]] = {case["id"]: case for case in record["cases"]}
    except UsageError as error:
        raise UsageError(f"--record {error.message}", remedy=error.remedy) from error
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"--record {path}: is no run record: {error!r}", remedy="give the record.json that `draftgate run` wrote"
        ) from error
    if not case_id and len(cases) == 1:
        return next(iter(cases.values()))
    if case_id not in cases:
        wrong = f"has no case {case_id!r}" if case_id else f"has {len(cases)} cases"
        raise UsageError(f"--record {path}: {wrong}", remedy=f"give --case, one of: {', '.join(cases) or 'none'}")
    return cases[case_id]


def _speeds(throughput: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return output tokens per second with and without speculation, at the lowest concurrency that was measured."""
    rounds = throughput.get("rounds") or []
    if not rounds:
        return None
    lowest = min(each["concurrency"] for each in rounds)
    speeds = []
    for speculative in (True, False):
        chosen = [each for each in rounds if each["concurrency"] == lowest and each["speculative"] is speculative]
        seconds = sum(each["seconds"] for each in chosen)
        if not seconds:
            return None
        speeds.append(sum(request["tokens"] for each in chosen for request in each["requests"]) / seconds)
    return speeds[0], speeds[1]


def _folder(facts: Mapping[str, Any]) -> Path | None:
    path = Path(facts["folder"]) if facts.get("folder") else None
    return path if path is not None and path.is_dir() else None

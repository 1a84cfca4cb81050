"""Several runs joined into one: the shards of a matrix, or runs of several machines.

The merged run is a run folder like any other. What each case was judged by, its evidence and its logs are copied into
it, so it can be read when the shards are gone. Nothing of the shards is changed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from harness.errors import UsageError
from harness.files import sha256_of, write_atomically
from harness.history.facts import decode, load
from harness.report.record import RunFolder, record_path
from harness.verdict import Verdict, worst

__all__ = ["Merged", "merge"]

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Suites = dict[str, list[str]]


class _Finding(msgspec.Struct, frozen=True):
    code: str
    verdict: Verdict
    summary: str
    cause: str
    remedy: str
    known_issue: str


class _Judgement(msgspec.Struct, frozen=True):
    test: _Name
    suite: str
    verdict: Verdict
    findings: list[_Finding]


class _Engine(msgspec.Struct, frozen=True):
    version: str
    lock: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""


class _Case(msgspec.Struct, frozen=True):
    id: _Name
    judgements: list[_Judgement]
    engine: _Engine | None = None
    side: str = ""
    not_asked: dict[str, str] = {}


class _Entry(msgspec.Struct, frozen=True):
    run: _Name
    draftgate: str
    started: str
    finished: str
    complete: bool
    verdict: Verdict
    command: str
    machine: dict[str, Any]


class _Comparison(msgspec.Struct, frozen=True):
    old: str
    new: str


class _Record(msgspec.Struct, frozen=True):
    draftgate: str
    complete: bool
    verdict: Verdict
    started: str
    cases: list[_Case]
    finished: str = ""
    command: str = ""
    machine: dict[str, Any] = {}
    comparison: _Comparison | None = None
    asked: _Suites = {}
    not_selected: _Suites = {}
    never_judged: _Suites = {}
    merged: list[_Entry] = []


@dataclasses.dataclass(frozen=True)
class _Shard:
    path: Path
    name: str
    record: _Record
    cases: tuple[dict[str, Any], ...]

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def selected(self) -> _Suites:
        """The suites that were left to run: what was asked, less what was left out by hand."""
        left_out = self.record.not_selected
        return {
            case: [suite for suite in suites if suite not in left_out.get(case, ())]
            for case, suites in self.record.asked.items()
        }

    def unexplained(self) -> list[Verdict]:
        """Return the record's verdict if it is worse than its judgements and what was never judged make it."""
        counted = [case for case in self.record.cases if case.side != "old"]
        seen = [judgement.verdict for case in counted for judgement in case.judgements]
        if self.record.never_judged:
            seen.append(Verdict.INVALID)
        explained = worst(seen)
        return [] if worst([explained, self.record.verdict]) == explained else [self.record.verdict]


@dataclasses.dataclass(frozen=True)
class Merged:
    """The merged run, its record, and what a person should know about the join."""

    run: RunFolder
    record: Mapping[str, Any]
    notes: tuple[str, ...]


def merge(out: Path, runs: Sequence[Path]) -> Merged:
    """Join runs, named by folder or record, into the new run folder `out`.

    A case that one run left out and another judged is judged. The verdict is the worst. `out` appears whole or not.

    Raises:
        UsageError: `out` is there; a record is none, of another schema, or names a file that cannot be; two runs judged
            one case and do not agree to the byte; or a folder cannot be read or written.

    """
    if os.path.lexists(out):
        raise UsageError(f"{out}: is there already", remedy="name a folder that is not there yet")
    shards = [_shard(run) for run in runs]
    chosen = _united(shards)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
        made.mkdir()
        try:
            notes = _write(RunFolder(made), shards, chosen)
            record = RunFolder(made).assemble(
                complete=all(shard.record.complete for shard in shards),
                at_least=[verdict for shard in shards for verdict in shard.unexplained()],
            )
            made.rename(out)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except (OSError, shutil.Error) as error:
        raise UsageError(
            f"{out}: cannot be made: {error}", remedy="see that the runs can be read, and that there is room"
        ) from error
    return Merged(RunFolder(out), record, (*_versions(shards), *notes))


def _shard(run: Path) -> _Shard:
    path = record_path(run)
    data, _ = load(path)
    record = decode(path, data, _Record)
    for names, what in (
        ([case.id for case in record.cases], "case"),
        *(([judgement.test for judgement in case.judgements], f"test of case {case.id!r}") for case in record.cases),
    ):
        for name in names:
            if not _is_file_name(name):
                raise UsageError(f"{path}: {what} {name!r} is no name of a file", remedy="run the suites again")
        if len(set(names)) < len(names):
            raise UsageError(f"{path}: has a {what} twice", remedy="run the suites again")
    name = path.resolve().parent.name
    # A case of a merged run says itself where it was measured.
    return _Shard(path, name, record, tuple({**case, "run": case.get("run", name)} for case in data["cases"]))


def _is_file_name(name: str) -> bool:
    return name not in (".", "..") and not {"/", "\0"} & set(name) and len(os.fsencode(name)) <= 200


def _united(shards: Iterable[_Shard]) -> dict[str, tuple[_Shard, dict[str, Any]]]:
    """Return each case with the shard that judged it. One that no judgement was made of gives way to one that was."""
    chosen: dict[str, tuple[_Shard, dict[str, Any]]] = {}
    for shard in shards:
        for case in shard.cases:
            first = chosen.get(case["id"])
            if first is None or not first[1]["judgements"]:
                chosen[case["id"]] = (shard, case)
            elif case["judgements"] and _canonical(case) != _canonical(first[1]):
                raise UsageError(
                    f"case {case['id']!r} was judged twice, and not the same: in {first[0].path} and in {shard.path}",
                    remedy="leave one of the two runs out; runs of the same case are compared, not joined",
                )
    return chosen


def _write(out: RunFolder, shards: Sequence[_Shard], chosen: Mapping[str, tuple[_Shard, dict[str, Any]]]) -> list[str]:
    asked = _union(shard.record.asked for shard in shards)
    out.write_run(
        started=min(shard.record.started for shard in shards),
        finished=max(shard.record.finished for shard in shards),
        command="; ".join(dict.fromkeys(shard.record.command for shard in shards)),
        machine=_common([shard.record.machine for shard in shards]),
        comparison=msgspec.to_builtins(_comparison(shards)),
        asked=asked,
        merged=_provenance(shards),
    )
    selection = {
        case: {suite: suite for suite in suites} for case, suites in _union(shard.selected for shard in shards).items()
    }
    for name, (shard, _) in chosen.items():
        # A suite may be judged in part: its record names the suite, not the test that is missing.
        for suite in shard.record.never_judged.get(name, ()):
            selection.setdefault(name, {})[f"what {shard.name} did not judge of {suite}"] = suite
    out.write_selection(selection)
    notes = []
    for name, (shard, case) in chosen.items():
        facts = {key: value for key, value in case.items() if key not in ("id", "judgements")}
        source = shard.folder / "cases" / name
        if source.is_dir():
            shutil.copytree(source, out.case(name), ignore=_not_plain, dirs_exist_ok=True)
            notes += _lock(out, shard, name)
        else:
            notes.append(f"{name}: {shard.folder} has the record only, so no logs and no evidence files came along")
        shutil.rmtree(out.case(name) / "judgements", ignore_errors=True)
        (out.case(name) / "case.json").unlink(missing_ok=True)
        # The record is what was read and checked; the files beside it are written from it.
        out.write_case(name, **facts)
        folder = out.case(name) / "judgements"
        folder.mkdir()
        for judgement in case["judgements"]:
            write_atomically(folder / f"{judgement['test']}.json", json.dumps(judgement, indent=1) + "\n")
    return notes


def _lock(out: RunFolder, shard: _Shard, name: str) -> list[str]:
    """Copy the lock of a case's engine environment; return why it did not come along, if it did not."""
    engine = next(case.engine for case in shard.record.cases if case.id == name)
    if engine is None or not engine.lock:
        return []
    lock = shard.folder / "locks" / f"{engine.lock[:12]}.txt"
    if lock.is_symlink() or not lock.is_file() or sha256_of(lock) != engine.lock:
        return [f"{name}: {lock} is not the lock that the record names, so it did not come along"]
    copy = out.path / "locks" / lock.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(lock, copy)
    return []


def _provenance(shards: Iterable[_Shard]) -> list[dict[str, Any]]:
    """Return what is known of each run that measured; a run that is itself a merged one names those it was made of."""
    entries: dict[str, _Entry] = {}
    for shard in shards:
        record = shard.record
        own = _Entry(
            shard.name, record.draftgate, record.started, record.finished, record.complete, record.verdict,
            record.command, record.machine,
        )  # fmt: skip
        for entry in record.merged or [own]:
            if entries.setdefault(entry.run, entry) != entry:
                raise UsageError(
                    f"{shard.path}: another of the runs is named {entry.run!r} too",
                    remedy="rename the folder of one of them: cases are told apart by the run that measured them",
                )
    made: list[dict[str, Any]] = msgspec.to_builtins(list(entries.values()))
    return made


def _comparison(shards: Sequence[_Shard]) -> _Comparison | None:
    """Return the two releases that are compared, if any: one record has one answer."""
    first, *others = shards
    for other in others:
        if other.record.comparison != first.record.comparison:
            raise UsageError(
                f"{other.path}: {_compared(other)}, and {first.path} {_compared(first)}",
                remedy="merge runs of one comparison, or runs that compare nothing",
            )
    return first.record.comparison


def _compared(shard: _Shard) -> str:
    sides = shard.record.comparison
    return "compares no releases" if sides is None else f"compares {sides.old} with {sides.new}"


def _union(parts: Iterable[_Suites]) -> _Suites:
    united: _Suites = {}
    for part in parts:
        for case, suites in part.items():
            united[case] = list(dict.fromkeys([*united.get(case, []), *suites]))
    return united


def _common(machines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all machines have in common."""
    first, *others = machines
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _versions(shards: Sequence[_Shard]) -> list[str]:
    versions = {shard.name: shard.record.draftgate for shard in shards}
    if len(set(versions.values())) < 2:
        return []
    named = ", ".join(f"{version} ({name})" for name, version in versions.items())
    return [f"judged by different versions of draftgate: {named}"]


def _not_plain(folder: str, names: list[str]) -> set[str]:
    """Return what is neither a file nor a folder: a link may point anywhere, a pipe never ends."""
    kinds = {name: (Path(folder) / name).lstat().st_mode for name in names}
    return {name for name, mode in kinds.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))}


def _canonical(case: Mapping[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)

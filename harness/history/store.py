"""The history file: SQLite in WAL mode, one writer at a time, whole or not at all.

A new file appears under its name with its tables in it (made beside it, then linked), and everything after that happens
in transactions. A writer that is killed therefore leaves the file as it was before.

`PRAGMA user_version` is the number of migrations applied. A file of a later draftgate, with more, is refused untouched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.files import new_beside
from harness.history import facts

__all__ = ["FILE_NAME", "Concluded", "HistoryError", "Measured", "add", "concluded", "measured", "remember", "runs"]

FILE_NAME = "history.sqlite"
"""In the folder of the runs."""

BUSY_S = 30.0
"""How long a writer waits for another one."""

APPLICATION = 0x44474154
"""`PRAGMA application_id` of a history file: "DGAT"."""

_REBUILD = "move it away; `draftgate history --add RUN...` builds a new one from the runs' folders"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE runs (
            id TEXT PRIMARY KEY, digest TEXT NOT NULL, started TEXT NOT NULL, finished TEXT NOT NULL,
            complete INTEGER NOT NULL, verdict TEXT NOT NULL, draftgate TEXT NOT NULL, machine TEXT NOT NULL
        )
        """,
        """
        CREATE TABLE cases (
            id INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, name TEXT NOT NULL,
            measured_in TEXT NOT NULL, started TEXT NOT NULL, draftgate TEXT NOT NULL, machine TEXT NOT NULL,
            pair TEXT NOT NULL, engine TEXT NOT NULL, version TEXT NOT NULL, runner TEXT NOT NULL, device TEXT NOT NULL,
            k INTEGER, target TEXT NOT NULL, drafter TEXT NOT NULL, prompts TEXT NOT NULL,
            UNIQUE (run, name)
        )
        """,
        """
        CREATE TABLE suites (
            id INTEGER PRIMARY KEY, case_id INTEGER NOT NULL REFERENCES cases ON DELETE CASCADE,
            name TEXT NOT NULL, verdict TEXT NOT NULL,
            UNIQUE (case_id, name)
        )
        """,
        """
        CREATE TABLE red (
            suite_id INTEGER NOT NULL REFERENCES suites ON DELETE CASCADE, code TEXT NOT NULL,
            PRIMARY KEY (suite_id, code)
        )
        """,
        """
        CREATE TABLE figures (
            suite_id INTEGER NOT NULL REFERENCES suites ON DELETE CASCADE,
            name TEXT NOT NULL, value REAL NOT NULL, lower REAL, upper REAL,
            PRIMARY KEY (suite_id, name)
        )
        """,
    ),
)
"""Statements that take a file from version N to N + 1. What has been released is never edited, only added to."""


class HistoryError(UsageError):
    """The history file cannot be used. Names the file."""


@dataclasses.dataclass(frozen=True)
class Concluded:
    """A suite's verdict on a case and the codes of its red findings, who was judged, and on what."""

    run: str
    case: str
    started: str
    draftgate: str
    machine: str
    pair: str
    engine: str
    version: str
    runner: str
    device: str
    k: int | None
    target: str
    drafter: str
    prompts: str
    suite: str
    verdict: str
    red: str


@dataclasses.dataclass(frozen=True)
class Measured(Concluded):
    """A figure of a suite, with its interval where it is an estimate."""

    metric: str
    value: float
    lower: float | None
    upper: float | None


def remember(run: Path) -> str:
    """Add a finished run to the history beside its folder; return "" or why that failed, in one line.

    For whoever has a verdict to deliver, which no fault of the history may change: nothing is raised.
    """
    try:
        add(run.parent / FILE_NAME, facts.read(run))
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is told and not raised
        why = getattr(error, "message", f"{type(error).__name__}: {error}")
        return f"not in the history: {why}; to add it: draftgate history --runs {run.parent} --add {run}"
    return ""


def add(path: Path, run: facts.Run) -> str:
    """Add a run to the history file, which is made if need be; return "added", "updated" or "unchanged".

    A run that is there with the same record is left alone; one with another record is replaced, in one transaction.

    Raises:
        HistoryError: the file is of a later draftgate, damaged, no history, or held by another writer for `BUSY_S`;
            another run has this run's id; or the history has more of this run than an incomplete record does.

    """
    with _opened(path, create=True) as connection, _transaction(connection):
        row = connection.execute(
            "SELECT digest, started, complete, (SELECT count(*) FROM cases JOIN suites ON suites.case_id = cases.id "
            "WHERE cases.run = runs.id) FROM runs WHERE id = ?",
            (run.id,),
        ).fetchone()
        if row and row[0] == run.digest:
            return "unchanged"
        if row and row[1] != run.started:
            raise HistoryError(
                f"{path}: has another run {run.id!r}, started {row[1]}, not {run.started}",
                remedy="rename the folder of the run that is to be added",
            )
        judged = sum(len(case.suites) for case in run.cases)
        if row and not run.complete and (row[2] or row[3] > judged):
            raise HistoryError(
                f"{path}: has more of run {run.id!r} than this record, which was written before the run ended: "
                f"{row[3]} judged suites, not {judged}",
                remedy="add the record from the folder in which the run ended",
            )
        connection.execute("DELETE FROM runs WHERE id = ?", (run.id,))
        _insert(connection, run)
        return "updated" if row else "added"


def _insert(connection: sqlite3.Connection, run: facts.Run) -> None:
    _row(
        connection, "runs", id=run.id, digest=run.digest, started=run.started, finished=run.finished,
        complete=run.complete, verdict=run.verdict, draftgate=run.draftgate, machine=run.machine,
    )  # fmt: skip
    for case in run.cases:
        columns = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
        suites = columns.pop("suites")
        case_id = _row(connection, "cases", run=run.id, **columns)
        for suite in suites:
            suite_id = _row(connection, "suites", case_id=case_id, name=suite.name, verdict=suite.verdict)
            for code in suite.red:
                _row(connection, "red", suite_id=suite_id, code=code)
            for figure in suite.figures:
                _row(connection, "figures", suite_id=suite_id, **dataclasses.asdict(figure))


def _row(connection: sqlite3.Connection, table: str, **columns: Any) -> int | None:
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    # The names are those of this module's own dataclasses and calls; what comes from outside is bound.
    return connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", [*columns.values()]).lastrowid  # noqa: S608


def runs(path: Path) -> int:
    """Return how many runs a history file holds. Raises HistoryError."""
    with _opened(path) as connection:
        return int(connection.execute("SELECT count(*) FROM runs").fetchone()[0])


_WHO = (
    "cases.measured_in, cases.name, cases.started, cases.draftgate, cases.machine, cases.pair, cases.engine, "
    "cases.version, cases.runner, cases.device, cases.k, cases.target, cases.drafter, cases.prompts, suites.name, "
    "suites.verdict, coalesce((SELECT group_concat(code, ' ') FROM red WHERE suite_id = suites.id), '')"
)
_FROM = "FROM cases JOIN suites ON suites.case_id = cases.id"
# What a merged run repeats is overwritten by what the run itself says.
_ORDER = "ORDER BY cases.run = cases.measured_in"


def concluded(path: Path) -> list[Concluded]:
    """Return every suite's verdict on every case, each once although merged runs repeat it. Raises HistoryError."""
    with _opened(path) as connection:
        rows = connection.execute(f"SELECT {_WHO} {_FROM} {_ORDER}").fetchall()
    made = (Concluded(*row) for row in rows)
    return list({(each.run, each.case, each.suite): each for each in made}.values())


def measured(path: Path) -> list[Measured]:
    """Return every figure, each once although merged runs repeat it. Raises HistoryError."""
    figures = "figures.name, figures.value, figures.lower, figures.upper"
    join = f"{_FROM} JOIN figures ON figures.suite_id = suites.id {_ORDER}"
    with _opened(path) as connection:
        rows = connection.execute(f"SELECT {_WHO}, {figures} {join}").fetchall()
    made = (Measured(*row) for row in rows)
    return list({(each.run, each.case, each.suite, each.metric): each for each in made}.values())


@contextlib.contextmanager
def _opened(path: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    """Open a history file of this version, migrated if it is older; whatever SQLite raises names the file."""
    try:
        if create and not path.exists():
            _create(path)
        if not path.is_file():
            raise HistoryError(
                f"{path}: no history there", remedy="run a pair first, or name the file by --db, its folder by --runs"
            )
        with contextlib.closing(_connect(path)) as connection:
            _check(connection, path)
            _migrate(connection)
            connection.execute("PRAGMA foreign_keys = ON")
            yield connection
    except sqlite3.Error as error:
        raise _explained(path, error) from error
    except OSError as error:
        raise HistoryError(
            f"{path}: {error.strerror}", remedy="see that the folder can be written and has room"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    if _pragma(connection, "application_id") != APPLICATION:
        raise HistoryError(
            f"{path}: is not a history of draftgate's", remedy="name another file by --db, or move this one away"
        )
    version = _pragma(connection, "user_version")
    if version > len(MIGRATIONS):
        raise HistoryError(
            f"{path}: is of version {version}, and this draftgate knows {len(MIGRATIONS)}",
            remedy="use the later draftgate that wrote it, or name another file by --db",
        )
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise HistoryError(f"{path}: is damaged: {verdict}", remedy=_REBUILD)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = new_beside(path)
    try:
        with contextlib.closing(_connect(made)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            _migrate(connection)
        # Unlike a rename, a link does not replace what another process has made meanwhile.
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        for left in (made, *(made.with_name(f"{made.name}-{kind}") for kind in ("wal", "shm", "journal"))):
            left.unlink(missing_ok=True)


def _migrate(connection: sqlite3.Connection) -> None:
    if _pragma(connection, "user_version") == len(MIGRATIONS):
        return
    with _transaction(connection):
        # Read again: another process may have done it while this one waited.
        for version in range(_pragma(connection, "user_version"), len(MIGRATIONS)):
            for statement in MIGRATIONS[version]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")
        broken = connection.execute("PRAGMA foreign_key_check").fetchone()
        if broken:
            raise sqlite3.IntegrityError(f"a row of {broken[0]} refers to one of {broken[2]} that is not there")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold the right to write from the start, so that what is read first is still so when it is written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _explained(path: Path, error: sqlite3.Error) -> HistoryError:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_BUSY"):
        return HistoryError(
            f"{path}: another process has been writing for {BUSY_S:.0f} s", remedy="see who holds it, and try again"
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return HistoryError(f"{path}: is damaged, or no SQLite file: {error}", remedy=_REBUILD)
    return HistoryError(
        f"{path}: {error}", remedy="see that the folder is on a local disk, can be written and has room"
    )

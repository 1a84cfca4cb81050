"""What happens to files: killed and concurrent writers, other versions, damage, hostile names."""

import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.history import facts, store
from harness.history.store import HistoryError
from tests.history.support import accepted, case_facts, edit, judged, make, one

ROOT = Path(__file__).parents[2]

WRITER = """
import os, signal, sys
from pathlib import Path
from harness.history import facts, store

path, *runs = map(Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
"""

KILLED_IN_A_TRANSACTION = """
insert, rows = store._row, []

def row(connection, *words, **columns):
    # No room in memory: what is not committed goes to disk at once.
    connection.execute("PRAGMA cache_size = 1")
    rows.append(insert(connection, *words, **columns))
    if len(rows) == 400:
        os.kill(os.getpid(), signal.SIGKILL)
    return rows[-1]

store._row = row
"""

KILLED_WHEN_MADE = "store.os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"

KILLED_IN_A_MIGRATION = """
import contextlib

transaction = store._transaction

@contextlib.contextmanager
def killed(connection):
    with transaction(connection):
        yield
        os.kill(os.getpid(), signal.SIGKILL)

store._transaction = killed
store.MIGRATIONS += (("ALTER TABLE runs ADD COLUMN note TEXT",),)
store.runs(path)
"""

ADD = "for run in runs:\n    store.add(path, facts.read(run))\n"


def writer(body, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + body, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def outcome(process):
    process.communicate("go\n", timeout=120)
    return process.returncode


@pytest.fixture
def path(tmp_path):
    return tmp_path / store.FILE_NAME


def add(path, run):
    return store.add(path, facts.read(run))


def lengths(path):
    return {each.run: each.value for each in store.measured(path) if each.metric == "accept_length"}


def sound(path):
    with sqlite3.connect(path) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
        return mode, verdict, connection.execute("PRAGMA foreign_key_check").fetchall()


def test_a_run_is_kept(tmp_path, path):
    run = one(tmp_path, "r1", 3.0, machine={"cpu": "x"}, asked={"p-vllm-v1": ["acceptance"]})
    assert add(path, run) == "added"
    assert store.runs(path) == 1
    measured = {each.metric: each for each in store.measured(path)}
    assert {name: each.value for name, each in measured.items()} == {
        "accept_length": 3.0, "acceptance.0": 1.0, "acceptance.1": 1.0, "acceptance.2": 0, "acceptance.3": 0,
    }  # fmt: skip
    length = measured["accept_length"]
    assert (length.run, length.case, length.pair, length.engine, length.version) == (
        "r1", "p-vllm-v1", "p", "vllm", "0.30.0",
    )  # fmt: skip
    assert (length.machine, length.started, length.lower) == ('{"cpu": "x"}', "2026-11-30T10:00:00Z", None)
    assert sound(path) == ("wal", "ok", [])


def test_twice_is_once(tmp_path, path):
    run = one(tmp_path, "r1")
    assert add(path, run) == "added"
    before = path.read_bytes()
    assert add(path, run) == "unchanged"
    assert path.read_bytes() == before


def test_a_run_assembled_again_replaces_what_was_there(tmp_path, path):
    facts_, first = case_facts(), accepted(10, 10, [10])
    add(path, make(tmp_path / "r1", {"a": (facts_, [first])}, complete=False))
    shutil.rmtree(tmp_path / "r1" / "cases")
    again = {"b": (facts_, [accepted(10, 20, [10, 10]), judged("weights", "FAIL", "WGT003")])}
    assert add(path, make(tmp_path / "r1", again)) == "updated"
    assert {(each.case, each.suite, each.verdict, each.red) for each in store.concluded(path)} == {
        ("b", "acceptance", "PASS", ""), ("b", "weights", "FAIL", "WGT003"),
    }  # fmt: skip
    assert lengths(path) == {"r1": 3.0}
    assert store.runs(path) == 1
    assert sound(path)[2] == []


def test_another_run_of_the_same_name_is_refused(tmp_path, path):
    add(path, one(tmp_path, "r1"))
    with pytest.raises(HistoryError, match="another run 'r1'"):
        add(path, one(tmp_path / "elsewhere", "r1", 2.0, started="2026-12-01T00:00:00Z"))
    assert lengths(path) == {"r1": 3.0}


def test_an_older_copy_does_not_replace_what_is_known(tmp_path, path):
    two = [accepted(10, 20, [10, 10]), judged("weights")]
    for name, complete in (("ended", True), ("killed", False)):
        first = make(tmp_path / "copy" / name, {"a": (case_facts(), two[:1])}, complete=False)
        last = make(tmp_path / name, {"a": (case_facts(), two)}, complete=complete)
        assert add(path, first) == "added"
        assert add(path, last) == "updated"
        before = store.concluded(path)
        with pytest.raises(HistoryError, match=f"has more of run '{name}'") as caught:
            add(path, first)
        assert caught.value.remedy
        assert store.concluded(path) == before
    equal = make(tmp_path / "copy" / "ended", {"a": (case_facts(), two)}, complete=False)
    with pytest.raises(HistoryError, match="before the run ended"):
        add(path, equal)
    assert lengths(path) == {"ended": 3.0, "killed": 3.0}


def test_the_file_may_be_read_by_whom_the_umask_lets(tmp_path, path, request):
    former = os.umask(0o002)
    request.addfinalizer(lambda: os.umask(former))
    add(path, one(tmp_path, "r1"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_a_writer_killed_in_a_transaction(tmp_path, path):
    add(path, one(tmp_path, "before"))
    many = {f"c{index}": (case_facts(), [accepted(10, 10, [10])]) for index in range(200)}
    run = make(tmp_path / "killed", many)
    process = writer(KILLED_IN_A_TRANSACTION + ADD, path, run)
    assert outcome(process) == -signal.SIGKILL
    assert path.with_name(f"{path.name}-wal").stat().st_size > 0, "nothing was on disk yet: the fault was not injected"
    assert lengths(path) == {"before": 3.0}
    assert add(path, one(tmp_path, "after", 2.0)) == "added"
    assert add(path, run) == "added"
    assert store.runs(path) == 3
    assert sound(path) == ("wal", "ok", [])


def test_a_writer_killed_while_it_makes_the_file(tmp_path, path):
    run = one(tmp_path, "r1")
    process = writer(KILLED_WHEN_MADE + ADD, path, run)
    assert outcome(process) == -signal.SIGKILL
    assert not path.exists()
    assert add(path, run) == "added"


def test_eight_writers_at_once_on_a_file_that_is_not_there_yet(tmp_path, path):
    names = [[f"w{writer}-{index}" for index in range(4)] for writer in range(8)]
    processes = [writer(ADD, path, *(one(tmp_path, name) for name in mine)) for mine in names]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(timeout=120) for process in processes] == [0] * 8
    for process in processes:
        process.communicate()
    assert set(lengths(path)) == {name for mine in names for name in mine}
    assert sound(path) == ("wal", "ok", [])


def test_a_writer_that_never_ends_is_named(tmp_path, path, monkeypatch):
    run = one(tmp_path, "r1")
    add(path, run)
    monkeypatch.setattr(store, "BUSY_S", 0.0)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(HistoryError, match=f"{path}: another process"):
        add(path, one(tmp_path, "r2"))
    assert lengths(path) == {"r1": 3.0}, "readers do not wait for a writer"
    holder.close()


def migrated(path):
    with sqlite3.connect(path) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
        return connection.execute("PRAGMA user_version").fetchone()[0], columns


def test_a_file_of_a_later_version_is_refused_untouched(tmp_path, path):
    add(path, one(tmp_path, "r1"))
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {len(store.MIGRATIONS) + 1}")
    connection.close()
    before = path.read_bytes()
    for use in (store.measured, store.concluded, store.runs, lambda path: add(path, one(tmp_path, "r2"))):
        with pytest.raises(HistoryError, match="version 2, and this draftgate knows 1") as caught:
            use(path)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert list(tmp_path.glob("*.sqlite*")) == [path]


def test_a_file_of_an_earlier_version_is_migrated(tmp_path, path, monkeypatch):
    add(path, one(tmp_path, "r1"))
    assert migrated(path)[0] == 1
    later = (*store.MIGRATIONS, ("ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT 'old'",))
    monkeypatch.setattr(store, "MIGRATIONS", later)
    assert lengths(path) == {"r1": 3.0}
    version, columns = migrated(path)
    assert (version, columns[-1]) == (2, "note")
    assert add(path, one(tmp_path, "r2")) == "added"
    monkeypatch.undo()
    with pytest.raises(HistoryError, match="version 2"):
        store.runs(path)


def test_a_migration_that_fails_leaves_the_earlier_version(tmp_path, path, monkeypatch):
    add(path, one(tmp_path, "r1"))
    broken = ("ALTER TABLE runs ADD COLUMN note TEXT", "DROP TABLE nonsense")
    monkeypatch.setattr(store, "MIGRATIONS", (*store.MIGRATIONS, broken))
    with pytest.raises(HistoryError, match="nonsense"):
        store.runs(path)
    monkeypatch.undo()
    assert migrated(path)[0] == 1
    assert "note" not in migrated(path)[1]
    assert lengths(path) == {"r1": 3.0}


def test_a_migration_that_is_killed_leaves_the_earlier_version(tmp_path, path):
    add(path, one(tmp_path, "r1"))
    assert outcome(writer(KILLED_IN_A_MIGRATION, path)) == -signal.SIGKILL
    assert migrated(path)[0] == 1
    assert "note" not in migrated(path)[1]
    assert add(path, one(tmp_path, "r2")) == "added"


def test_a_migration_that_breaks_references_is_undone(tmp_path, path, monkeypatch):
    add(path, one(tmp_path, "r1"))
    monkeypatch.setattr(store, "MIGRATIONS", (*store.MIGRATIONS, ("DELETE FROM runs",)))
    with pytest.raises(HistoryError, match="cases refers to one of runs"):
        store.runs(path)
    monkeypatch.undo()
    assert lengths(path) == {"r1": 3.0}


def overwritten(path):
    data = bytearray(path.read_bytes())
    data[4096 : len(data) - 4096] = b"\xa5" * (len(data) - 8192)
    return bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"not a database, but long enough to hold the header that one begins with" * 100,
        overwritten,
        lambda path: path.read_bytes()[:5000],
        lambda path: path.read_bytes()[:50],
        lambda path: b"\0" * len(path.read_bytes()),
    ],
    ids=["empty", "text", "overwritten", "cut", "cut in the header", "zeroes"],
)
def test_a_damaged_file_is_named(tmp_path, path, damage):
    add(path, one(tmp_path, "r1"))
    path.write_bytes(damage(path))
    before = path.read_bytes()
    for use in (store.measured, store.runs, lambda path: add(path, one(tmp_path, "r2"))):
        with pytest.raises(HistoryError) as caught:
            use(path)
        assert str(path) in caught.value.message
        assert "move" in caught.value.remedy
    assert path.read_bytes() == before


def test_a_database_of_somebody_else_is_refused_untouched(tmp_path, path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE runs (id TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(HistoryError, match="not a history"):
        add(path, one(tmp_path, "r1"))
    assert path.read_bytes() == before


def test_no_file(path):
    with pytest.raises(HistoryError, match="no history there"):
        store.runs(path)
    assert not path.exists()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="file"):
        add(tmp_path / "file" / "history.sqlite", one(tmp_path, "r1"))


@pytest.mark.parametrize(
    "name",
    ["'; DROP TABLE runs; --", '"', "[bold red]x[/]", "<script>", "a\nb\x1b[2J", "\ud800", "nul\0", "%s ?1 :x", "名"],
)
def test_hostile_names_are_names(tmp_path, path, name):
    run = one(tmp_path, "r1")
    record = json.loads((run / "record.json").read_text())
    (case,) = record["cases"]
    case |= {"id": name, "pair": {"name": name, "k": 4}, "runner_asked": name, "device": name}
    case["engine"] = {"engine": name, "version": name}
    case["judgements"][0] |= {"findings": [{"code": name, "verdict": "FAIL"}]}
    edit(run, cases=[case], draftgate=name, machine={name: name}, started=name)
    kept = name.replace("\ud800", "?")
    assert add(path, run) == "added"
    assert add(path, run) == "unchanged"
    (each,) = store.concluded(path)
    assert {each.case, each.pair, each.engine, each.version, each.runner, each.device, each.red, each.started} == {kept}
    assert store.runs(path) == 1


def test_a_merged_run_does_not_count_twice(tmp_path, path):
    from harness.history.merge import merge

    shards = [one(tmp_path, "r1"), make(tmp_path / "r2", {"q": (case_facts(pair="q"), [accepted(10, 10, [10])])})]
    merged = merge(tmp_path / "all", shards).run.path
    add(path, merged)
    alone = store.measured(path)
    for shard in shards:
        add(path, shard)
    assert store.runs(path) == 3
    assert {dataclasses.astuple(each) for each in store.measured(path)} == {dataclasses.astuple(each) for each in alone}
    assert {each.run for each in alone} == {"r1", "r2"}


def test_remember_tells_and_does_not_raise(tmp_path, path):
    run = one(tmp_path, "r1")
    assert store.remember(run) == ""
    path.write_bytes(b"x" * 5000)
    told = store.remember(one(tmp_path, "r2"))
    assert str(path) in told
    assert "history" in told
    assert "--add" in told
    (run / "record.json").unlink()
    assert "record.json" in store.remember(run)

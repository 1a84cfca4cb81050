"""Joining records: what is united, what is refused, and that nothing is hidden or lost."""

import hashlib
import json
import os
import shutil

import pytest

from harness.errors import UsageError
from harness.history.merge import merge
from tests.history.support import accepted, case_facts, edit, judged, make, one

BOTH = {"a": ["weights", "acceptance"], "b": ["weights"]}


def shard(root, name, case, verdict="PASS", **more):
    """Write the shard that was asked for both cases and left `case` to run, all its suites judged alike."""
    suites = BOTH[case]
    judgements = [judged(suite, verdict) for suite in suites]
    more = {"asked": BOTH, "selected": {case: suites}} | more
    return make(root / name, {case: (case_facts(pair=case), judgements)}, **more)


def state(folder):
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_shards_become_one_run(tmp_path):
    first = shard(tmp_path, "s1", "a", started="2026-11-30T10:00:00Z", machine={"cpu": "x", "system": "Linux"})
    second = shard(tmp_path, "s2", "b", "FAIL", started="2026-11-30T09:00:00Z", machine={"cpu": "y", "system": "Linux"})
    for path, text in (("evidence/rank0.json", "{}"), ("spec/a-spec.log", "a log"), ("case.json", "stale")):
        (first / "cases" / "a" / path).parent.mkdir(exist_ok=True)
        (first / "cases" / "a" / path).write_text(text)
    before = state(tmp_path)
    merged = merge(tmp_path / "out", [first, second / "record.json"])
    assert {name: kept for name, kept in state(tmp_path).items() if not name.startswith("out/")} == before
    shutil.rmtree(first)
    shutil.rmtree(second)
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record == json.loads(json.dumps(merged.record))
    assert [case["id"] for case in record["cases"]] == ["a", "b"]
    assert [case["run"] for case in record["cases"]] == ["s1", "s2"]
    assert [len(case["judgements"]) for case in record["cases"]] == [2, 1]
    assert (record["verdict"], record["complete"], record["schema"]) == ("FAIL", True, 1)
    assert (record["asked"], record["not_selected"], record["never_judged"]) == (BOTH, {}, {})
    assert (record["started"], record["finished"]) == ("2026-11-30T09:00:00Z", "2026-11-30T10:00:00Z")
    assert record["machine"] == {"system": "Linux"}
    assert [(each["run"], each["verdict"], each["machine"]["cpu"]) for each in record["merged"]] == [
        ("s1", "PASS", "x"), ("s2", "FAIL", "y"),
    ]  # fmt: skip
    assert (tmp_path / "out" / "cases" / "a" / "spec" / "a-spec.log").read_text() == "a log"
    assert (tmp_path / "out" / "cases" / "a" / "evidence" / "rank0.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "cases" / "a" / "case.json").read_text())["pair"]["name"] == "a"
    assert merged.notes == ()


def test_what_no_shard_selected_and_what_none_judged(tmp_path):
    asked = {"a": ["weights", "acceptance", "startup"], "b": ["weights"], "c": ["weights"]}
    first = make(
        tmp_path / "s1", {"a": (case_facts(), [judged("weights")])},
        asked=asked, selected={"a": ["weights", "acceptance"]},
    )  # fmt: skip
    second = make(tmp_path / "s2", {"b": (case_facts(), [judged("weights")])}, asked=asked, selected={"b": ["weights"]})
    record = merge(tmp_path / "out", [first, second]).record
    assert record["not_selected"] == {"a": ["startup"], "c": ["weights"]}
    assert record["never_judged"] == {"a": ["acceptance"]}
    assert record["verdict"] == "INVALID"


def test_what_one_shard_did_not_get_to_and_another_judged_is_judged(tmp_path):
    cut = make(
        tmp_path / "s1", {"b": (case_facts(pair="b"), [])}, asked=BOTH, selected={"b": BOTH["b"]}, complete=False
    )
    rest = [shard(tmp_path, "s2", "a"), shard(tmp_path, "s3", "b")]
    for number, runs in enumerate(([cut, *rest], [*rest, cut])):
        record = merge(tmp_path / f"out{number}", runs).record
        assert (record["never_judged"], record["verdict"]) == ({}, "PASS")
        assert record["complete"] is False, "one of them did not come to its end"
        assert [case["run"] for case in record["cases"]] == ["s2", "s3"]


def test_a_suite_that_was_judged_in_part_stays_so(tmp_path):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b")]
    edit(runs[0], never_judged={"a": ["weights"]}, verdict="INVALID")
    record = merge(tmp_path / "out", runs).record
    assert (record["never_judged"], record["verdict"]) == ({"a": ["weights"]}, "INVALID")


def compared(root, name, pair, old="PASS", new="PASS", releases=("0.30.0", "0.31.0")):
    cases = {
        f"{pair}-{side}": (case_facts(pair=pair, side=side), [judged("weights", verdict)])
        for side, verdict in (("old", old), ("new", new))
    }
    run = make(root / name, cases)
    edit(run, comparison=dict(zip(("old", "new"), releases, strict=True)))
    return run


def test_what_an_old_release_does_wrong_is_not_the_merged_verdict(tmp_path):
    merged = merge(tmp_path / "out", [compared(tmp_path, "s1", "p", old="FAIL"), compared(tmp_path, "s2", "q")])
    assert merged.record["verdict"] == "PASS"
    assert merged.record["comparison"] == {"old": "0.30.0", "new": "0.31.0"}
    assert [case["side"] for case in merged.record["cases"]] == ["new", "old", "new", "old"]
    worse = merge(tmp_path / "worse", [compared(tmp_path, "s3", "p"), compared(tmp_path, "s4", "q", new="FAIL")])
    assert worse.record["verdict"] == "FAIL"


def test_other_comparisons_are_refused(tmp_path):
    runs = [compared(tmp_path, "s1", "p"), compared(tmp_path, "s2", "q", releases=("0.29.0", "0.31.0"))]
    with pytest.raises(UsageError, match=r"0\.29\.0 with 0\.31\.0"):
        merge(tmp_path / "out", runs)
    with pytest.raises(UsageError, match="compares no releases"):
        merge(tmp_path / "out", [runs[0], shard(tmp_path, "s3", "a")])


@pytest.mark.parametrize("verdict", ["INCONCLUSIVE", "INVALID", "FAIL"])
def test_the_verdict_is_the_worst(tmp_path, verdict):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b", verdict)]
    assert merge(tmp_path / "out", runs).record["verdict"] == verdict


def test_a_verdict_that_no_judgement_explains_still_counts(tmp_path):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b")]
    edit(runs[1], verdict="FAIL")
    assert merge(tmp_path / "out", runs).record["verdict"] == "FAIL"


def test_a_verdict_better_than_its_judgements_does_not(tmp_path):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b", "FAIL")]
    edit(runs[1], verdict="PASS")
    assert merge(tmp_path / "out", runs).record["verdict"] == "FAIL"


def test_nothing_judged_is_no_pass(tmp_path):
    runs = [make(tmp_path / name, {}, asked=BOTH, selected={}) for name in ("s1", "s2")]
    edit(runs[0], verdict="PASS")
    assert merge(tmp_path / "out", runs).record["verdict"] == "INVALID"


def test_the_same_case_twice_is_refused_unless_it_is_the_same(tmp_path):
    measured = accepted(10, 10, [10])
    measured.measurements["ratio"] = float("nan")
    make(tmp_path / "s1", {"a": (case_facts(), [measured])})
    shutil.copytree(tmp_path / "s1", tmp_path / "copy" / "s1")
    merged = merge(tmp_path / "out", [tmp_path / "s1", tmp_path / "copy" / "s1"])
    assert len(merged.record["cases"]) == 1
    make(tmp_path / "s2", {"a": (case_facts(), [accepted(10, 11, [10])])})
    with pytest.raises(UsageError, match="'a' was judged twice") as caught:
        merge(tmp_path / "out2", [tmp_path / "s1", tmp_path / "s2"])
    assert all(f"{name}/record.json" in str(caught.value) for name in ("s1", "s2"))
    assert not (tmp_path / "out2").exists()


def test_a_merged_run_merges_again(tmp_path):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b")]
    once = merge(tmp_path / "once", runs[:1]).run.path
    record = merge(tmp_path / "out", [once, *runs]).record
    assert [case["run"] for case in record["cases"]] == ["s1", "s2"]
    assert [each["run"] for each in record["merged"]] == ["s1", "s2"]


def test_two_runs_of_one_name_are_refused(tmp_path):
    runs = [shard(tmp_path / "x", "record", "a"), shard(tmp_path / "y", "record", "b", started="2026-12-01T00:00:00Z")]
    with pytest.raises(UsageError, match="named 'record' too"):
        merge(tmp_path / "out", runs)
    assert names(tmp_path) == {"x", "y"}


def test_different_versions_of_draftgate_are_noted(tmp_path):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b")]
    edit(runs[1], draftgate="0.9.0")
    (note,) = merge(tmp_path / "out", runs).notes
    assert "0.9.0 (s2)" in note


def test_a_record_without_its_files_is_noted(tmp_path):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b")]
    shutil.rmtree(runs[1] / "cases")
    merged = merge(tmp_path / "out", runs)
    assert merged.record["verdict"] == "PASS"
    assert "s2 has the record only" in merged.notes[0]


def locked(root, name, case, text="vllm==0.32.0 --hash=sha256:0\r\n"):
    """Write a shard whose engine's environment was locked."""
    lock = hashlib.sha256(text.encode()).hexdigest()
    engine = {"engine": "vllm", "version": "0.32.0", "lock": lock}
    run = make(root / name, {case: (case_facts(pair=case) | {"engine": engine}, [judged("weights")])})
    (run / "locks").mkdir()
    (run / "locks" / f"{lock[:12]}.txt").write_bytes(text.encode())
    return run, lock


def test_locks_come_along(tmp_path):
    (first, lock), (second, _), (third, other) = (
        locked(tmp_path, "s1", "a"), locked(tmp_path, "s2", "b"), locked(tmp_path, "s3", "c", "vllm==0.33.0\n"),
    )  # fmt: skip
    merged = merge(tmp_path / "out", [first, second, third])
    assert merged.notes == ()
    kept = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out" / "locks").iterdir()}
    assert kept == {f"{lock[:12]}.txt": lock, f"{other[:12]}.txt": other}
    assert {case["engine"]["lock"] for case in merged.record["cases"]} == {lock, other}


@pytest.mark.parametrize("fault", ["gone", "changed", "a link", "a pipe"])
def test_a_lock_that_is_not_the_one_is_noted_and_stays(tmp_path, fault):
    run, lock = locked(tmp_path, "s1", "a")
    path = run / "locks" / f"{lock[:12]}.txt"
    path.rename(tmp_path / "moved")
    if fault == "changed":
        path.write_text("vllm==6.6.6\n")
    elif fault == "a link":
        path.symlink_to(tmp_path / "moved")
    elif fault == "a pipe":
        os.mkfifo(path)
    (note,) = merge(tmp_path / "out", [run]).notes
    assert f"{lock[:12]}.txt is not the lock" in note
    assert not (tmp_path / "out" / "locks").exists()


def test_a_lock_that_is_no_digest_is_refused_by_name(tmp_path):
    run, _ = locked(tmp_path, "s1", "a")
    cases = json.loads((run / "record.json").read_text())["cases"]
    cases[0]["engine"]["lock"] = "../../secret"
    edit(run, cases=cases)
    with pytest.raises(UsageError, match=r"engine\.lock"):
        merge(tmp_path / "out", [run])


def test_a_key_of_a_case_may_have_any_name(tmp_path):
    odd = {"case_id": "x", "self": 1, "name": "y", "path": "z", "facts": None}
    run = make(tmp_path / "s1", {"a": (case_facts(), [judged("weights")])})
    cases = json.loads((run / "record.json").read_text())["cases"]
    edit(run, cases=[cases[0] | odd])
    (case,) = merge(tmp_path / "out", [run]).record["cases"]
    assert {key: case[key] for key in odd} == odd


def test_links_do_not_come_along(tmp_path):
    run = shard(tmp_path, "s1", "a")
    (tmp_path / "secret").write_text("secret")
    (run / "cases" / "a" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(run / "cases" / "a" / "pipe")
    merge(tmp_path / "out", [run])
    assert names(tmp_path / "out" / "cases" / "a") == {"case.json", "judgements"}


@pytest.mark.parametrize("name", ["../../gone", "/tmp/gone", "..", ".", "", "a\0b", "x" * 300])
@pytest.mark.parametrize("of", ["case", "test"])
def test_a_name_that_is_no_file_is_refused(tmp_path, name, of):
    run = shard(tmp_path / "deep" / "er", "s1", "a")
    cases = json.loads((run / "record.json").read_text())["cases"]
    (cases[0] if of == "case" else cases[0]["judgements"][0])["id" if of == "case" else "test"] = name
    edit(run, cases=cases)
    before = state(tmp_path)
    with pytest.raises(UsageError, match=r"record\.json"):
        merge(tmp_path / "deep" / "out", [run])
    assert state(tmp_path) == before


@pytest.mark.parametrize("name", ["'; DROP TABLE runs", "[bold]", "a\nb", "{x}", "名", "-rf"])
def test_other_hostile_names_are_names(tmp_path, name):
    run = make(tmp_path / "s1", {name: (case_facts(pair=name), [judged("weights")])})
    record = merge(tmp_path / "out", [run]).record
    assert [case["id"] for case in record["cases"]] == [name]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"schema": 2, "draftgate": "9.9"}, "schema 2"),
        ({"asked": ["a"]}, "$.asked"),
        ({"cases": [{"id": "a"}]}, "judgements"),
        ({"merged": [{"run": "x"}]}, "$.merged"),
    ],
)
def test_a_record_that_is_none_is_refused_by_name(tmp_path, facts, words):
    runs = [shard(tmp_path, "s1", "a"), shard(tmp_path, "s2", "b")]
    edit(runs[1], **facts)
    with pytest.raises(UsageError) as caught:
        merge(tmp_path / "out", runs)
    assert "s2/record.json" in str(caught.value)
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    run = shard(tmp_path, "s1", "a")
    before = state(tmp_path)
    with pytest.raises(UsageError, match="s1: is there already"):
        merge(run, [run])
    assert state(tmp_path) == before


def test_a_merge_that_fails_leaves_nothing(tmp_path, monkeypatch):
    run = shard(tmp_path, "s1", "a")
    monkeypatch.setattr("harness.history.merge.write_atomically", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(UsageError, match="full"):
        merge(tmp_path / "out", [run])
    assert names(tmp_path) == {"s1"}


def test_one_of_them_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="gone"):
        merge(tmp_path / "out", [one(tmp_path, "r1"), tmp_path / "gone"])

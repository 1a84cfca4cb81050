"""The run folder, the record and the table."""

import io
import json
import pathlib
import re

import pytest

from harness.report import record, table
from harness.verdict import Finding, Judgement, Verdict
from tests.report.hostile import PAYLOADS, poisoned
from tests.report.records import compared, failing, green, invalid


@pytest.fixture
def run(tmp_path):
    return record.RunFolder.create(tmp_path / "runs")


def judgement(verdict="PASS", suite="weights", **changes):
    finding = Finding("WGT003", Verdict[verdict], "a summary", cause="a cause", remedy="a remedy", **changes)
    return Judgement(suite, (finding,), {"ratio": float("nan"), "path": pathlib.Path("x"), "names": {"b", "a"}})


def printed(made):
    out = io.StringIO()
    table.print_table(made, out)
    return out.getvalue()


def test_record(run):
    run.write_run(asked={"c": ["weights"]})
    run.write_case("c", pair="p")
    run.write_case("c", evidence={"x": 1})
    run.write_judgement("c", "test_weights", judgement(interval=(1.0, 2.0)), seconds=1.23456)
    made = run.assemble(complete=True)
    assert json.loads((run.path / "record.json").read_text()) == json.loads(json.dumps(made))
    (case,) = made["cases"]
    assert (case["id"], case["pair"], case["evidence"]) == ("c", "p", {"x": 1})
    assert case["judgements"][0]["measurements"]["names"] == ["a", "b"]
    assert case["judgements"][0]["findings"][0]["interval"] == [1.0, 2.0]
    assert made["verdict"] == "PASS"


def test_a_case_is_read_back_with_the_runs_machine(run):
    run.write_run(machine={"cpu": "x"})
    run.write_case("c", pair="p")
    run.write_judgement("c", "test_weights", judgement(), seconds=0)
    made = run.read_case("c")
    assert (made["machine"], made["pair"], made["judgements"][0]["suite"]) == ({"cpu": "x"}, "p", "weights")


def test_an_empty_run_is_invalid(run):
    assert run.assemble(complete=True)["verdict"] == "INVALID"


def test_a_case_without_a_judgement_does_not_hide(run):
    run.write_run(asked={"c": ["weights"], "d": ["weights"]})
    run.write_judgement("c", "test_weights", judgement(), seconds=0)
    made = run.assemble(complete=True)
    assert made["verdict"] == "INVALID"
    assert made["never_judged"] == {"d": ["weights"]}
    assert "d: INVALID: never judged: weights" in printed(made)


def test_a_suite_without_a_judgement_does_not_hide(run):
    run.write_run(asked={"c": ["weights", "acceptance"]})
    run.write_judgement("c", "test_weights", judgement(), seconds=0)
    made = run.assemble(complete=True)
    assert made["verdict"] == "INVALID"
    assert made["never_judged"] == {"c": ["acceptance"]}


def test_what_a_person_left_out_is_named_and_not_missing(run):
    run.write_run(asked={"c": ["weights", "acceptance"], "d": ["weights"]})
    run.write_selection({"c": {"test_weights": "weights"}})
    run.write_judgement("c", "test_weights", judgement(), seconds=0)
    made = run.assemble(complete=True)
    assert made["verdict"] == "PASS"
    assert made["not_selected"] == {"c": ["acceptance"], "d": ["weights"]}
    for words in ("not selected │", "c: not selected: acceptance", "d: not selected: weights"):
        assert words in printed(made)


def test_one_test_of_a_suite_does_not_stand_for_another(run):
    run.write_run(asked={"c": ["weights"]})
    run.write_selection({"c": {"test_weights": "weights", "test_more_weights": "weights"}})
    run.write_judgement("c", "test_weights", judgement(), seconds=0)
    made = run.assemble(complete=True)
    assert (made["verdict"], made["never_judged"]) == ("INVALID", {"c": ["weights"]})


def test_the_old_side_of_a_comparison_is_shown_and_not_counted(run):
    for side, verdict in (("old", "FAIL"), ("new", "PASS")):
        run.write_case(f"c-{side}", side=side, engine={"version": f"1.{side}"})
        run.write_judgement(f"c-{side}", "test_weights", judgement(verdict), seconds=0)
    run.write_run(comparison={"old": "1", "new": "2"})
    made = run.assemble(complete=True)
    assert made["verdict"] == "PASS"
    for words in ("1.old", "1.new", "upgrade", "FAIL", "from 1 to 2: may be upgraded"):
        assert words in printed(made)


def test_nothing_left_to_run_is_no_pass(run):
    run.write_run(asked={"c": ["weights"]})
    run.write_selection({})
    assert run.assemble(complete=True)["verdict"] == "INVALID"


@pytest.mark.parametrize(("verdict", "status"), [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3), ("INVALID", 3)])
def test_exit_status(verdict, status):
    assert record.exit_status(Verdict[verdict]) == status


def test_table(run):
    run.write_case("c", not_asked={"throughput": "no promise"})
    run.write_judgement("c", "test_weights", judgement("FAIL"), seconds=0)
    run.write_judgement("c", "test_startup", judgement(suite="startup", known_issue="KI-1 (accepted)"), seconds=0)
    text = printed(run.assemble(complete=True))
    for words in ("draftgate: FAIL", "not run", "not asked", "a cause", "a remedy", "no promise", "KI-1 (accepted)"):
        assert words in text


def test_a_case_that_could_not_be_made_knows_no_release(run):
    run.write_case("p-old", side="old", engine={"version": "0.30.0"})
    run.write_judgement("p-old", "t", judgement(), seconds=0)
    run.write_judgement("p-new", "t", judgement("INVALID"), seconds=0)
    assert "p-new" in printed(run.assemble(complete=True))


def test_names_from_outside_are_not_markup(run):
    run.write_judgement("[bold]c[nonsense]", "t", judgement("FAIL"), seconds=0)
    assert "[bold]" in printed(run.assemble(complete=True))


RED = failing()["cases"][1]["judgements"]


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("made", [failing, invalid, lambda: compared(RED, green(), "PASS")])
def test_text_from_outside_is_printed_and_does_nothing(made, payload):
    text = printed(poisoned(made(), payload))
    text.encode("utf-8")
    assert text.count("\n") == printed(poisoned(made(), " tame")).count("\n")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]", text)
    assert not re.search(r"^\s*::|##\[", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["::error::x", "\n::error::x", "##[error]x"])
def test_a_case_by_a_hostile_name_gives_no_order(name):
    made = invalid() | {"not_selected": {name: ["weights"]}, "never_judged": {name: ["startup"]}}
    made["cases"][0]["id"] = name
    assert "error" in printed(made)
    assert not re.search(r"^\s*::|##\[", printed(made), re.MULTILINE)


def test_what_does_not_count_is_told_last_and_says_so():
    told = [line for line in printed(compared(RED, RED[1:2], "FAIL")).splitlines() if ": FAIL" in line]
    _, first, *_, last = told
    assert "FAIL [WGT003]" in first
    assert "-0.28.0-" in last
    assert "FAIL (of the old release, not counted) [ACC020]" in last


def test_the_lock_of_an_environment_is_kept_by_its_digest(tmp_path):
    lock = tmp_path / "draftgate-lock.txt"
    lock.write_text("vllm==0.32.0 --hash=sha256:0\n")
    run = record.RunFolder.create(tmp_path / "runs")
    for _ in range(2):
        run.keep_lock("0123456789abcdef", lock)
    [kept] = (run.path / "locks").iterdir()
    assert kept.name == "0123456789ab.txt"
    assert kept.read_text() == lock.read_text()

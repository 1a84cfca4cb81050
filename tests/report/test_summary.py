"""The answer: what is red and why, in which version, and each reason once."""

import pytest

from harness.report.summary import summarise
from tests.report.hostile import poisoned
from tests.report.records import case, compared, failing, finding, green, invalid, judgement, passing, record

RED = [judgement("weights", finding("WGT003", "FAIL", "2 keys landed nowhere", cause="other names"))]
UNSURE = [judgement("throughput", finding("THR010", "INCONCLUSIVE", "too few pairs"))]


def test_a_pass_says_what_passed():
    summary = summarise(passing())
    assert summary.sentence == "small passed every suite that was asked, on vllm 0.32.0 and vllm 0.28.0."
    assert not summary.reasons


def test_a_failure_says_what_is_red_where_and_why():
    summary = summarise(failing())
    assert summary.sentence.startswith(
        "small on vllm 0.32.0 (v1): weights are red: 2 of 5 keys of the drafter landed nowhere, because the engine"
    )
    assert "2 more cells are not green." in summary.sentence
    assert summary.sentence.endswith("Green throughout: vllm 0.28.0.")


def test_causes_come_before_symptoms_and_worse_before_better():
    assert [reason.code for reason in summarise(failing()).reasons] == ["WGT003", "ACC020", "THR010"]


def test_one_reason_for_many_cells_is_told_once():
    gone = finding("STA004", "INVALID", "it died", cause="killed")
    dead = [judgement("startup", finding("STA004", "FAIL", "it died", cause="killed")), judgement("acceptance", gone)]
    (reason,) = summarise(record(case(judgements=dead), case(version="0.28.0", judgements=dead))).reasons
    assert reason.verdict == "FAIL"
    assert reason.where == ((0, ("startup", "acceptance")), (1, ("startup", "acceptance")))


def test_what_was_never_judged_is_a_reason():
    summary = summarise(invalid())
    assert any(reason.summary == "never judged" and "small" in summary.places(reason) for reason in summary.reasons)
    assert summary.rows[0].verdict == "INVALID"


def test_a_case_that_never_began_has_a_row():
    summary = summarise(record(case(), verdict="INVALID", never_judged={"gone-vllm-v1": ["weights"]}))
    assert summary.rows[-1].id == "gone-vllm-v1"
    assert "gone-vllm-v1" in summary.sentence
    assert summary.reason_of(1, "weights") == 0


def test_the_first_records_named_cases_alone():
    summary = summarise(record(case(), verdict="INVALID", never_judged=["gone-vllm-v1"]))
    assert "every suite" in summary.sentence


@pytest.mark.parametrize("made", [record(), record(complete=False)])
def test_an_empty_run_says_so(made):
    assert "Nothing was judged." in summarise(made).sentence


def test_a_run_without_an_end_is_no_plain_pass():
    summary = summarise(record(case(), complete=False))
    assert summary.headline == "PASS so far"
    assert summary.sentence.startswith("The run did not come to its end.")
    assert "every suite" not in summary.sentence


def test_accepted_issues_and_what_was_left_out_are_noted():
    accepted = [judgement("weights", finding("WGT005", known_issue="KI-1 (accepted)"))]
    notes = "\n".join(summarise(record(case(judgements=accepted), not_selected={"x": ["startup"]})).notes)
    for words in ("KI-1 (accepted)", "losslessness of small on vllm 0.32.0 (v1): nothing to compare", "startup of x"):
        assert words in notes


def test_a_suite_that_this_version_does_not_know_has_its_column():
    red = [judgement("upgrade", finding("UPG001", "FAIL", "slower"))]
    summary = summarise(record(case(judgements=red)))
    assert summary.suites[-1] == "upgrade"
    assert summary.rows[0].cells[-1] == "FAIL"
    assert "upgrade is red: slower" in summary.sentence


@pytest.mark.parametrize(
    ("made", "words"), [(passing, "may be upgraded. small passed"), (failing, "do not upgrade; the red cells say why.")]
)
def test_a_comparison_of_releases_is_answered_first(made, words):
    summary = summarise({**made(), "comparison": {"old": "vllm 0.28.0", "new": "vllm 0.32.0"}})
    assert summary.sentence.startswith(f"From vllm 0.28.0 to vllm 0.32.0: {words}")
    assert summary.suites[-1] == "upgrade"


def test_what_the_old_release_did_is_no_part_of_the_answer():
    summary = summarise(compared(RED, green(), "PASS"))
    assert summary.sentence.endswith("small passed every suite that was asked, on vllm 0.32.0 (new).")
    (reason,) = summary.reasons
    assert (reason.verdict, reason.label) == ("FAIL", "of the old release, not counted")


def test_the_old_release_is_not_blamed_for_the_verdict():
    summary = summarise(compared(RED, UNSURE, "INCONCLUSIVE"))
    assert "small on vllm 0.32.0 (new) (v1): throughput is not decided: too few pairs." in summary.sentence
    assert "more cell" not in summary.sentence
    assert [(reason.code, reason.label != "") for reason in summary.reasons] == [("THR010", False), ("WGT003", True)]


def test_the_same_finding_on_both_sides_is_two_reasons_each_with_its_verdict():
    softer = [judgement("weights", {**RED[0]["findings"][0], "verdict": "INCONCLUSIVE"})]
    new, old = summarise(compared(RED, softer, "INCONCLUSIVE")).reasons
    assert (new.verdict, new.where) == ("INCONCLUSIVE", ((1, ("weights",)),))
    assert (old.verdict, old.where) == ("FAIL", ((0, ("weights",)),))


def test_what_was_never_judged_of_the_old_release_counts():
    made = compared(RED, green(), "INVALID")
    made["never_judged"] = {made["cases"][0]["id"]: ["startup"]}
    summary = summarise(made)
    assert "(old) (v1): startup is not shown either way: never judged" in summary.sentence
    assert [reason.label for reason in summary.reasons] == ["", "of the old release, not counted"]


def test_a_reason_of_very_many_cells_names_the_first():
    summary = summarise(record(*(case(f"pair-{index}", judgements=RED) for index in range(500))))
    (reason,) = summary.reasons
    assert summary.places(reason).endswith("pair-11 on vllm 0.32.0 (v1); and 488 more")
    assert summary.reason_of(499, "weights") == 0


def test_the_same_note_on_many_cases_is_one_and_of_very_many_the_first_are_told():
    cases = [case(f"pair-{index}", not_asked={"startup": f"why {index}"}) for index in range(60)]
    made = record(*cases, not_selected={each["id"]: ["metrics"] for each in cases})
    notes = summarise(made).notes
    assert len(notes) == 50
    assert notes[-1] == "12 more such notes are in the record"
    (note,) = summarise(made | {"cases": [{**each, "not_asked": {}} for each in cases]}).notes
    assert note.startswith("Not selected: metrics of pair-0 on vllm 0.32.0 (v1), pair-1")
    assert note.endswith("and 57 more")


def test_names_of_suites_do_not_fill_the_answer_or_the_table():
    red = [judgement("W" * 5_000 + str(index), finding("XYZ001", "FAIL", "red")) for index in range(100)]
    summary = summarise(record(case(judgements=red)))
    assert len(summary.sentence) < 800
    assert len(summary.suites) == len(summary.rows[0].cells) == 24
    assert "83 more suites" in summary.notes[0]


def test_names_and_causes_of_any_length_leave_the_answer_short():
    made = poisoned(failing(), " " + "W" * 5_000)
    assert len(summarise(made).sentence) < 800

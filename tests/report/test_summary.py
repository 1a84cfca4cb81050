"""The answer: what is red and why, in which version, and each reason once."""

import pytest

from harness.report.summary import summarise
from tests.report.hostile import poisoned
from tests.report.records import case, failing, finding, invalid, judgement, passing, record


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


def test_names_and_causes_of_any_length_leave_the_answer_short():
    made = poisoned(failing(), " " + "W" * 5_000)
    assert len(summarise(made).sentence) < 800

"""What a run leaves beside its record, and on GitHub."""

import pytest

from harness.report import publish
from harness.report.publish import annotate
from tests.report.hostile import PAYLOADS, poisoned
from tests.report.records import case, compared, failing, finding, green, invalid, judgement, passing, record

JOB = {"GITHUB_ACTIONS": "true"}


def none(_folder, _record):
    return ()


def test_a_page_beside_the_record(tmp_path):
    (line,) = publish.publish(tmp_path, passing(), {}, none)
    assert line == f"report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_on_github_the_summary_is_appended_and_lines_are_given(tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    lines = list(publish.publish(tmp_path, failing(), {"GITHUB_STEP_SUMMARY": str(summary), **JOB}, none))
    assert [line.split(" ")[0] for line in lines[1:]] == ["::error", "::error", "::warning"]
    assert summary.read_text().startswith("before\n## ")
    assert list(publish.publish(tmp_path, passing(), JOB, none))[1:] == []


@pytest.mark.parametrize("surroundings", [{}, {"GITHUB_STEP_SUMMARY": "/nonexistent/x"}, JOB])
def test_what_cannot_be_made_is_told_and_raises_nothing(tmp_path, surroundings):
    lines = list(publish.publish(tmp_path / "gone", {"cases": [{"id": 1}]}, surroundings, none))
    assert len(lines) == 1 + len(surroundings)
    assert all("could not be made" in line and "\n" not in line for line in lines)


def test_an_annotation_says_where_why_and_what_to_do():
    first = annotate(failing())[0]
    assert first.startswith("::error title=draftgate FAIL WGT003::2 of 5 keys of the drafter landed nowhere%0A")
    for words in ("weights of small on vllm 0.32.0 (v1)", "cause: the engine knows", "remedy: rename the keys"):
        assert words in first


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("made", [failing, invalid])
def test_a_line_from_outside_is_no_command(made, payload):
    lines = annotate(poisoned(made(), payload))
    assert len(lines) == len(annotate(made()))
    for line in lines:
        assert line.startswith(("::error title=", "::warning title="))
        assert line.splitlines() == [line]
        title = line.split("title=", 1)[1].split("::", 1)[0]
        assert not set(title) & set(",:\r\n")


def test_what_does_not_count_is_no_annotation():
    red = failing()["cases"][1]["judgements"]
    unsure = [judgement("throughput", finding("THR010", "INCONCLUSIVE", "too few pairs"))]
    assert annotate(compared(red, green(), "PASS")) == []
    (line,) = annotate(compared(red, unsure, "INCONCLUSIVE"))
    assert line.startswith("::warning title=draftgate INCONCLUSIVE THR010::")


def test_github_shows_ten_so_the_tenth_says_how_many_more():
    red = [judgement("weights", *(finding("WGT003", "FAIL", f"number {n}") for n in range(25)))]
    lines = annotate(record(case(judgements=red)))
    assert len(lines) == 10
    assert "16 more reasons" in lines[-1]


def test_a_run_that_judged_nothing_is_annotated():
    (line,) = annotate(record())
    assert line == "::error title=draftgate INVALID::Nothing was judged."


def test_a_history_that_cannot_be_read_is_told_and_the_page_is_made(tmp_path):
    def damaged(folder, _record):
        raise OSError(f"{folder}/history.sqlite is\ndamaged ##[error]")

    told, made = publish.publish(tmp_path, passing(), {}, damaged)
    assert told == f"draftgate: the report has no figures over time: {tmp_path}/history.sqlite is damaged ## [error]"
    assert made.startswith("report: ")
    assert "Over time" not in (tmp_path / "report.html").read_text()

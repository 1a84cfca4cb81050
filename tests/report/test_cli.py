"""`draftgate report`."""

import json

import pytest

from harness.cli import main
from tests.report.records import failing


@pytest.fixture
def run(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(failing()))
    return tmp_path


@pytest.mark.parametrize("place", ["", "record.json"])
def test_html_is_made_again_beside_the_record(run, capsys, place):
    assert main(["report", str(run / place)]) == 0
    page = run / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert "2 of 5 keys" in page.read_text()


@pytest.mark.parametrize(
    ("form", "begin"), [("markdown", "## "), ("github", "::error "), ("json", "{"), ("html", "<!DOCTYPE html>")]
)
def test_formats_go_where_they_are_sent(run, capsys, form, begin):
    target = run / "other"
    assert main(["report", str(run), "--format", form, "-o", str(target)]) == 0
    assert target.read_text().startswith(begin)
    if form != "html":
        capsys.readouterr()
        assert main(["report", str(run), "--format", form]) == 0
        assert capsys.readouterr().out == target.read_text()


def test_json_is_the_record_itself(run, capsys):
    assert main(["report", str(run), "--format", "json"]) == 0
    assert capsys.readouterr().out == (run / "record.json").read_text()


def test_github_appends_the_summary(run, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(run / "summary.md"))
    assert main(["report", str(run), "--format", "github"]) == 0
    assert (run / "summary.md").read_text().startswith("## ")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "No such file"),
        ("{", "no run record"),
        ("[]", "no run record"),
        ("{}", "no run record"),
        ('{"schema": 2, "cases": []}', "schema 2, and this draftgate reads 1"),
        ('{"schema": 1}', "has not the form"),
        ('{"schema": 1, "verdict": "GREEN", "cases": []}', "GREEN"),
        ('{"schema": 1, "verdict": "PASS", "cases": [7]}', "has not the form"),
        ('{"schema": 1, "verdict": "PASS", "cases": {"id": 1}}', "has not the form"),
    ],
)
@pytest.mark.parametrize("form", ["html", "markdown", "github"])
def test_what_is_no_record_is_refused_by_name(tmp_path, capsys, text, word, form):
    if text is not None:
        (tmp_path / "record.json").write_text(text)
    assert main(["report", str(tmp_path), "--format", form]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert "record.json" in error
    assert "remedy:" in error
    assert not (tmp_path / "report.html").exists()


def test_a_place_that_cannot_be_written(run, capsys):
    assert main(["report", str(run), "-o", str(run / "gone" / "x.html")]) == 2
    assert "x.html" in capsys.readouterr().err

"""`draftgate history` and `draftgate merge` as they are typed."""

import json
import shutil
import subprocess
import sys

import pytest

from harness import cli
from harness.history import facts, show, store
from tests.history.support import accepted, case_facts, judged, make, one


@pytest.fixture
def runs(tmp_path):
    """Four runs of 0.30.0 and four of 0.31.0, which accepts less."""
    root = tmp_path / "runs"
    for hour in range(8):
        version, length = ("0.30.0", 3.1) if hour < 4 else ("0.31.0", 2.4)
        run = one(root, f"r{hour}", length, version=version, started=f"2026-11-30T0{hour}:00:00Z")
        store.add(root / store.FILE_NAME, facts.read(run))
    return root


def call(*argv):
    return cli.main([str(word) for word in argv])


def test_the_step_is_named(runs, capsys):
    assert call("history", "--runs", runs, "--metric", "accept_length") == 0
    out = capsys.readouterr().out
    assert (
        "p / vllm / v1 / cpu: accept_length fell from 3.1 to 2.4 with vllm 0.31.0, first seen 2026-11-30T04:00:00Z (r4)"
    ) in out
    assert "████▁▁▁▁" in out
    assert "2.4 at 0.31.0" in out


def test_json(runs, capsys):
    assert call("history", "--db", runs / store.FILE_NAME, "--json", "--pair", "p", "--engine", "vllm") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["runs"]) == (1, 8)
    (verdicts,) = document["verdicts"]
    assert (verdicts["suite"], len(verdicts["runs"]), verdicts["runs"][0]["red"]) == ("acceptance", 8, [])
    figures = {each["metric"]: each for each in document["figures"]}
    assert set(figures) == {"accept_length", *(f"acceptance.{position}" for position in range(4))}
    (step,) = figures["accept_length"]["steps"]
    assert (step["before"], step["after"], step["version"], step["run"]) == (3.1, 2.4, "0.31.0", "r4")
    assert [point["value"] for point in figures["accept_length"]["points"]] == [3.1] * 4 + [2.4] * 4


def test_a_metric_without_its_number_is_all_of_them(runs, capsys):
    assert call("history", "--runs", runs, "--json", "--metric", "acceptance") == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["metric"] for each in document["figures"]] == [f"acceptance.{position}" for position in range(4)]
    assert document["verdicts"] == []


def test_a_red_suite_shows_its_codes(tmp_path, capsys):
    run = make(tmp_path / "r1", {"c": (case_facts(), [judged("weights", "FAIL", "WGT003")])})
    assert call("history", "--runs", tmp_path, "--add", run) == 0
    printed = capsys.readouterr()
    assert "FAIL at 0.30.0 WGT003" in printed.out
    assert "✗" in printed.out
    assert "r1: added" in printed.err


@pytest.mark.parametrize(
    ("flag", "value", "known"),
    [
        ("--pair", "q", "p"),
        ("--engine", "sglang", "vllm"),
        ("--suite", "s", "acceptance"),
        ("--metric", "m", "accept_l"),
    ],
)
def test_what_no_run_has_is_no_empty_table(runs, capsys, flag, value, known):
    assert call("history", "--runs", runs, flag, value) == 2
    err = capsys.readouterr().err
    assert f"{flag} {value}" in err
    assert known in err


@pytest.fixture
def without_figures(runs):
    """Two runs more, of which there are verdicts and no figures."""
    weights = make(runs / "r8", {"c": (case_facts(), [judged("weights", "FAIL", "WGT003")])})
    invalid = make(runs / "r9", {"c": (case_facts(pair="q"), [accepted(10, 10, [10], "INVALID")])})
    for run in (weights, invalid):
        store.add(runs / store.FILE_NAME, facts.read(run))
    return runs


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        (("--suite", "weights"), "FAIL at 0.30.0 WGT003"),
        (("--pair", "q"), "INVALID at 0.30.0"),
        (("--pair", "q", "--suite", "acceptance", "--engine", "vllm"), "INVALID at 0.30.0"),
    ],
)
def test_verdicts_without_a_figure_are_shown(without_figures, capsys, filters, words):
    assert call("history", "--runs", without_figures, *filters) == 0
    assert words in capsys.readouterr().out
    assert call("history", "--runs", without_figures, "--json", *filters) == 0
    document = json.loads(capsys.readouterr().out)
    assert (len(document["verdicts"]), document["figures"]) == (1, [])


def test_filters_that_no_run_has_together_are_an_error(without_figures, capsys):
    assert call("history", "--runs", without_figures, "--pair", "q", "--suite", "weights") == 2
    assert "give one of: acceptance\n" in capsys.readouterr().err


def test_no_history(tmp_path, capsys):
    assert call("history", "--runs", tmp_path) == 2
    assert str(tmp_path / "history.sqlite") in capsys.readouterr().err


def test_few_runs_are_said_to_be_few(tmp_path, capsys):
    assert call("history", "--runs", tmp_path, "--add", one(tmp_path, "r1")) == 0
    assert "5 of 5 figures have fewer than 8 runs" in capsys.readouterr().out


def test_hostile_names_cannot_colour_or_move(tmp_path, capsys):
    name = "[bold]x[/]\x1b[2J\ny"
    add = ("--add", make(tmp_path / "r1", {"c": (case_facts(pair=name), [accepted(10, 10, [10])])}))
    assert call("history", "--runs", tmp_path, *add) == 0
    out = capsys.readouterr().out
    assert r"[bold]x[/]\x1b[2J\ny" in out
    assert "\x1b" not in out


def test_hostile_names_in_what_is_not_the_table_cannot_colour_or_move(tmp_path, capsys):
    name = "x\x1b[2J\ny"
    runs = [make(tmp_path / f"{number}{name}", {f"c{number}": (case_facts(pair=name), [judged("weights")])})
            for number in range(2)]  # fmt: skip
    shutil.rmtree(runs[0] / "cases")
    assert call("merge", tmp_path / f"out{name}", *runs) == 0
    assert call("history", "--runs", tmp_path, "--add", runs[0]) == 0
    assert call("history", "--runs", tmp_path, "--pair", name + name) == 2
    printed = "".join(capsys.readouterr())
    assert "record only" in printed
    assert "\x1b" not in printed
    assert not [line for line in printed.splitlines() if line.startswith("y")]


def test_a_bar_for_each_value():
    assert show.sparkline([0, 1, 0.25, 1]) == "▁█▃█"
    assert len(set(show.sparkline([3, 3, 3]))) == 1


@pytest.mark.parametrize(("verdict", "status"), [("PASS", 0), ("FAIL", 1), ("INVALID", 3)])
def test_merge_prints_the_table_and_exits_by_the_worst(tmp_path, capsys, verdict, status):
    first = make(tmp_path / "r1", {"a": (case_facts(), [judged("weights")])})
    second = make(tmp_path / "r2", {"b": (case_facts(), [judged("weights", verdict)])})
    assert call("merge", tmp_path / "out", first, second) == status
    out = capsys.readouterr().out
    assert f"draftgate: {verdict}" in out
    assert f"record: {tmp_path / 'out' / 'record.json'}" in out


def test_merge_of_what_is_no_run(tmp_path, capsys):
    assert call("merge", tmp_path / "out", tmp_path) == 2
    assert "record.json" in capsys.readouterr().err


def test_the_command_line_does_not_import_what_finds_steps():
    code = "import sys, harness.cli; print([n for n in ('ruptures', 'scipy', 'sqlite3', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

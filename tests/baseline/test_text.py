"""The file: what is written can be read back, and what was edited wrongly is refused by file and key."""

from pathlib import Path

import pytest

from harness.baseline import text
from harness.baseline.measured import baseline_of
from harness.errors import UsageError
from tests.baseline import records


@pytest.fixture
def baseline():
    counts = records.accept_counts([0.6, 0.7, 0.8])
    made = records.record(records.case(counts, {8: [0.1, 0.2], 1: [0.5, 0.41234567]}))
    return baseline_of(made, made["cases"][0], "run-1")


def test_what_is_written_is_read_back_and_holds_one_fact_a_line(baseline):
    written = text.render(baseline)
    assert text.parse(written, "f") == baseline
    assert 'transformers = "5.1.0"\n' in written
    assert "1 = [0.5, 0.41235]\n8 = [0.1, 0.2]\n" in written
    assert "left-out" not in written, "only packages that compute"


def test_no_folder_of_a_machine_is_written(baseline):
    written = text.render(baseline)
    assert "someone" not in written
    assert "somewhere" not in written
    assert '"--template=template.jinja"' in written
    assert '"VLLM_CACHE_ROOT=cache"' in written


def test_names_from_outside_cannot_break_the_file():
    name = 'a/../b"\n[case]\x7f\ud800 x'
    counts = records.accept_counts([0.6, 0.7])
    made = records.record(records.case({'p"\n': counts["p00"], "é": counts["p01"]}, name=name))
    written = text.render(baseline_of(made, made["cases"][0], "run"))
    read = text.parse(written, "f")
    assert read.case.pair == name.replace("\ud800", "?")
    assert set(read.acceptance.counts) == {'p"\n', "é"}
    path = text.path_of(Path("folder"), read.case)
    assert path.parent == Path("folder")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[case]\n", "[case]\ncolour = 1\n", ("colour", "case")),
        ("k = 4\n", "", ("`k`", "case")),
        ("k = 4\n", 'k = "4"\n', ("case.k",)),
        ("k = 4\n", "k = 0\n", ("case.k",)),
        ('"sha256:aa"', '"md5:aa"', ("case.target",)),
        ("[case]", "[case", ("TOML",)),
        ("[0.1, 0.2]", "[0.1, nan]", ("throughput.log_ratios.8", "nan")),
        ("[0.1, 0.2]", "[0.1, inf]", ("throughput.log_ratios.8", "inf")),
        ("[0.1, 0.2]", "[0.1]", ("throughput.log_ratios",)),
        ("8 = [0.1, 0.2]\n", "", ("throughput",)),
        ("8 = [0.1, 0.2]", "8 = [0.2, 0.2]", ("throughput.speed_up.8",)),
        ("p00 = [20, ", "p00 = [2, ", ("acceptance.counts.p00",)),
        ("p00 = [20, ", "p00 = [-20, ", ("acceptance.counts",)),
        ("p00 = [20, ", "p00 = [20, 20, ", ("acceptance.counts.p00", "K + 1 = 5")),
        ("n = 3", "n = 30", ("acceptance.n", "30")),
        ("accept_length = ", "accept_length = 1", ("acceptance.accept_length",)),
        ("exact = false", "exact = 0", ("acceptance.exact",)),
        ("schema = 1", "schema = 2", ("schema 2", "update draftgate")),
        ("schema = 1", "schema = 0", ("schema 0", "bless a run again")),
        ("schema = 1\n", "", ("schema",)),
        ("schema = 1", "schema = true", ("schema",)),
    ],
)
def test_what_was_edited_wrongly_is_refused_by_file_and_key(baseline, tmp_path, old, new, words):
    path = tmp_path / "edited.toml"
    written = text.render(baseline)
    assert old in written
    path.write_text(written.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        text.read(path)
    for word in ("edited.toml", *words):
        assert word in str(caught.value)
    assert caught.value.remedy


def test_a_reference_of_a_dead_drafter_is_refused(baseline):
    dead = {name: [100, 10, 1, 0, 0] for name in ("p00", "p01")}
    made = records.record(records.case(dead))
    written = text.render(baseline_of(made, made["cases"][0], "run"))
    with pytest.raises(UsageError, match=r"acceptance\.accept_length is 1\.11"):
        text.parse(written, "f")


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.toml: cannot be read"):
        text.read(path)

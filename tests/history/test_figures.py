"""The history as a report draws it."""

import json

import pytest

from harness.cli import main
from harness.history import facts, store
from harness.history.figures import trends
from tests.history.support import case_facts, judged, make, one

EXPECT = {"name": "p", "k": 4, "expect": {"accept_length": 2.5, "throughput_ratio": {"4": 1.2}}}


def add(root, *runs):
    for run in runs:
        store.add(root / store.FILE_NAME, facts.read(run))
    return runs[-1], json.loads((runs[-1] / "record.json").read_text())


def rounds(ratio):
    return judged("throughput", measurements={"rounds": [
        {"concurrency": 4, "pair": pair, "speculative": speculative, "seconds": 10 / (ratio if speculative else 1),
         "requests": [{"tokens": 10}]}
        for pair in range(2) for speculative in (True, False)
    ]})  # fmt: skip


def test_a_trend_over_versions(tmp_path):
    runs = [one(tmp_path, f"r{n}", length, version=version)
            for n, (length, version) in enumerate([(3.0, "0.30.0"), (2.0, "0.32.0"), (3.1, "0.30.0")])]  # fmt: skip
    (drawn,) = trends(*add(tmp_path, *runs))
    assert drawn.title == "Accept length of p on vllm (v1)"
    assert [(point.version, round(point.value, 3)) for point in drawn.points] == [
        ("0.30.0", 3.0), ("0.30.0", 3.1), ("0.32.0", 2.0),
    ]  # fmt: skip


def test_thresholds_are_the_pairs(tmp_path):
    runs = [make(tmp_path / f"r{n}", {"p-vllm-v1": (case_facts() | {"pair": EXPECT}, [rounds(1.5)])}) for n in range(2)]
    (drawn,) = trends(*add(tmp_path, *runs))
    assert drawn.title == "Speed-up at concurrency 4 of p on vllm (v1)"
    assert drawn.threshold == 1.2
    assert [round(point.value, 6) for point in drawn.points] == [1.5, 1.5]


@pytest.mark.parametrize("other", [{"drafter": "sha256:other"}, {"pair": "q"}, {"engine": "sglang"}])
def test_what_is_not_comparable_is_not_drawn(tmp_path, other):
    assert trends(*add(tmp_path, one(tmp_path, "r0", **other), one(tmp_path, "r1"))) == ()


def test_no_history_no_figure(tmp_path):
    run = one(tmp_path, "r0")
    assert trends(run, json.loads((run / "record.json").read_text())) == ()
    assert not (tmp_path / store.FILE_NAME).exists()


def test_draftgate_report_draws_the_history_beside_the_run(tmp_path, capsys):
    run, _ = add(tmp_path, *(one(tmp_path, f"r{n}", 3.0 - n, version=f"0.3{n}.0") for n in range(2)))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Accept length of p on vllm (v1)" in page
    assert "0.31.0" in page
    (tmp_path / store.FILE_NAME).write_text("not a database" * 1000)
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert "no figures over time" in capsys.readouterr().err
    assert "Over time" not in (run / "report.html").read_text()

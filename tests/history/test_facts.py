"""What the history takes from a record, and the records it refuses."""

import json
import math

import pytest

from harness.errors import UsageError
from harness.history import facts
from tests.history.support import accepted, case_facts, judged, make, one


def round_(concurrency, *, speculative, pair, tokens, seconds):
    return {
        "concurrency": concurrency, "speculative": speculative, "pair": pair, "seconds": seconds,
        "requests": [{"tokens": tokens}],
    }  # fmt: skip


def test_figures(tmp_path):
    speeds = [(0, 2.0), (1, 8.0)]
    rounds = [round_(4, speculative=True, pair=pair, tokens=100, seconds=1) for pair, _ in speeds]
    rounds += [round_(4, speculative=False, pair=pair, tokens=100, seconds=ratio) for pair, ratio in speeds]
    rounds.append(round_(4, speculative=True, pair=None, tokens=1, seconds=100))  # a warm-up, which does not count
    servers = {"c-vllm-v1-spec": {"started_in_s": 50.5}, "c-vllm-v1-plain": {"started_in_s": 40.0}}
    judgements = [
        accepted(10, 15, [8, 4, 2, 1], interval=(2.2, 2.8)),
        judged("throughput", "FAIL", "THR010", {"rounds": rounds}),
        judged("startup", measurements={"servers": servers}),
        judged("weights", "FAIL", "WGT003"),
    ]
    run = facts.read(make(tmp_path / "r1", {"c-vllm-v1": (case_facts(), judgements)}))
    assert (run.id, run.verdict, run.complete) == ("r1", "FAIL", True)
    (case,) = run.cases
    assert (case.pair, case.engine, case.version, case.runner, case.device, case.k) == (
        "p", "vllm", "0.30.0", "v1", "cpu", 4,
    )  # fmt: skip
    assert (case.target, case.drafter, case.prompts) == ("sha256:t", "sha256:d", "sha256:p")
    suites = {suite.name: suite for suite in case.suites}
    assert suites["weights"].red == ("WGT003",)
    assert suites["acceptance"].red == ()
    length, *positions = suites["acceptance"].figures
    assert (length.name, length.value, length.lower, length.upper) == ("accept_length", 2.5, 2.2, 2.8)
    assert [(each.name, each.value) for each in positions] == [
        ("acceptance.0", 0.8), ("acceptance.1", 0.4), ("acceptance.2", 0.2), ("acceptance.3", 0.1),
    ]  # fmt: skip
    (speed_up,) = suites["throughput"].figures
    assert speed_up.name == "speed_up.4"
    assert math.isclose(speed_up.value, 4.0)
    assert speed_up.lower < 4.0 < speed_up.upper
    assert {each.name: each.value for each in suites["startup"].figures} == {
        "startup_s.spec": 50.5, "startup_s.plain": 40.0,
    }  # fmt: skip


def test_what_is_invalid_gives_no_figure(tmp_path):
    run = facts.read(make(tmp_path / "r", {"c": (case_facts(), [accepted(10, 15, [8, 4, 2, 1], "INVALID")])}))
    (suite,) = run.cases[0].suites
    assert (suite.verdict, suite.red, suite.figures) == ("INVALID", ("ACC030",), ())


def test_a_case_that_could_not_be_made_is_kept(tmp_path):
    run = facts.read(make(tmp_path / "r", {"c": ({}, [judged("startup", "INVALID", "RUN002")])}))
    assert (run.cases[0].pair, run.cases[0].suites[0].red) == ("", ("RUN002",))


def test_a_server_that_did_not_start_has_no_figures(tmp_path):
    run = facts.read(make(tmp_path / "r", {"c": (case_facts(), [judged("startup", "FAIL", "STA004")])}))
    assert run.cases[0].suites[0].figures == ()


def text_of(change):
    return lambda text: json.dumps(change(json.loads(text)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "not all of one"),
        (lambda _: "", "not all of one"),
        (lambda _: "[" * 100_000, "not all of one"),
        (lambda _: "[]", "no run record"),
        (lambda _: "\udcff", "no run record"),
        (text_of(lambda record: {**record, "schema": 2, "draftgate": "9.9"}), "schema 2"),
        (text_of(lambda record: {**record, "schema": 2, "draftgate": "9.9"}), "9.9"),
        (text_of(lambda record: {**record, "schema": "1"}), "schema '1'"),
        (text_of(lambda record: {**record, "cases": {}}), "$.cases"),
        (text_of(lambda record: {**record, "verdict": "GREEN"}), "$.verdict"),
        (text_of(lambda record: {**record, "cases": record["cases"] * 2}), "'p-vllm-v1' twice"),
        (text_of(lambda record: {key: record[key] for key in record if key != "started"}), "started"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named(tmp_path, damage, words):
    run = one(tmp_path, "r")
    path = run / "record.json"
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as caught:
        facts.read(run)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.remedy


def test_a_measurement_of_another_shape_is_named(tmp_path):
    broken = judged("acceptance", measurements={"totals": {"drafts": "ten", "accepted": 1, "per_position": []}})
    with pytest.raises(UsageError, match=r"measurements of acceptance: .*\$\.totals\.drafts"):
        facts.read(make(tmp_path / "r", {"c": (case_facts(), [broken])}))


def test_no_record(tmp_path):
    with pytest.raises(UsageError, match="gone"):
        facts.read(tmp_path / "gone")

"""The page: what it answers, that it needs nothing, that nothing from outside is more than text."""

import itertools
import math
import re
from pathlib import Path

import pytest

from harness.gate import weights
from harness.measure import acceptance as measure_acceptance
from harness.measure import throughput as measure_throughput
from harness.measure.endpoint import Counts
from harness.report import page
from harness.report.plots import Trend, TrendPoint
from harness.report.record import RunFolder
from tests.gate.evidence import evidence
from tests.measure.simulated_engine import Engine, VirtualClock, prompts
from tests.report.hostile import MARK, PAYLOADS, poisoned
from tests.report.html import Page
from tests.report.records import (
    acceptance,
    case,
    compared,
    failing,
    finding,
    green,
    invalid,
    judgement,
    passing,
    record,
)
from tests.report.records import evidence as probe_evidence

RECORDS = {"pass": passing, "fail": failing, "invalid": invalid, "empty": record}
TREND = Trend("accept length", "tokens", tuple(TrendPoint(f"run {n}", f"0.{n // 3}", 2.0 + n) for n in range(9)), 4.0)
NUMERIC = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "width", "height"}


def rendered(made, *trends):
    return Page(page.render(made, trends))


def test_the_answer_comes_first_then_the_table_then_reasons_then_evidence():
    text = rendered(failing()).text
    order = ["FAIL", "2 of 5 keys of the drafter landed nowhere", "Pairs, engine versions, suites",
             "What is not green, and what to do", "rename the keys to", "Evidence", "Acceptance per"]  # fmt: skip
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)


def test_every_verdict_is_a_word():
    text = rendered(failing()).text
    for word in ("PASS", "FAIL", "INCONCLUSIVE", "not asked", "not run"):
        assert word in text


def test_a_run_without_an_end_is_not_shown_as_green():
    made = page.render(record(case(), complete=False))
    assert 'class="answer inconclusive"' in made
    assert "PASS so far" in made


def test_a_red_cell_leads_to_its_reason():
    made = rendered(failing())
    ids = {attrs["id"] for _, attrs in made.elements if "id" in attrs}
    links = [attrs["href"] for attrs in made.all("a")]
    assert {"#reason-0", "#reason-1", "#reason-2"} <= set(links)
    assert all(link[1:] in ids for link in links)


def test_evidence_is_all_there():
    text = rendered(failing()).text
    for words in ("vllm serve /models/target", "package-199==1.199", "sha256:11", "probe: drafter's load_weights",
                  "1.05 to 1.38", "CUDA_VISIBLE_DEVICES=0", "/runs/spec.log", "AMD EPYC"):  # fmt: skip
        assert words in text


def test_packages_of_one_environment_are_listed_once():
    assert rendered(record(*(case(name) for name in "abc"))).text.count("package-7==1.7") == 1


@pytest.mark.parametrize("made", RECORDS.values(), ids=RECORDS)
def test_it_needs_nothing_from_anywhere(made):
    text = page.render(made(), (TREND,))
    found = Page(text)
    assert {tag for tag, _ in found.elements}.isdisjoint({"script", "img", "link", "iframe", "object", "embed", "base"})
    for _, attrs in found.elements:
        assert not any(name.startswith("on") for name in attrs)
        assert {"src", "srcset", "action", "style", "xlink:href", "data"}.isdisjoint(attrs)
        assert attrs.get("href", "#").startswith("#")
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("made", RECORDS.values(), ids=RECORDS)
def test_figures_have_words_and_a_table(made):
    found = rendered(made(), TREND)
    plots = [attrs for attrs in found.all("svg") if attrs.get("role") == "img"]
    assert plots
    ids = {attrs["id"] for _, attrs in found.elements if "id" in attrs}
    for attrs in plots:
        assert set(attrs["aria-labelledby"].split()) <= ids
    others = [attrs for attrs in found.all("svg") if attrs.get("role") != "img"]
    assert all(attrs.get("aria-hidden") == "true" for attrs in others)
    assert found.text.count("As a table") == len(plots)


def test_ids_are_unique():
    ids = [attrs["id"] for _, attrs in rendered(failing(), TREND, TREND).elements if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("made", [failing, invalid])
def test_text_from_outside_stays_text(made, payload):
    """The same elements and attributes as with harmless text, and the harmful one in no attribute but a label."""
    hostile = poisoned(made(), f" {payload}")
    trend = Trend(f"x {payload}", payload, (TrendPoint(f"x {payload}", f"1 {payload}", 1.0),))
    found = rendered(hostile, trend)
    tame = rendered(poisoned(made(), " tame"), Trend("x tame", "tame", (TrendPoint("x tame", "1 tame", 1.0),)))
    assert found.skeleton == tame.skeleton
    places = {name for _, attrs in found.elements for name, value in attrs.items() if MARK in (value or "")}
    assert places <= {"aria-label"}
    assert MARK in found.text
    assert MARK not in "".join(text for tag, text in found.texts if tag == "style")


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_suites_and_cases_have_names_from_outside_too(payload):
    def made(name):
        red = [judgement(name, finding("XYZ001", "FAIL", "red"))]
        return {**case(judgements=red), "id": name, "pair": {}, "engine": None, "evidence": None}

    assert rendered(record(made(payload))).skeleton == rendered(record(made("tame"))).skeleton


def test_a_template_that_forgot_to_escape_is_found(monkeypatch):
    careless = page._templates.__wrapped__()
    careless.autoescape = False
    monkeypatch.setattr(page, "_templates", lambda: careless)
    hostile = page.render(poisoned(failing(), PAYLOADS["script"]))
    assert "<script>EVIL()</script>" in hostile
    with pytest.raises(AssertionError):
        assert Page(hostile).skeleton == Page(page.render(poisoned(failing(), " tame"))).skeleton


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_nothing_hidden_survives(payload):
    text = page.render(poisoned(failing(), payload))
    text.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]", text)


def test_what_was_hidden_is_spelt_out():
    text = rendered(poisoned(failing(), PAYLOADS["direction"])).text
    assert "EVIL\\u202egnp.exe" in text


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308, -1.0, 0])
def test_numbers_that_are_none_are_drawn_nowhere(number):
    def replaced(value):
        if isinstance(value, dict):
            return {key: replaced(each) for key, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return number if isinstance(value, float) else value

    found = rendered(replaced(failing()))
    for _, attrs in found.elements:
        for name, value in attrs.items():
            if name in NUMERIC:
                assert math.isfinite(float(value)), (name, value)
            if name in ("points", "d", "viewBox"):
                assert not re.search("nan|inf", value)


@pytest.mark.parametrize(
    ("suite", "measured"),
    [
        ("acceptance", lambda: acceptance((0.5,) * 65)),
        ("acceptance", lambda: acceptance(prompts=2_001)),
        ("startup", lambda: {"servers": {"x": {"timeline": [[second, str(second)] for second in range(65)]}}}),
    ],
)
def test_what_is_too_much_to_draw_is_said(suite, measured):
    item = next(each for each in case()["judgements"] if each["suite"] == suite)
    text = rendered(record(case(judgements=[{**item, "measurements": measured()}]))).text
    assert "cannot be drawn" in text
    assert "too m" in text


@pytest.mark.parametrize("suite", ["acceptance", "throughput", "startup", "weights"])
def test_figures_in_another_form_are_named_and_not_lost(suite):
    strange = {
        "acceptance": {"prompts": [{"drafts": 3}, {"drafts": "many"}]},
        "throughput": {"rounds": [{"pair": 0}]},
        "startup": {"servers": {"x": {"timeline": ["soon"]}}},
        "weights": {"drafter": {"unused_keys": {"fc.weight": "gone"}}},
    }[suite]
    item = next(each for each in case()["judgements"] if each["suite"] == suite)
    text = rendered(record(case(judgements=[{**item, "measurements": strange}]))).text
    assert "cannot be drawn" in text


def test_what_does_not_count_says_so():
    text = rendered(compared(failing()["cases"][1]["judgements"], green(), "PASS")).text
    assert "(of the old release, not counted) weights of small on vllm 0.28.0 (old)" in text


def test_of_very_many_cases_those_that_are_not_green_are_shown():
    few = [judgement("startup", finding("STA001"))]
    red = [judgement("weights", *(finding("WGT003", "FAIL", f"red {index}") for index in range(70)))]
    others = [case(f"pair-{index}", judgements=few, evidence=None) for index in range(80)]
    many = {f"server-{index}": {"argv": [f"serve-{index}"]} for index in range(200)}
    loud = [judgement("startup", finding("STA001"), measurements={"servers": many})]
    made = record(*others, *(case(f"last-{index}", judgements=[*red, *loud]) for index in range(2)))
    found = rendered(made, *(TREND,) * 60)
    shown = [attrs for attrs in found.all("details") if attrs.get("class") == "case"]
    assert len(shown) == 50
    for words in ("last-0 on", "last-1 on", "That of 32 more", "20 more findings", "188 more servers"):
        assert words in found.text
    assert "10 more figures" in found.text
    assert len(found.all("tr")) > 82


def test_of_very_many_reasons_the_first_are_shown_and_no_cell_leads_nowhere():
    def red(index):
        return [judgement("weights", finding("WGT003", "FAIL", f"red {index}"))]

    found = rendered(record(*(case(f"pair-{index}", judgements=red(index), evidence=None) for index in range(210))))
    assert len(found.all("article")) == 200
    assert "10 more reasons are in record.json" in found.text
    ids = {attrs["id"] for _, attrs in found.elements if "id" in attrs}
    assert all(attrs["href"][1:] in ids for attrs in found.all("a"))


def test_size_of_ten_cases():
    tensors = tuple(f"model.layers.{index}.self_attn.some_long_projection_name.weight" for index in range(60))
    made = record(*(case(f"pair-{index}", evidence=probe_evidence((), tensors)) for index in range(10)))
    assert len(page.render(made).encode()) < 1_000_000


def test_logs_of_any_length_do_not_grow_the_page():
    made = poisoned(record(*(case(str(index)) for index in range(3))), "x" * 100_000)
    assert len(page.render(made).encode()) < 2_500_000


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme):
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for what a figure is made of."""
    css = (Path(page.__file__).parent / "templates" / "style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme == "dark"]))
    assert len(blocks) == 2
    for tone, ground in itertools.product(("fg", "muted", "link"), ("bg", "card")):
        assert contrast(colours[tone], colours[ground]) >= 4.5, (tone, ground)
    for tone in ("pass", "fail", "invalid", "inconclusive", "none"):
        for ground in (f"{tone}-bg", "bg"):
            assert contrast(colours[tone], colours[ground]) >= 4.5, (tone, ground)
        assert contrast(colours["fg"], colours[f"{tone}-bg"]) >= 4.5
        assert contrast(colours["muted"], colours[f"{tone}-bg"]) >= 4.5, tone
    for mark in ("data", "level"):
        assert contrast(colours[mark], colours["bg"]) >= 3
    phases = re.findall(r"\.phase-\d \{ fill: (#\w{6})", css)
    (letters,) = re.findall(r"text\.in-phase \{ fill: (#\w{6})", css)
    assert len(phases) == 8
    assert all(contrast(letters, phase) >= 4.5 for phase in phases)


def test_what_the_harness_measures_and_judges_has_the_form_that_is_drawn(tmp_path):
    clock = VirtualClock()
    spec, plain = Engine(step_s=0.015, clock=clock), Engine(k=0, label="plain", clock=clock)
    truth = {each.name: Counts(13, 52, 52, (13, 13, 13, 13)) for each in prompts(12)}
    judgements = (
        measure_acceptance.judge_exact(measure_acceptance.measure(spec, prompts(12), 64, 4), truth),
        measure_throughput.judge(
            measure_throughput.measure(spec, plain, prompts(6), 32, concurrency_ladder=(1, 2), rounds=4, clock=clock),
            {1: 1.5},
        ),
        weights.judge(
            seen := evidence(), weights.load_exceptions("vllm", "0.32.0"), lambda *_: False, lambda *_: False
        ),
    )
    run = RunFolder.create(tmp_path)
    run.write_case("small-vllm-v1", evidence=seen, pair={"name": "small", "expect": {"throughput_ratio": {"1": 1.5}}})
    for each in judgements:
        run.write_judgement("small-vllm-v1", f"test_{each.suite}", each, seconds=1.0)
    text = rendered(run.assemble(complete=True)).text
    assert "cannot be drawn" not in text
    for words in ("oracle 100.0 %", "concurrency 2: ", "The drafter's checkpoint: 2 keys", "2 landed", "at least 1.5x"):
        assert words in text

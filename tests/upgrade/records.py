"""A record as a run writes it, made with the suites' own judges, of a healthy canary; each test breaks one thing."""

import dataclasses
import json
from pathlib import Path

from harness.engines.base import EngineIdentity
from harness.engines.surface import Metric, Surface
from harness.gate import aux_hidden, weights
from harness.measure import acceptance, losslessness
from harness.measure.acceptance import AcceptanceRun, PromptRecord
from harness.measure.endpoint import Counts
from harness.measure.load import RequestRecord
from harness.measure.outputs import Comparison, ConcurrentOutputs, LosslessnessRun, Segment
from harness.pairs.model import Expectations, Pair
from harness.report.record import RunFolder
from harness.verdict import Finding, Judgement, Verdict, worst
from tests.gate.evidence import config, evidence, key, load, parameter, proposal, serving

PAIR = Pair("small", "/a/pairs.toml", "eagle3", 4, "bfloat16", canary="small", expect=Expectations(768, (2, 4, 5)))
PROMPTS = ("p00", "p01", "p02")
EVIDENCE = evidence(
    loads=tuple(
        load(
            role,
            [parameter("model.fc.weight"), parameter("norm.weight"), parameter("head", kind="buffer")],
            [key("fc.weight", ("model.fc.weight",)), key("norm", ("norm.weight",)), key("head", ("head",))],
            rank,
        )
        for role in ("target", "drafter")
        for rank in (0, 1)
    ),
    servings=tuple(
        serving([proposal(), proposal()], place=dataclasses.replace(serving([]).place, rank=rank)) for rank in (0, 1)
    ),
    config=(config("hidden_size", 256), config("rms_norm_eps", 1e-5), config("norm_before_residual", value=True)),
)
SURFACE = Surface(
    {
        "vllm:spec_decode_num_drafts_total": Metric("counter", ("engine", "model_name"), "Number of drafts."),
        "vllm:spec_decode_num_accepted_tokens_total": Metric("counter", ("engine",), "Number of accepted tokens."),
        "vllm:num_requests_running": Metric("gauge", ("engine",), "Number of requests in execution."),
    },
    {"flags": ("--dtype", "--model", "--speculative-config"), "meta_info": ("id", "spec_verify_ct")},
)
PACKAGES = {"vllm": "0.28.0", "torch": "2.9.0", "transformers": "4.57.1", "requests": "2.32.0"}


def counts(steps=3):
    return Counts(steps, 4 * steps, 4 * steps, (steps,) * 4)


def accepted(name):
    return PromptRecord(name, True, tuple(range(16)), "length", 0.5, counts())


def compared(name):
    return Comparison(name, True, (Segment(0, (5, 6, 7), (5, 6, 7), "length", "length", 0.1, 0.1, None),))


def judgements():
    run = AcceptanceRun("small-vllm-v1-spec", True, 4, 16, tuple(map(accepted, PROMPTS)), "/metrics")
    requests = tuple(RequestRecord(name, 0.0, 0.1, 3, None) for name in PROMPTS)
    at_once = ConcurrentOutputs(3, requests, tuple(map(compared, PROMPTS)), counts(9), "")
    outputs = LosslessnessRun(
        "spec", "plain", False, 3, tuple(map(compared, PROMPTS)), (compared("p00"),), counts(9), "", None, at_once
    )
    want = aux_hidden.Expected(768, (2, 4, 5), "the pair", "the pair")
    servers = {
        f"small-vllm-v1-{kind}": {
            **({"surface": SURFACE} if kind == "spec" else {}),
            "argv": ["python"], "env": {}, "started_in_s": 50.0, "proof": {}, "log": "x.log",
            "timeline": [[0.0, "launched"], [30.0, "loading the target"], [50.0, "ready"]],
        }
        for kind in ("spec", "plain")
    }  # fmt: skip
    return {
        "test_startup": Judgement("startup", (Finding("STA001", Verdict.PASS, "ready"),), {"servers": servers}),
        "test_weights": weights.judge(
            EVIDENCE, weights.load_exceptions("vllm", "0.32.0"), lambda *_: True, lambda *_: True
        ),
        "test_aux_hidden": aux_hidden.judge(EVIDENCE, want),
        "test_acceptance": acceptance.judge_exact(run, {name: counts() for name in PROMPTS}),
        "test_losslessness": losslessness.judge(outputs, "bfloat16", oracle=dict.fromkeys(PROMPTS, (5, 6, 7))),
    }


def record(folder: Path):
    """Return the record of one healthy case, written and read back."""
    run = RunFolder.create(folder)
    suites = judgements()
    run.write_run(
        started="2026-11-30T10:00:00Z", command="draftgate run",
        machine={"cpu": "a CPU", "cores": 2, "memory_bytes": 1, "system": "Linux", "python": "3.11.7"},
        asked={"small-vllm-v1": [made.suite for made in suites.values()]},
    )  # fmt: skip
    run.write_case(
        "small-vllm-v1",
        pair=PAIR,
        engine=EngineIdentity("vllm", "vllm", "0.28.0", Path("/e/python"), "3.11.7", PACKAGES, Path("/e/site")),
        runner_asked="v1",
        device="cpu",
        target={"folder": "/t", "digest": "sha256:1", "bytes": 10},
        rebuilt=None,
        drafter={"folder": "/d", "digest": "sha256:2", "bytes": 10},
        prompts={"count": 3, "digest": "sha256:3", "seed": 1},
        provenance=(),
        not_asked={"throughput": "the pair promises no throughput_ratio", "metrics": "always right"},
        evidence=EVIDENCE,
    )
    for test, made in suites.items():
        run.write_judgement("small-vllm-v1", test, made, seconds=1.0)
    run.assemble(complete=True)
    return json.loads((run.path / "record.json").read_text())


def case(made):
    """Return a record's one case, with the machine that the record names."""
    return {"machine": made["machine"], **made["cases"][0]}


def measured(of, suite):
    """Return a suite's measurements, to be broken in place."""
    return next(item["measurements"] for item in of["judgements"] if item["suite"] == suite)


FINDING = tuple(field.name for field in dataclasses.fields(Finding))


def judged(of, suite, code, verdict):
    """Let a suite say that something is not well; other findings of it stay as they are."""
    item = next(item for item in of["judgements"] if item["suite"] == suite)
    finding = {**dict.fromkeys(FINDING, ""), "code": code, "verdict": verdict, "summary": "not well"}
    finding |= {"cause": "what the suite says", "remedy": "what the suite advises"}
    item["findings"] = [each for each in item["findings"] if each["code"] != code] + [finding]
    item["verdict"] = worst([Verdict(each["verdict"]) for each in item["findings"]])

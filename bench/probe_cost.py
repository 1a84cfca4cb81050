"""What the probe costs: tokens/s and start-up of a real server that has it, beside one that does not.

Both servers speculate, on the same canary. Rounds go A B B A, as in the throughput suite, after the probe has had its
evidence; servers are started anew several times, for two processes of the same program differ too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, add_engine_options, engine, spread, table, tell

from harness import pairs
from harness.engines.adapters import ADAPTERS
from harness.engines.base import Adapter, EngineIdentity, Launch
from harness.errors import EvidenceError
from harness.gate.case import Checkpoints, prepare
from harness.measure import throughput
from harness.measure.endpoint import Prompt
from harness.measure.statistics import mean_bounds
from harness.pairs.model import Pair
from harness.probe import evidence as probe
from harness.report.record import RunFolder
from harness.servers.server import Server, start

__all__ = ["CANARIES", "TARGET", "Replicate", "measure", "report"]

TARGET = 0.99
"""The least that tokens/s with the probe may be, over without."""

ALPHA = 0.025
"""On each side, so that bounds make a 95 % interval."""

CANARIES = {"heavy": 48, "small": 256}
"""Output tokens per prompt, by canary: rounds of some seconds. A step of `small` is nearly all Python: the worst."""

_CONCURRENCY = 1


@dataclasses.dataclass(frozen=True)
class Replicate:
    """One start of both servers and the rounds between them. In `run`, the side "with speculation" has the probe."""

    with_probe_s: float
    without_s: float
    run: throughput.ThroughputRun

    @property
    def log_ratios(self) -> list[float]:
        """Logarithm of tokens/s with the probe over without, by pair of rounds."""
        return [each.log_ratio for each in self.run.pairs(_CONCURRENCY)]


def measure(
    identity: EngineIdentity, folder: Path, cache: Path, *, starts: int, rounds: int
) -> dict[str, list[Replicate]]:
    """Start both servers of each canary `starts` times, the first one alternating; run `rounds` pairs of rounds each.

    Logs go to `folder`; the canaries are built, or found, in `cache`. Raises HarnessError if a server fails,
    EvidenceError if the probe saw nothing or the two sides did different work.
    """
    measured = {}
    for name, max_tokens in CANARIES.items():
        [pair] = pairs.find([name], [])
        found = prepare(pair, cache, identity.python, tell)
        if found.oracle is None:
            raise EvidenceError(f"{name} is not a canary")
        work = pair.workload
        drawn = found.oracle.prompts(work.throughput_count, work.length, work.seed)
        prompts = [Prompt(f"p{index:02d}", token_ids=tuple(ids)) for index, ids in enumerate(drawn)]
        couple = _Couple(pair, found, prompts, max_tokens, identity)
        measured[name] = [
            _replicate(couple, folder / f"{name}-{number}", rounds=rounds, probe_first=number % 2 == 0)
            for number in range(starts)
        ]
    return measured


@dataclasses.dataclass(frozen=True)
class _Couple:
    """What both servers of a canary have in common."""

    pair: Pair
    found: Checkpoints
    prompts: Sequence[Prompt]
    max_tokens: int
    identity: EngineIdentity

    @property
    def adapter(self) -> Adapter:
        return ADAPTERS[self.identity.engine][0]

    def launch(self, label: str, env: dict[str, str]) -> Launch:
        asked = self.pair.launch(self.adapter.name)
        return Launch(
            label=label,
            target=self.found.target.folder,
            drafter=self.found.drafter.folder,
            method=self.pair.method,
            k=self.pair.k,
            dtype=self.pair.dtype,
            runner=self.adapter.default_runner("cpu"),
            device="cpu",
            tokenizer=self.found.tokenizer,
            args=asked.args,
            env=tuple(sorted({**dict(asked.env), **env}.items())),
            startup_s=self.pair.expect.startup_s,
            version=self.identity.version,
        )

    def start(self, launch: Launch, folder: Path) -> Server:
        tell(f"starting {folder.name} {launch.label}")
        return start(self.adapter.spec(self.identity, launch), folder, lambda url: self.adapter.ready(launch, url))


def _replicate(couple: _Couple, folder: Path, *, rounds: int, probe_first: bool) -> Replicate:
    evidence = folder / "evidence"
    target, drafter = str(couple.found.target.folder), str(couple.found.drafter.folder)
    env = probe.environment(evidence, target, drafter, engine=couple.adapter.name)
    launches = {"probe": couple.launch("with-probe", env), "bare": couple.launch("without-probe", {})}
    with contextlib.ExitStack() as stack:
        order = ("probe", "bare") if probe_first else ("bare", "probe")
        servers = {kind: stack.enter_context(couple.start(launches[kind], folder)) for kind in order}
        with_probe, without = (
            couple.adapter.endpoint(launches[kind], servers[kind].base_url) for kind in ("probe", "bare")
        )
        for endpoint in (with_probe, without):
            for prompt in couple.prompts:
                endpoint.generate(prompt, couple.max_tokens)
        probe.read(evidence)  # raises unless the probe has seen all that it looks for, and has let go
        tell(f"{folder.name}: {rounds} pairs of rounds")
        run = throughput.measure(
            with_probe, without, couple.prompts, couple.max_tokens, concurrency_ladder=[_CONCURRENCY], rounds=rounds
        )
    if run.broken_off:
        raise EvidenceError(run.broken_off)
    for each in run.pairs(_CONCURRENCY):
        if each.a.counts is None or each.a.counts != each.b.counts or each.a.tokens != each.b.tokens:
            raise EvidenceError(f"the two sides did different work: {each.a.counts} and {each.b.counts}")
    return Replicate(servers["probe"].started_in_s, servers["bare"].started_in_s, run)


def report(measured: dict[str, list[Replicate]]) -> str:
    """Return two tables: speed after the evidence, and start-up."""
    speed, startup = [], []
    for name, replicates in measured.items():
        ratios = [ratio for replicate in replicates for ratio in replicate.log_ratios]
        bounds = mean_bounds(ratios, ALPHA)
        each = [f"{math.exp(statistics.fmean(replicate.log_ratios)):.3f}" for replicate in replicates]
        rounds = [pair for replicate in replicates for pair in replicate.run.pairs(_CONCURRENCY)]
        speed.append(
            (
                name,
                f"{math.exp(bounds.estimate):.4f} ({math.exp(bounds.lower):.4f} to {math.exp(bounds.upper):.4f})",
                f"{len(ratios)}",
                ", ".join(each),
                f"{statistics.geometric_mean(pair.a.tokens_per_second for pair in rounds):.1f}",
                f"{statistics.geometric_mean(pair.b.tokens_per_second for pair in rounds):.1f}",
            )
        )
        startup.append(
            (
                name,
                spread([replicate.with_probe_s / replicate.without_s for replicate in replicates], ".3f"),
                f"{len(replicates)}",
                spread([replicate.with_probe_s for replicate in replicates], ".1f"),
                spread([replicate.without_s for replicate in replicates], ".1f"),
            )
        )
    speed_head = ("canary", "tokens/s with / without (95 %)", "pairs of rounds", "by start", "with", "without")
    startup_head = ("canary", "start-up with / without", "starts of each", "s with", "s without")
    return (
        f"{table(speed_head, speed)}\n\n"
        f"Target: at least {TARGET}. Student's t on log ratios of neighbouring rounds.\n\n"
        f"{table(startup_head, startup)}\n\nMedian (min to max)."
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how much is measured."""
    parser.add_argument(
        "--starts", type=int, default=2, metavar="N", help="starts of each server, an even number (default: 2)"
    )
    parser.add_argument(
        "--rounds", type=int, default=8, metavar="N", help="pairs of rounds a start, an even number (default: 8)"
    )


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    add_options(parser)
    arguments = parser.parse_args()
    identity, folder = engine(arguments), RunFolder.create(ROOT / "runs").path
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        measured = measure(identity, folder, Path(cache), starts=arguments.starts, rounds=arguments.rounds)
    print(report(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One pair under two releases of an engine: what each was seen to do, and their speculative servers, asked in turn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.files import write_atomically
from harness.gate.case import Case
from harness.measure import acceptance
from harness.measure.acceptance import AcceptanceRun, ExpectedCounts
from harness.measure.change import ThroughputChange, measure_in_turns, measure_until_decided
from harness.measure.sequential import BLOCK, plan
from harness.verdict import Judgement

__all__ = ["Change", "judge_exact"]

TURNS = 2 * BLOCK
"""Pairs of starts at most, where releases take turns; on a quiet machine mostly half of them decide."""


@dataclasses.dataclass(frozen=True)
class Change:
    """The two cases of a comparison, and what the record has of each so far."""

    old: Case
    new: Case
    old_record: Mapping[str, Any]
    new_record: Mapping[str, Any]

    def __post_init__(self) -> None:
        # Where servers do not run side by side, neither do the two releases.
        self.old.rivals, self.new.rivals = (self.new,), (self.old,)

    def acceptance(self) -> tuple[AcceptanceRun, AcceptanceRun]:
        """Ask both releases the pair's prompts: each prompt of one, then of the other, where they run side by side.

        Raises what `harness.measure.acceptance.measure` raises.
        """
        pair, prompts = self.new.pair, self.new.prompts
        # The new one has answered last, so where they take turns it need not start again.
        sides = [case.endpoint(speculative=True) for case in (self.new, self.old)]
        parts = [[prompt] for prompt in prompts] if pair.side_by_side else [prompts]
        tokens = pair.workload.max_tokens
        runs = [[acceptance.measure(side, part, tokens, pair.k) for side in sides] for part in parts]
        return _joined([old for _, old in runs]), _joined([new for new, _ in runs])

    def throughput(self) -> ThroughputChange:
        """Load both releases in turn, at each concurrency that the pair promises something at, until it is decided.

        The plain server is stopped first: it takes no part. Where servers do not run side by side, each round has a
        server started for it.

        Raises what `harness.measure.change.measure_until_decided` and `measure_in_turns` raise.
        """
        self.new.stop(speculative=False)
        work, ladder = self.new.pair.workload, sorted(self.new.pair.expect.throughput_ratio)
        prompts, tokens = self.new.throughput_prompts, work.throughput_tokens
        if self.new.pair.side_by_side:
            return measure_until_decided(
                self.old.endpoint(speculative=True),
                self.new.endpoint(speculative=True),
                prompts,
                tokens,
                concurrency_ladder=ladder,
                plan=plan(loads=len(ladder)),
            )
        return measure_in_turns(
            self.old.started_anew,
            self.new.started_anew,
            prompts,
            tokens,
            concurrency_ladder=ladder,
            plan=plan(max_pairs=TURNS, looks=TURNS // BLOCK, loads=len(ladder)),
            keep=self._keep,
        )

    def _keep(self, run: ThroughputChange) -> None:
        """Write the rounds so far beside the new release's logs: they took hours, and a killed run keeps them."""
        text = json.dumps(run.as_measurements(), indent=1)
        write_atomically(self.new.folder / "rounds.json", text + "\n")


def judge_exact(old: AcceptanceRun, new: AcceptanceRun, oracle: Mapping[str, ExpectedCounts]) -> Judgement:
    """Judge the new side of a canary against the oracle; the old side, equal or not, is recorded beside it."""
    judged = acceptance.judge_exact(new, oracle)
    return Judgement("upgrade", judged.findings, {"old": old.as_measurements(), "new": judged.measurements})


def _joined(runs: Sequence[AcceptanceRun]) -> AcceptanceRun:
    """Return runs of one endpoint as one. Its witnesses speak of all that it was asked, so the last ones stand."""
    return dataclasses.replace(
        runs[-1],
        prompts=tuple(record for run in runs for record in run.prompts),
        missing=next((run.missing for run in runs if run.missing), ""),
    )

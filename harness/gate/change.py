"""One pair under two releases of an engine: what each was seen to do, and their speculative servers, asked in turn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.gate.case import Case
from harness.measure import acceptance
from harness.measure.acceptance import AcceptanceRun, ExpectedCounts
from harness.measure.change import ThroughputChange, measure_in_turns, measure_until_decided
from harness.measure.partial import in_steps
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

        Should a server fail after the first answer, what there is of both is returned, with the reason. Raises what
        `harness.measure.acceptance.measure` raises.
        """
        pair, prompts = self.new.pair, self.new.prompts
        k, tokens = pair.k, pair.workload.max_tokens
        # The new one has answered last, so where they take turns it need not start again.
        sides = {side: case.endpoint(speculative=True) for side, case in (("new", self.new), ("old", self.old))}
        done = {side: [AcceptanceRun(each.label, each.speculative, k, tokens, (), "")] for side, each in sides.items()}

        def so_far(why: str) -> dict[str, AcceptanceRun]:
            why = why or next((run.broken_off for runs in done.values() for run in runs if run.broken_off), "")
            return {side: _joined(runs, why) for side, runs in done.items()}

        def keep(side: str, run: AcceptanceRun) -> None:
            done[side][-1] = run
            self.new.keep("prompts.json", {name: each.as_measurements() for name, each in so_far("").items()})

        def steps() -> Iterator[None]:
            for part in [[prompt] for prompt in prompts] if pair.side_by_side else [prompts]:
                for side, endpoint in sides.items():
                    done[side].append(done[side][0])
                    run = acceptance.measure(endpoint, part, tokens, k, keep=functools.partial(keep, side))
                    done[side][-1] = run
                    yield
                    if run.broken_off:
                        return

        runs = in_steps(steps(), so_far, lambda _: None)
        return runs["old"], runs["new"]

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
                keep=self._keep,
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
        self.new.keep("rounds.json", run.as_measurements())


def judge_exact(old: AcceptanceRun, new: AcceptanceRun, oracle: Mapping[str, ExpectedCounts]) -> Judgement:
    """Judge the new side of a canary against the oracle; the old side, equal or not, is recorded beside it."""
    judged = acceptance.judge_exact(new, oracle)
    return Judgement("upgrade", judged.findings, {"old": old.as_measurements(), "new": judged.measurements})


def _joined(runs: Sequence[AcceptanceRun], broken_off: str) -> AcceptanceRun:
    """Return runs of one endpoint as one. Its witnesses speak of all that it was asked, so the last ones stand."""
    return dataclasses.replace(
        runs[-1],
        prompts=tuple(record for run in runs for record in run.prompts),
        missing=next((run.missing for run in runs if run.missing), ""),
        broken_off=broken_off,
    )

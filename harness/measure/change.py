"""May we upgrade: two versions of an engine, old and new, on the same prompts, and whether the new one is worse.

Every verdict is about new / old against 1 - tolerance: PASS if it is shown to be above, FAIL if it is shown to be
below, INCONCLUSIVE if the data show neither, INVALID if there is nothing that could be compared.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.measure.acceptance import (
    MIN_PROMPTS,
    SEED,
    by_position,
    dead_cause,
    is_dead,
    more_prompts,
    position_cause,
    refused,
)
from harness.measure.evidence import evidence_findings, simulated_findings
from harness.measure.load import Round, run_round
from harness.measure.partial import broken_off, in_steps
from harness.measure.sequential import ALPHA, BLOCK, Plan, decide
from harness.measure.statistics import POWER, Bounds, mean_and_error, paired_bounds
from harness.measure.throughput import Pair, a_comes_first, check_load, invalid_rounds, yield_of
from harness.verdict import Finding, Judgement, Verdict, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from harness.measure.acceptance import AcceptanceRun
    from harness.measure.endpoint import Counts, Endpoint, Prompt

__all__ = [
    "ACCEPTANCE_TOLERANCE",
    "ThroughputChange",
    "acceptance_change",
    "measure_in_turns",
    "measure_until_decided",
    "throughput_change",
]

ACCEPTANCE_TOLERANCE = 0.05
"""Share of the accept length, and of the acceptance at each position, that an upgrade may cost."""

SUITE = "upgrade"

ROUND = 2
"""How many times a round is as long as the throughput suite's: an upgrade may cost 7.5 %, not a factor."""

TURN = 4
"""How many times a round is as long where a server is started for each: a start takes minutes, a round seconds."""

_SHARED = 0.25
"""Share of a loss from which tokens per step, or the time of a step, is named as a cause beside the other."""


def acceptance_change(
    old: AcceptanceRun,
    new: AcceptanceRun,
    *,
    tolerance: float = ACCEPTANCE_TOLERANCE,
    alpha: float = ALPHA,
    seed: int = SEED,
) -> Judgement:
    """Judge the accept length of `new` against that of `old`, and the acceptance at each draft position.

    Prompts are the samples, drawn with both sides' counts. The accept length decides: PASS if the lower bound of new /
    old reaches 1 - `tolerance`, FAIL if the upper one is below it, each at `alpha`. A position, among the steps that
    accepted the one before, can only be FAIL, with the bounds of all K positions together at `alpha`: a late position
    may be dead and hardly show in the length. Raises UsageError for a tolerance or alpha that decides nothing.
    """
    if not 0.0 <= tolerance < 1.0:
        raise UsageError(f"a tolerance of {tolerance}", remedy="give a share from 0 to below 1")
    if not 0.0 < alpha < 0.5:
        raise UsageError(f"alpha is {alpha}", remedy="give a number between 0 and 0.5")
    old = dataclasses.replace(old, label=f"old ({old.label})")
    new = dataclasses.replace(new, label=f"new ({new.label})")
    measurements = {
        "old": old.as_measurements(),
        "new": new.as_measurements(),
        "tolerance": tolerance,
        "alpha": alpha,
        "power": POWER,
    }
    evidence: tuple[Finding, ...] = ()
    for run in (old, new):
        found = evidence_findings(run)
        evidence += found if refused(found) else (*found, *simulated_findings(run))
    if not refused(evidence):
        evidence += tuple(_comparable(old, new))
    if refused(evidence):
        return Judgement(SUITE, evidence, measurements)
    if is_dead(new):
        return Judgement(SUITE, (*evidence, _died(old, new)), measurements)

    by_name = {record.name: record.counts for record in new.prompts}
    pairs = [(record.counts, by_name[record.name]) for record in old.prompts]
    # A prompt without a verify step on either side says nothing.
    pairs = [(before, after) for before, after in pairs if before.drafts or after.drafts]
    if len(pairs) < MIN_PROMPTS:
        return Judgement(SUITE, (*evidence, _too_few(old, new, len(pairs), tolerance)), measurements)
    length = paired_bounds(
        ([now.drafts + now.accepted for _, now in pairs], [now.drafts for _, now in pairs]),
        ([then.drafts + then.accepted for then, _ in pairs], [then.drafts for then, _ in pairs]),
        factor=1.0 - tolerance,
        alpha=alpha,
        seed=seed,
    )
    positions = [_position(pairs, position, tolerance, alpha / old.k, seed) for position in range(old.k)]
    measurements["accept_length_ratio"] = dataclasses.asdict(length)
    measurements["position_ratios"] = [None if each is None else dataclasses.asdict(each) for each in positions]
    fallen = [
        position for position, bounds in enumerate(positions) if bounds is not None and bounds.upper < 1.0 - tolerance
    ]
    return Judgement(
        SUITE,
        (
            *evidence,
            _length(old, new, length, tolerance, fallen),
            # A drafter that was dead has no position that it could lose.
            *([] if is_dead(old) else [_positions(old, new, positions, tolerance, alpha, fallen)]),
        ),
        measurements,
    )


def _comparable(old: AcceptanceRun, new: AcceptanceRun) -> Iterator[Finding]:
    """Say why two runs, each sound by itself, cannot be compared."""
    for what, then, now in (("K", old.k, new.k), ("the number of tokens asked for", old.max_tokens, new.max_tokens)):
        if then != now:
            yield Finding(
                "CHG001",
                Verdict.INVALID,
                f"{what} is not the same on both sides",
                expected=f"{then}, as on the old side",
                actual=f"{now}",
                source=f"{old.label}, {new.label}",
                remedy="measure both sides with one workload: an accept length depends on it",
            )
    # A prompt that ignores the end of sequence is another than one that does not.
    before = {(record.name, record.ignore_eos) for record in old.prompts}
    after = {(record.name, record.ignore_eos) for record in new.prompts}
    if before != after:
        only = [sorted({name for name, _ in one - other}) for one, other in ((before, after), (after, before))]
        yield Finding(
            "CHG001",
            Verdict.INVALID,
            "the two sides did not run the same prompts",
            expected=f"{len(before)} prompts, the same on both sides",
            actual=f"only old: {some(only[0], 5) or 'none'}; only new: {some(only[1], 5) or 'none'}",
            source=f"{old.label}, {new.label}",
            remedy="measure both sides on one prompt set",
        )
    lengths = f"accept length {old.totals.accept_length:.3f} on old, {new.totals.accept_length:.3f} on new"
    if is_dead(old) and not is_dead(new):
        yield Finding(
            "CHG002",
            Verdict.PASS,
            "the drafter is dead on the old side, and is not on the new one",
            expected="no loss",
            actual=lengths,
            n=old.totals.drafts,
            source=old.source,
        )
    elif is_dead(old):
        yield Finding(
            "CHG002",
            Verdict.INVALID,
            "practically nothing is accepted on either side, so there is nothing that the new one could lose",
            expected="a drafter that works on the old version",
            actual=lengths,
            n=old.totals.drafts,
            source=old.source,
            cause=dead_cause(old),
            remedy="run the weights and aux_hidden suites on the old version; compare with a version that works",
        )


def _died(old: AcceptanceRun, new: AcceptanceRun) -> Finding:
    return Finding(
        "CHG012",
        Verdict.FAIL,
        "the drafter is dead on the new side: practically no draft token is accepted",
        expected=f"accept length {old.totals.accept_length:.3f}, as on {old.label}",
        actual=f"{new.totals.accept_length:.3f} in {new.totals.drafts} verify steps",
        n=new.totals.drafts,
        source=new.source,
        cause=dead_cause(new),
        remedy="run the weights and aux_hidden suites on the new version: they look at causes 1 to 3",
    )


def _too_few(old: AcceptanceRun, new: AcceptanceRun, n: int, tolerance: float) -> Finding:
    return Finding(
        "CHG010",
        Verdict.INCONCLUSIVE,
        "too few prompts to compare the accept lengths",
        expected=f"new / old of at least {1 - tolerance:.3f}, from {MIN_PROMPTS} prompts or more",
        actual=f"{new.totals.accept_length / old.totals.accept_length:.3f}, from {n}",
        n=n,
        source=f"{old.source}; {new.source}",
        cause="prompts differ more than steps within one, so they are the samples",
        remedy=f"use at least {MIN_PROMPTS} prompts; more tokens per prompt do not replace them",
    )


def _position(
    pairs: Sequence[tuple[Counts, Counts]], position: int, tolerance: float, alpha: float, seed: int
) -> Bounds | None:
    """Bound new / old of the acceptance at `position`, given the one before; None if too few prompts got there."""

    def tries(counts: Counts) -> int:
        return counts.per_position[position - 1] if position else counts.drafts

    got_there = [(then, now) for then, now in pairs if tries(then) or tries(now)]
    old_top = [then.per_position[position] for then, _ in got_there]
    new_bottom = [tries(now) for _, now in got_there]
    # Each side by itself: a few prompts that still get there are too few to say how they fare.
    if min(sum(map(bool, new_bottom)), sum(bool(tries(then)) for then, _ in got_there)) < MIN_PROMPTS:
        return None
    if not any(old_top):
        return None
    return paired_bounds(
        ([now.per_position[position] for _, now in got_there], new_bottom),
        (old_top, [tries(then) for then, _ in got_there]),
        factor=1.0 - tolerance,
        alpha=alpha,
        seed=seed,
    )


def _length(old: AcceptanceRun, new: AcceptanceRun, bounds: Bounds, tolerance: float, fallen: list[int]) -> Finding:
    least = 1.0 - tolerance
    before, after = old.totals, new.totals
    cause = remedy = ""
    if bounds.lower >= least:
        verdict = Verdict.PASS
    elif bounds.upper < least:
        verdict = Verdict.FAIL
        cause = (
            f"the first position that fell: {position_cause(fallen[0])}"
            if fallen
            else "no single position is shown to have fallen: each lost a little (dtype, quantisation, kernels), or "
            "the prompts reach the engine otherwise (chat template, tokenizer)"
        )
        remedy = (
            "run the weights and aux_hidden suites on the new version; compare config keys read and layers captured"
        )
    else:
        verdict = Verdict.INCONCLUSIVE
        cause = (
            f"{bounds.n} prompts like these decide a difference of {bounds.detectable:.1%} in {POWER:.0%} of runs; the "
            f"one seen is {abs(bounds.estimate - least):.1%}"
        )
        remedy = more_prompts(bounds, abs(bounds.estimate - least))
    return Finding(
        "CHG010",
        verdict,
        "accept length, new against old",
        expected=f"new / old of at least {least:.3f}",
        actual=(
            f"{bounds.estimate:.3f} = {after.accept_length:.3f} / {before.accept_length:.3f} (by position, given the "
            f"one before: old {by_position(before)}, new {by_position(after)})"
        ),
        n=bounds.n,
        interval=(bounds.lower, bounds.upper),
        source=f"{old.source}; {bounds.method}; {_stated(bounds.alpha, POWER, tolerance + bounds.detectable)}",
        cause=cause,
        remedy=remedy,
    )


def _positions(
    old: AcceptanceRun,
    new: AcceptanceRun,
    positions: list[Bounds | None],
    tolerance: float,
    alpha: float,
    fallen: list[int],
) -> Finding:
    least = 1.0 - tolerance
    shown = [
        f"{position}: not judged"
        if bounds is None
        else f"{position}: {bounds.estimate:.3f} ({bounds.lower:.3f} to {bounds.upper:.3f}, "
        + ("fell" if bounds.upper < least else "held" if bounds.lower >= least else "open")
        + ")"
        for position, bounds in enumerate(positions)
    ]
    judged = [bounds for bounds in positions if bounds is not None]
    effects = ", ".join("-" if each is None else f"{tolerance + each.detectable:.1%}" for each in positions)
    return Finding(
        "CHG011",
        Verdict.FAIL if fallen else Verdict.PASS if judged else Verdict.INCONCLUSIVE,
        f"acceptance fell at draft position {', '.join(map(str, fallen))}"
        if fallen
        else "no draft position is shown to have fallen"
        if judged
        else f"no draft position was reached on {MIN_PROMPTS} prompts",
        expected=f"no position whose new / old is shown to be below {least:.3f}",
        actual="new / old, given the position before: " + "; ".join(shown),
        n=max((bounds.n for bounds in judged), default=0),
        source=(
            f"{new.source}; bounds over prompts, paired; alpha {alpha:.1%} for all {old.k} positions together "
            f"(Bonferroni); power {POWER:.0%} for a loss of {effects} at positions 0 to {old.k - 1}"
        ),
        cause=position_cause(fallen[0]) if fallen else "",
        remedy="" if not fallen else "run the weights and aux_hidden suites on the new version",
    )


def _stated(alpha: float, power: float, loss: float) -> str:
    return f"alpha {alpha:.1%} for a wrong PASS and for a wrong FAIL; power {power:.0%} for a loss of {loss:.1%}"


@dataclasses.dataclass(frozen=True)
class ThroughputChange:
    """Every round of two versions of an engine, warm-ups included, in the order they ran, and the plan they follow.

    `new` is side A of a pair, `old` side B: a log ratio above 0 means that the new version is faster. `ended` says for
    each concurrency why sampling stopped: "decided", "pairs", "seconds" or "broken off"; `broken_off` has the reason.
    `in_turns` says that each round of a pair was run by a server started for that pair, for both do not fit at once.
    """

    old_label: str
    new_label: str
    old_speculative: bool
    new_speculative: bool
    max_tokens: int
    ignore_eos: bool
    plan: Plan
    new_rounds: tuple[Round, ...]
    old_rounds: tuple[Round, ...]
    ended: dict[int, str]
    in_turns: bool = False
    broken_off: str = ""

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Every round of both sides, in the order they ran."""
        return tuple(sorted((*self.new_rounds, *self.old_rounds), key=lambda each: each.order))

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The ladder, ascending."""
        return tuple(sorted(self.ended))

    def pairs(self, concurrency: int) -> tuple[Pair, ...]:
        """Return the measured pairs at `concurrency`, in the order they ran."""
        new, old = (
            {each.pair: each for each in rounds if each.concurrency == concurrency and each.pair is not None}
            for rounds in (self.new_rounds, self.old_rounds)
        )
        return tuple(Pair(new[pair], old[pair]) for pair in sorted(new.keys() & old.keys()))

    def as_measurements(self) -> dict[str, Any]:
        """Return every raw round as plain data for the run record."""
        return dataclasses.asdict(self) | {
            "new_rounds": [each.as_measurements() for each in self.new_rounds],
            "old_rounds": [each.as_measurements() for each in self.old_rounds],
            "plan": self.plan.as_measurements(),
            "ended": {str(concurrency): reason for concurrency, reason in self.ended.items()},
        }


def measure_until_decided(
    old: Endpoint,
    new: Endpoint,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    concurrency_ladder: Sequence[int],
    plan: Plan,
    max_seconds: float = math.inf,
    keep: Callable[[ThroughputChange], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ThroughputChange:
    """Run pairs of rounds at each load, A B B A B A A B (A is new), until `plan` decides or the budget is used up.

    A warm-up of each side comes first at each load. Every round is recorded; none is repeated. `max_seconds` is shared
    among the loads: each gets an equal part of what is left, and no pair begins after it. Both endpoints run at once.
    `keep` is given what there is after each pair. Should a server fail after the first pair, what there is is returned,
    with the reason. Raises UsageError for unusable arguments, and what `Endpoint.generate` raises.
    """
    _check_plan(prompts, max_tokens, concurrency_ladder, plan)
    if not max_seconds > 0:
        raise UsageError(f"a budget of {max_seconds} seconds", remedy="give a positive number")
    done = _Done(prompts, max_tokens, clock)
    ended: dict[int, str] = {}
    end = clock() + max_seconds

    def steps() -> Iterator[None]:
        for left, concurrency in zip(range(len(concurrency_ladder), 0, -1), concurrency_ladder, strict=True):
            deadline = clock() + (end - clock()) / left
            for is_new in (True, False):
                done.run(new if is_new else old, is_new=is_new, concurrency=concurrency, pair=None)
            ratios: list[float] = []
            while concurrency not in ended:
                if clock() >= deadline:
                    ended[concurrency] = "seconds"
                    break
                first = a_comes_first(len(ratios))
                sides = {
                    is_new: done.run(
                        new if is_new else old, is_new=is_new, concurrency=concurrency, pair=len(ratios), times=ROUND
                    )
                    for is_new in (first, not first)
                }
                ratios.append(Pair(sides[True], sides[False]).log_ratio)
                if reason := _reason_to_end(plan, ratios):
                    ended[concurrency] = reason
                yield

    def so_far(why: str) -> ThroughputChange:
        return done.as_change(old, new, plan, _each_ended(concurrency_ladder, ended), broken_off=why)

    return in_steps(steps(), so_far, keep)


def measure_in_turns(
    start_old: Callable[[], Endpoint],
    start_new: Callable[[], Endpoint],
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    concurrency_ladder: Sequence[int],
    plan: Plan,
    keep: Callable[[ThroughputChange], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ThroughputChange:
    """Run pairs of rounds of two versions that do not fit side by side, in the order of `measure_until_decided`.

    Each call of `start_old` and `start_new` starts a server anew, after the other one has ended, and returns its
    endpoint. It serves one round, `TURN` times a usual one, at each load that is not decided, after a warm-up
    of each: so the samples are pairs of starts, and what differs between two starts of one version is noise that they
    have. `keep` is given what there is after each pair. Should a server fail after the first pair, what there is is
    returned, with the reason. Raises UsageError for unusable arguments, and what a start and `Endpoint.generate` raise.
    """
    _check_plan(prompts, max_tokens, concurrency_ladder, plan)
    done = _Done(prompts, max_tokens, clock)
    ended: dict[int, str] = {}
    ratios: dict[int, list[float]] = {concurrency: [] for concurrency in concurrency_ladder}
    starts = {True: start_new, False: start_old}
    endpoints: dict[bool, Endpoint] = {}

    def steps() -> Iterator[None]:
        for pair in range(plan.looks[-1]):
            going = [concurrency for concurrency in concurrency_ladder if concurrency not in ended]
            if not going:
                return
            first = a_comes_first(pair)
            sides: dict[tuple[bool, int], Round] = {}
            for is_new in (first, not first):
                endpoints[is_new] = starts[is_new]()
                for concurrency in going:
                    done.run(endpoints[is_new], is_new=is_new, concurrency=concurrency, pair=None)
                    sides[is_new, concurrency] = done.run(
                        endpoints[is_new], is_new=is_new, concurrency=concurrency, pair=pair, times=TURN
                    )
            for concurrency in going:
                ratios[concurrency].append(Pair(sides[True, concurrency], sides[False, concurrency]).log_ratio)
                if reason := _reason_to_end(plan, ratios[concurrency]):
                    ended[concurrency] = reason
            yield

    def so_far(why: str) -> ThroughputChange:
        each = _each_ended(concurrency_ladder, ended)
        return done.as_change(endpoints[False], endpoints[True], plan, each, in_turns=True, broken_off=why)

    return in_steps(steps(), so_far, keep)


def _check_plan(prompts: Sequence[Prompt], max_tokens: int, concurrency_ladder: Sequence[int], plan: Plan) -> None:
    check_load(prompts, max_tokens, concurrency_ladder)
    if plan.loads != len(concurrency_ladder):
        raise UsageError(
            f"a plan for {plan.loads} loads and a ladder of {len(concurrency_ladder)}",
            remedy="plan with loads=len(concurrency_ladder): the error rate is shared among them",
        )


def _each_ended(concurrency_ladder: Sequence[int], ended: dict[int, str]) -> dict[int, str]:
    """Return why sampling stopped at each load: one that is not decided was broken off, or will have been."""
    return {concurrency: ended.get(concurrency, "broken off") for concurrency in concurrency_ladder}


def _reason_to_end(plan: Plan, ratios: Sequence[float]) -> str:
    """Return why no further pair is run, "" if one is."""
    verdict = decide(plan, ratios).verdict
    return "" if verdict is None else "pairs" if verdict is Verdict.INCONCLUSIVE else "decided"


class _Done:
    """The rounds of both sides so far, by whether they are the new one's, numbered in the order they ran."""

    def __init__(self, prompts: Sequence[Prompt], max_tokens: int, clock: Callable[[], float]) -> None:
        self._prompts, self._max_tokens, self._clock = prompts, max_tokens, clock
        self._rounds: dict[bool, list[Round]] = {True: [], False: []}

    def run(self, endpoint: Endpoint, *, is_new: bool, concurrency: int, pair: int | None, times: int = 1) -> Round:
        """Run a round, `times` as long as it need be. Raises what `Endpoint.generate` raises."""
        made = run_round(
            endpoint,
            self._prompts,
            self._max_tokens,
            speculative=endpoint.speculative,
            concurrency=concurrency,
            order=sum(map(len, self._rounds.values())),
            pair=pair,
            times=times,
            clock=self._clock,
        )
        self._rounds[is_new].append(made)
        return made

    def as_change(
        self,
        old: Endpoint,
        new: Endpoint,
        plan: Plan,
        ended: dict[int, str],
        *,
        broken_off: str,
        in_turns: bool = False,
    ) -> ThroughputChange:
        """Return them with what they were run for."""
        return ThroughputChange(
            old.label,
            new.label,
            old.speculative,
            new.speculative,
            self._max_tokens,
            self._prompts[0].ignore_eos,
            plan,
            tuple(self._rounds[True]),
            tuple(self._rounds[False]),
            ended,
            in_turns,
            broken_off,
        )


def throughput_change(run: ThroughputChange) -> Judgement:
    """Judge the throughput of new against old at each load, by the plan that the rounds were taken by.

    A loss is taken apart: speed = tokens per step x steps per second. The first is the drafter's and the target's
    agreement, the second the engine's speed; the finding says which of them fell.
    """
    invalid = (*_alike(run), *invalid_rounds(run), *_on_plan(run))
    if invalid:
        return Judgement(SUITE, invalid, run.as_measurements())
    # What was decided before the rounds were broken off stands.
    speeds = [_speed(run, concurrency) for concurrency in run.concurrencies if run.ended[concurrency] != "broken off"]
    return Judgement(SUITE, (*speeds, *_broken_off(run)), run.as_measurements())


def _alike(run: ThroughputChange) -> Iterator[Finding]:
    if run.old_speculative != run.new_speculative:
        yield Finding(
            "CHG003",
            Verdict.INVALID,
            "one side speculates and the other does not",
            expected="two versions launched alike",
            actual=f"{run.old_label}: {run.old_speculative}, {run.new_label}: {run.new_speculative}",
            source=f"{run.old_label}, {run.new_label}",
            remedy="compare speculation with speculation; the speed-up by speculation is the throughput suite's",
        )


def _broken_off(run: ThroughputChange) -> Iterator[Finding]:
    done = {each: len(run.pairs(each)) for each in run.concurrencies if run.ended[each] == "broken off"}
    if not done:
        return
    yield broken_off(
        "CHG005",
        "the rounds",
        run.broken_off,
        expected=f"pairs until decided, {run.plan.looks[-1]} at most",
        actual=", ".join(f"{n} pairs at concurrency {concurrency}" for concurrency, n in done.items()),
        source=f"{run.old_label}, {run.new_label}",
    )


def _on_plan(run: ThroughputChange) -> Iterator[Finding]:
    """Say where the rounds are not those that the plan's error rates are for: all of them, none left out or added."""
    if run.plan.loads != len(run.concurrencies):
        yield _off_plan(f"{run.plan.loads} loads", f"loads {list(run.concurrencies)}")
    for concurrency in run.concurrencies:
        if run.broken_off and run.ended[concurrency] == "broken off":
            continue
        numbers = [pair.a.pair for pair in run.pairs(concurrency)]
        every = {each.pair for each in run.rounds if each.concurrency == concurrency and each.pair is not None}
        whole = numbers == list(range(len(every))) and len(every) <= run.plan.looks[-1]
        ended = run.ended[concurrency] == "seconds" or (
            whole and decide(run.plan, [pair.log_ratio for pair in run.pairs(concurrency)]).verdict is not None
        )
        if not whole or not ended:
            yield _off_plan(
                f"pairs at concurrency {concurrency} until decided, {run.plan.looks[-1]} at most, none left out",
                f"rounds of pairs {sorted(every)}, of which {len(numbers)} are whole",
            )


def _off_plan(expected: str, actual: str) -> Finding:
    return Finding(
        "CHG004",
        Verdict.INVALID,
        "the rounds do not follow their plan",
        expected=expected,
        actual=actual,
        remedy="judge a measurement as it was taken: no round left out, none added",
    )


def _speed(run: ThroughputChange, concurrency: int) -> Finding:
    plan = run.plan
    pairs = run.pairs(concurrency)
    decision = decide(plan, [pair.log_ratio for pair in pairs])
    # What follows the last look has no part in it, but is all there is before the first.
    looked_at = pairs[: decision.n] or pairs
    verdict = decision.verdict or Verdict.INCONCLUSIVE
    least = 1.0 - plan.tolerance
    cause = remedy = ""
    if verdict is Verdict.FAIL:
        cause, remedy = _which_fell(run, looked_at)
    elif verdict is Verdict.INCONCLUSIVE:
        cause, remedy = _undecided(run, concurrency, pairs)
    loss = f"{-math.expm1(plan.threshold - decision.detectable):.1%}" if decision.n else "none: no look was reached"
    return Finding(
        "CHG020",
        verdict,
        f"output tokens per second at concurrency {concurrency}, new against old",
        expected=f"new / old of at least {least:.3f}",
        actual=_taken_apart(run, looked_at) if looked_at else "no pair of rounds was run",
        n=len(looked_at),
        interval=(math.exp(decision.lower), math.exp(decision.upper)) if decision.n else None,
        source=(
            f"{len(looked_at)} pairs of rounds, A B B A B A A B"
            f"{', each on a server started for it' if run.in_turns else ''}; log ratios, Student's t at "
            f"{'look' if len(plan.looks) == 1 else 'looks'} {', '.join(map(str, plan.looks))} with alpha spending "
            f"(O'Brien-Fleming type); alpha {plan.alpha:.1%} for a wrong PASS and, over {plan.loads} loads, for a "
            f"wrong FAIL; planned for a loss of {plan.effect:.1%} with power {plan.power:.0%}; these data show with "
            f"that power a loss of {loss}"
        ),
        cause=cause,
        remedy=remedy,
    )


def _factors(run: ThroughputChange, pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the mean log ratios of the tokens per step and of the steps per second; their sum is that of the speed."""
    total = sum(pair.log_ratio for pair in pairs) / len(pairs)
    if not run.new_speculative:
        return 0.0, total
    tokens = sum(math.log(yield_of([pair.a])[1] / yield_of([pair.b])[1]) for pair in pairs) / len(pairs)
    return tokens, total - tokens


def _taken_apart(run: ThroughputChange, pairs: Sequence[Pair]) -> str:
    tokens, steps = _factors(run, pairs)
    new, old = (
        math.exp(sum(math.log(each.tokens_per_second) for each in side) / len(side))
        for side in ([pair.a for pair in pairs], [pair.b for pair in pairs])
    )
    text = f"{math.exp(tokens + steps):.3f}"
    if run.new_speculative:
        lengths = [yield_of(side)[0] for side in ([pair.b for pair in pairs], [pair.a for pair in pairs])]
        text += (
            f" = {math.exp(tokens):.3f} (tokens per step; accept length {lengths[0]:.2f} -> {lengths[1]:.2f}) x "
            f"{math.exp(steps):.3f} (steps per second)"
        )
    return f"{text}; {old:.1f} -> {new:.1f} tokens/s (geometric means)"


def _which_fell(run: ThroughputChange, pairs: Sequence[Pair]) -> tuple[str, str]:
    tokens, steps = _factors(run, pairs)
    share = tokens / (tokens + steps)
    slower = f"a step takes {math.exp(-steps):.2f} times as long"
    fewer = f"a step yields {math.exp(tokens):.2f} times the tokens"
    look_at_steps = (
        "look at what a step costs on the new version: attention backend, CUDA graphs or compilation, the drafter's "
        "own steps, scheduling; compare the two start-up logs"
    )
    look_at_tokens = "read the acceptance findings (CHG010, CHG011): they name the position"
    if share < _SHARED:
        return f"step time: {slower}; the tokens per step did not fall ({math.exp(tokens):.3f})", look_at_steps
    if share > 1.0 - _SHARED:
        return f"accept length: {fewer}; the time of a step did not grow ({math.exp(-steps):.3f})", look_at_tokens
    return f"both: {fewer}, and {slower}", f"{look_at_tokens}; {look_at_steps}"


def _undecided(run: ThroughputChange, concurrency: int, pairs: Sequence[Pair]) -> tuple[str, str]:
    plan = run.plan
    if run.ended[concurrency] == "seconds":
        following = next((look for look in plan.looks if look > len(pairs)), plan.looks[-1])
        return (
            f"the time was used up after {len(pairs)} pairs; the next look was at {following}",
            "give the gate more seconds, or fewer loads or shorter rounds",
        )
    mean, error = mean_and_error([pair.log_ratio for pair in pairs])
    spread, distance = error * math.sqrt(len(pairs)), abs(mean - plan.threshold)
    cause = (
        f"log ratios vary with a standard deviation of {spread:.3f}, and the ratio seen lies "
        f"{math.expm1(distance):.1%} from the limit"
    )
    detectable = decide(plan, [pair.log_ratio for pair in pairs]).detectable
    needed = BLOCK * math.ceil(len(pairs) * (detectable / distance) ** 2 / BLOCK) if distance else math.inf
    if needed > 100 * len(pairs):
        return cause, "the loss is practically the tolerance itself: review the tolerance"
    needed = max(needed, len(pairs) + BLOCK)
    if run.in_turns:
        return cause, "quieten the machine: what differs between two starts of one release is what varies here"
    return cause, f"lengthen the rounds (throughput_tokens), plan about {needed} pairs, or quieten the machine"

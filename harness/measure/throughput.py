"""Does speculation pay: the same prompts with and without a drafter, in alternating rounds over a ladder of loads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics as stdlib
import time
from typing import TYPE_CHECKING, Any, Protocol

from harness.errors import EvidenceError, UsageError
from harness.measure.acceptance import DEAD_ACCEPT_LENGTH
from harness.measure.endpoint import check_prompts, of_right_length
from harness.measure.load import Round, run_round
from harness.measure.partial import broken_off, in_steps
from harness.measure.statistics import POWER, mean_bounds
from harness.verdict import Finding, Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.measure.endpoint import Endpoint, Prompt

__all__ = [
    "Pair",
    "PairedRounds",
    "ThroughputRun",
    "a_comes_first",
    "check_load",
    "invalid_rounds",
    "judge",
    "measure",
    "yield_of",
]

MAX_UNEQUAL_WORK = 0.01
"""Share by which the two sides of a pair may differ in generated tokens, where outputs may end early."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two neighbouring rounds at one load, of the side that is judged and of the one it is compared with."""

    a: Round
    b: Round

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of the speed of A over that of B."""
        return math.log(self.a.tokens_per_second / self.b.tokens_per_second)


class PairedRounds(Protocol):
    """What the checks of rounds need of a measurement."""

    @property
    def max_tokens(self) -> int:
        """Tokens asked for per request."""
        ...

    @property
    def ignore_eos(self) -> bool:
        """Whether every request must get them all."""
        ...

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Every round, warm-ups included."""
        ...

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The loads that were measured."""
        ...

    def pairs(self, concurrency: int) -> tuple[Pair, ...]:
        """Return the measured pairs at `concurrency`."""
        ...


@dataclasses.dataclass(frozen=True)
class ThroughputRun:
    """Every round, warm-ups included, in the order they ran. `broken_off` says why they are not all, "" if they are."""

    spec_label: str
    plain_label: str
    spec_speculative: bool
    plain_speculative: bool
    max_tokens: int
    ignore_eos: bool
    rounds: tuple[Round, ...]
    interleaved: bool = True
    broken_off: str = ""

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The ladder, ascending."""
        return tuple(sorted({each.concurrency for each in self.rounds}))

    def pairs(self, concurrency: int) -> tuple[Pair, ...]:
        """Return the measured pairs at `concurrency`. Raises EvidenceError if a round has lost its partner."""
        sides: dict[int, dict[bool, Round]] = {}
        for each in self.rounds:
            if each.concurrency == concurrency and each.pair is not None:
                sides.setdefault(each.pair, {})[each.speculative] = each
        if any(len(side) != 2 for side in sides.values()):
            raise EvidenceError(f"a round at concurrency {concurrency} has no partner")
        return tuple(Pair(side[True], side[False]) for _, side in sorted(sides.items()))

    def as_measurements(self) -> dict[str, Any]:
        """Return every raw round as plain data for the run record."""
        return dataclasses.asdict(self) | {"rounds": [each.as_measurements() for each in self.rounds]}


def measure(
    spec_endpoint: Endpoint,
    plain_endpoint: Endpoint,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    concurrency_ladder: Sequence[int],
    rounds: int,
    interleaved: bool = True,
    keep: Callable[[ThroughputRun], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ThroughputRun:
    """Run `rounds` pairs of rounds at each load, A B B A B A A B (A with speculation), after one warm-up of each.

    `rounds` is even, so that each side comes first equally often and a steady drift of the machine cancels. Not
    `interleaved`, all of B comes before all of A, for servers that cannot run side by side: the losslessness suite
    has left B running. `keep` is given the rounds so far after each pair (not `interleaved`: after each round). Should
    a server fail after the first, they are returned, with the reason. `clock` returns seconds.
    Raises UsageError for unusable arguments, and what `Endpoint.generate` raises.
    """
    check_load(prompts, max_tokens, concurrency_ladder)
    if rounds < 2 or rounds % 2:
        raise UsageError(f"{rounds} pairs of rounds", remedy="give an even number, 2 or more: the order is A B B A")
    done: list[Round] = []

    def one_round(endpoint: Endpoint, *, speculative: bool, concurrency: int, pair: int | None) -> None:
        done.append(
            run_round(
                endpoint,
                prompts,
                max_tokens,
                speculative=speculative,
                concurrency=concurrency,
                order=len(done),
                pair=pair,
                clock=clock,
            )
        )

    def steps() -> Iterator[None]:
        both = ((spec_endpoint, True), (plain_endpoint, False))
        for sides in (both,) if interleaved else ((side,) for side in reversed(both)):
            for concurrency in concurrency_ladder:
                for endpoint, speculative in sides:
                    one_round(endpoint, speculative=speculative, concurrency=concurrency, pair=None)
                for pair in range(rounds):
                    for endpoint, speculative in sides if a_comes_first(pair) else reversed(sides):
                        one_round(endpoint, speculative=speculative, concurrency=concurrency, pair=pair)
                    yield

    def so_far(why: str) -> ThroughputRun:
        return ThroughputRun(
            spec_endpoint.label,
            plain_endpoint.label,
            spec_endpoint.speculative,
            plain_endpoint.speculative,
            max_tokens,
            prompts[0].ignore_eos,
            tuple(done),
            interleaved,
            why,
        )

    return in_steps(steps(), so_far, keep)


def check_load(prompts: Sequence[Prompt], max_tokens: int, concurrency_ladder: Sequence[int]) -> None:
    """Raise UsageError unless rounds of these prompts at these loads can be compared."""
    check_prompts(prompts, max_tokens)
    if not concurrency_ladder or min(concurrency_ladder) < 1 or len(set(concurrency_ladder)) != len(concurrency_ladder):
        raise UsageError(f"concurrency ladder {list(concurrency_ladder)}", remedy="give distinct numbers, 1 or more")
    if len({prompt.ignore_eos for prompt in prompts}) != 1:
        raise UsageError("some prompts ignore the end of sequence and some do not", remedy="make them all alike")


def a_comes_first(pair: int) -> bool:
    """Return which side of the pair with this number runs first: A B B A B A A B, and so on.

    A steady drift cancels after every second pair, one that bends after every fourth. In A B B A A B B A noise that
    lasts longer than a round would make neighbouring samples alike, and Student's t too sure (docs/judging.md).
    """
    return pair % 4 in {0, 3}


def judge(run: ThroughputRun, thresholds: Mapping[int, float], *, alpha: float = 0.05) -> Judgement:
    """Judge the speed-up at each load in `thresholds` (concurrency -> least speed-up) from all pairs of rounds.

    The logarithm of each pair's ratio is one sample, and Student's t bounds their mean. PASS where the lower bound at
    `alpha` reaches the threshold; all must, which keeps the joint error at `alpha`. FAIL where the upper bound is below
    it, at `alpha` divided by the number of thresholds, for one red load fails the whole. Else INCONCLUSIVE. Raises
    UsageError for thresholds that are missing or not positive.
    """
    if not thresholds or min(thresholds.values()) <= 0:
        raise UsageError(f"speed-up thresholds {dict(thresholds)}", remedy="give a positive number per concurrency")
    if run.broken_off:
        return Judgement("throughput", (_broken_off(run),), run.as_measurements())
    invalid = (*_plain_side(run), *invalid_rounds(run), *_measured(run, thresholds))
    if invalid:
        return Judgement("throughput", invalid, run.as_measurements())
    findings = [
        _speed_up(run, concurrency, threshold, alpha, alpha / len(thresholds))
        for concurrency, threshold in sorted(thresholds.items())
    ]
    return Judgement("throughput", (*findings, _where_it_stops(run, alpha)), run.as_measurements())


def invalid_rounds(run: PairedRounds) -> tuple[Finding, ...]:
    """Return what keeps the rounds of `run` from being compared (THR001 to THR004): nothing, if all is well."""
    return (*_speculated(run), *_equal_work(run), *_unburdened(run))


def _broken_off(run: ThroughputRun) -> Finding:
    done = {load: [each for each in run.rounds if each.concurrency == load] for load in run.concurrencies}
    return broken_off(
        "THR006",
        "the rounds",
        run.broken_off,
        expected="every round of every load",
        actual=", ".join(
            f"{sum(each.pair is not None for each in rounds)} measured rounds at concurrency {load}"
            for load, rounds in done.items()
        ),
        source=f"{run.spec_label}, {run.plain_label}",
    )


def _plain_side(run: ThroughputRun) -> Iterator[Finding]:
    """Say that a side declared speculative is not plain, even where its counters say nothing."""
    counted = any(each.counts is not None and each.counts.drafts for each in run.rounds if not each.speculative)
    if run.plain_speculative and not counted:
        yield _speculates(run.plain_label, "launched as speculative")


def _speculates(label: str, actual: str) -> Finding:
    return Finding(
        "THR002",
        Verdict.INVALID,
        f"the plain endpoint {label} speculates",
        expected="an endpoint without a drafter",
        actual=actual,
        source=label,
        cause="both endpoints are the same server, or the plain launch carries a speculation flag",
        remedy="start the plain server without any speculation flag",
    )


def _speculated(run: PairedRounds) -> Iterator[Finding]:
    """Each side must be what it claims: with speculation its counters move in every round, without it never."""
    for each in run.rounds:
        where = f"round {each.order}, concurrency {each.concurrency}"
        if each.speculative and (each.counts is None or each.counts.drafts <= 0):
            yield Finding(
                "THR001",
                Verdict.INVALID,
                f"no evidence that {each.label} speculated ({where})",
                expected="drafts counted in every round",
                actual=each.missing or f"{0 if each.counts is None else each.counts.drafts} drafts",
                source=each.label,
                cause="the speculation flags were forgotten, metrics are off, or the engine was restarted",
                remedy="check the command line of the speculative server and read its counters by hand",
            )
            break
    for each in run.rounds:
        if not each.speculative and each.counts is not None and each.counts.drafts != 0:
            yield _speculates(each.label, f"{each.counts.drafts} drafts in a round")
            break


def _equal_work(run: PairedRounds) -> Iterator[Finding]:
    for each in run.rounds:
        bad = [
            request
            for request in each.requests
            if not of_right_length(request.tokens, run.max_tokens, ignore_eos=run.ignore_eos)
        ]
        if bad:
            yield Finding(
                "THR003",
                Verdict.INVALID,
                f"{len(bad)} requests of round {each.order} on {each.label} were cut, the first is {bad[0].prompt!r}",
                expected=f"{'' if run.ignore_eos else '1 to '}{run.max_tokens} tokens",
                actual=f"{bad[0].tokens} tokens",
                source=each.label,
                cause="the context limit, a stop condition, or an aborted request",
                remedy="compare speeds on outputs of the same length; check the server's log",
            )
            return
    for pair in itertools.chain.from_iterable(run.pairs(concurrency) for concurrency in run.concurrencies):
        if abs(pair.a.tokens - pair.b.tokens) > MAX_UNEQUAL_WORK * pair.b.tokens:
            yield Finding(
                "THR003",
                Verdict.INVALID,
                f"the two sides of rounds {pair.a.order} and {pair.b.order} generated different amounts",
                expected=f"{pair.b.tokens} tokens within {MAX_UNEQUAL_WORK:.0%}, as on {pair.b.label}",
                actual=f"{pair.a.tokens} tokens on {pair.a.label}",
                source=f"{pair.a.label}, {pair.b.label}",
                cause="outputs end at different places",
                remedy="run the losslessness suite; use prompts that ignore the end of sequence",
            )
            return


def _unburdened(run: PairedRounds) -> Iterator[Finding]:
    """On neither side, at no load, may the load client have set the pace: a finding for each way in which it did.

    It did where half of a side's measured rounds say so. A stumble in fewer of them, however long, is noise, which the
    figure's interval shows: a machine that stood still for two seconds is not a client that is too slow. A round whose
    waits are not known says nothing, and one is enough.
    """
    seen = set()
    sides: dict[tuple[int, str], list[Round]] = {}
    for each in run.rounds:
        if each.pair is not None:
            sides.setdefault((each.concurrency, each.label), []).append(each)
    for (concurrency, label), rounds in sides.items():
        beyond = [(each.headroom.wait_share is None, each.headroom.limit) for each in rounds]
        limits = [limit for _, limit in beyond if limit is not None]
        unknown = [limit for unmeasured, limit in beyond if unmeasured and limit is not None]
        if not unknown and 2 * len(limits) < len(rounds):
            continue
        summary, expected, actual = (unknown or limits)[0]
        if summary in seen:
            continue
        seen.add(summary)
        yield Finding(
            "THR004",
            Verdict.INVALID,
            f"{summary} at concurrency {concurrency}",
            expected=f"{expected}, in more than half of the rounds",
            actual=f"beyond it in {len(unknown or limits)} of {len(rounds)} rounds on {label}; in the first {actual}",
            source="CPU time of the harness's process; times of each request in the client and in the kernel",
            cause="the client, not the engine, sets the pace",
            remedy="lower the concurrency, lengthen the outputs, or run the client on a core of its own",
        )


def _measured(run: ThroughputRun, thresholds: Mapping[int, float]) -> Iterator[Finding]:
    for concurrency in sorted(set(thresholds) - set(run.concurrencies)):
        yield Finding(
            "THR005",
            Verdict.INVALID,
            f"nothing was measured at concurrency {concurrency}",
            expected=f"a speed-up of at least {thresholds[concurrency]:.2f}",
            actual=f"rounds at {list(run.concurrencies)}",
            n=0,
            remedy="make the ladder and the pair's thresholds agree",
        )


def _speed_up(run: ThroughputRun, concurrency: int, threshold: float, alpha: float, alpha_fail: float) -> Finding:
    pairs = run.pairs(concurrency)
    order = (
        "A B B A B A A B" if run.interleaved else "all without speculation before all with, so a drift does not cancel"
    )
    ratios = [pair.log_ratio for pair in pairs]
    bounds = mean_bounds(ratios, alpha)
    lower, upper = math.exp(bounds.lower), math.exp(mean_bounds(ratios, alpha_fail).upper)
    speed_up = math.exp(bounds.estimate)
    # Speed-up = tokens per step x (time of a plain step / time of a speculative one). The first is counted, the second
    # is what is left. Prefill is a step on both sides, which yields one token.
    accept_length, per_step = yield_of([pair.a for pair in pairs])
    step_cost = per_step / speed_up
    cause = remedy = ""
    if lower >= threshold:
        verdict = Verdict.PASS
    elif upper < threshold:
        verdict = Verdict.FAIL
        if accept_length < DEAD_ACCEPT_LENGTH:
            cause = f"the drafter is dead (accept length {accept_length:.2f}), so every step pays for drafts in vain"
            remedy = "run the acceptance suite: it names the causes in order"
        else:
            cause = f"a step that yields {per_step:.2f} tokens takes {step_cost:.2f} times a plain step"
            remedy = (
                "if the accept length is as it was, look at what a verify step costs (K, graphs, the drafter's "
                "backend); if not, run the acceptance suite"
            )
    else:
        verdict = Verdict.INCONCLUSIVE
        distance = abs(bounds.estimate - math.log(threshold))
        needed = len(pairs) * (bounds.detectable / distance) ** 2 if distance else math.inf
        cause = (
            f"{len(pairs)} pairs that vary like these decide a difference of {math.expm1(bounds.detectable):.1%} in "
            f"{POWER:.0%} of runs; the one seen is {math.expm1(distance):.1%}"
        )
        remedy = (
            f"run about {2 * math.ceil(max(needed, len(pairs) + 1) / 2):.0f} pairs, or quieten the machine"
            if needed < 100 * len(pairs)
            else "the speed-up is practically the threshold itself: review the threshold"
        )
    return Finding(
        "THR010",
        verdict,
        f"speed-up by speculation at concurrency {pairs[0].a.concurrency}",
        expected=f"at least {threshold:.2f}x",
        actual=(
            f"{speed_up:.3f}x = {per_step:.2f} tokens per step / {step_cost:.2f} (a speculative step's time "
            f"over a plain one's); accept length {accept_length:.2f}; "
            f"{_speed(pair.a for pair in pairs):.1f} against "
            f"{_speed(pair.b for pair in pairs):.1f} tokens/s (geometric means)"
        ),
        n=len(pairs),
        interval=(lower, upper),
        source=(
            f"{len(pairs)} pairs of rounds, {order}; Student's t on log ratios, lower bound at {alpha:.1%}, upper at "
            f"{alpha_fail:.1%}"
        ),
        cause=cause,
        remedy=remedy,
    )


def yield_of(rounds: Sequence[Round]) -> tuple[float, float]:
    """Return the accept length of speculative rounds, and their delivered tokens per step, prefills counted as steps.

    A step is one request's: a pass over a batch of eight requests is eight.
    """
    counts = [each.counts for each in rounds if each.counts is not None]
    drafts, accepted = sum(each.drafts for each in counts), sum(each.accepted for each in counts)
    requests = sum(len(each.requests) for each in rounds)
    return 1.0 + accepted / drafts, sum(each.tokens for each in rounds) / (requests + drafts)


def _speed(rounds: Iterator[Round]) -> float:
    return stdlib.geometric_mean(each.tokens_per_second for each in rounds)


def _where_it_stops(run: ThroughputRun, alpha: float) -> Finding:
    """Say at which load speculation turns into a loss: a fact about the pair, not a requirement on it."""
    bounds = {
        concurrency: mean_bounds([pair.log_ratio for pair in run.pairs(concurrency)], alpha)
        for concurrency in run.concurrencies
    }
    losing = next((concurrency for concurrency, each in bounds.items() if each.upper < 0), None)
    paying = [concurrency for concurrency, each in bounds.items() if each.lower > 0]
    if losing is not None:
        summary = f"speculation stops paying at concurrency {losing}"
    elif len(paying) == len(bounds):
        summary = "speculation pays at every load measured"
    else:
        summary = "no load is shown where speculation costs more than it gives"
    return Finding(
        "THR011",
        Verdict.PASS,
        summary,
        actual=", ".join(
            f"{concurrency}: {math.exp(each.estimate):.2f}x ({math.exp(each.lower):.2f} to {math.exp(each.upper):.2f})"
            for concurrency, each in bounds.items()
        ),
        n=sum(each.n for each in bounds.values()),
        source=f"all loads of the ladder, bounds at {alpha:.1%} each",
    )

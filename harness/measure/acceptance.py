"""Are drafts accepted: counts per prompt from the engine's counters, judged by equality or against a threshold."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

from harness.errors import EvidenceError, UsageError
from harness.measure.endpoint import CounterReading, Counts, Witness, check_prompts, counted_between
from harness.measure.evidence import evidence_findings, simulated_findings
from harness.measure.partial import in_steps
from harness.measure.statistics import POWER, Bounds, ratio_bounds
from harness.verdict import Finding, Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.measure.endpoint import Counters, Endpoint, Prompt

__all__ = [
    "DEAD_ACCEPT_LENGTH",
    "DEAD_CAUSES",
    "DEAD_MIN_STEPS",
    "MIN_PROMPTS",
    "AcceptanceRun",
    "ExpectedCounts",
    "PromptRecord",
    "by_position",
    "dead_cause",
    "is_dead",
    "judge_exact",
    "judge_threshold",
    "measure",
    "more_prompts",
    "position_cause",
    "refused",
]

MIN_PROMPTS = 12
"""Prompts below which the bounds of an accept length err more often than stated (tests/measure/test_statistics.py)."""

SEED = 20_250_401
"""Seed of the bootstrap: fixed, so that one run always gets one verdict."""

DEAD_ACCEPT_LENGTH = 1.05
"""Accept length below which a drafter is called dead: a random one is right now and then, never one time in 20."""

DEAD_MIN_STEPS = 59
"""Verify steps before it is: accepted in 5 % of its steps, a drafter goes 59 without one time in 20 (0.95^59)."""

DEAD_CAUSES = (
    "1. drafter weights that never landed (decoder layer named layers.0.* or midlayer.*, missing fc or lm_head): "
    "see the weights suite; "
    "2. the drafter is fed the wrong hidden states (one layer instead of three, so that fc is bypassed; layer ids off "
    "by one): see the aux_hidden suite; "
    "3. the draft vocabulary map d2t is missing or not applied; "
    "4. the drafter belongs to another target, revision, quantisation or chat template; "
    "5. norm or rotary settings of the drafter's config are not those it was trained with"
)

_POLL_S = 0.02


class ExpectedCounts(Protocol):
    """What an oracle says about one prompt. `harness.measure.endpoint.Counts` is one."""

    @property
    def drafts(self) -> int:
        """Verify steps."""
        ...

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        ...

    @property
    def per_position(self) -> tuple[int, ...]:
        """Steps that accepted each position, K entries."""
        ...


@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """One request and what the counters said about it."""

    name: str
    ignore_eos: bool
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    counts: Counts

    @property
    def tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids)

    @property
    def surplus(self) -> int:
        """Tokens counted but not delivered: 1 (prefill) + drafts + accepted - generated; 0 to K if all is well."""
        return 1 + self.counts.drafts + self.counts.accepted - self.tokens


@dataclasses.dataclass(frozen=True)
class AcceptanceRun:
    """Raw counts of one endpoint.

    `missing` says why there are no counts, or none from some prompt on; `broken_off` why prompts were not answered.
    """

    label: str
    speculative: bool
    k: int
    max_tokens: int
    prompts: tuple[PromptRecord, ...]
    source: str
    missing: str = ""
    witnesses: tuple[Witness, ...] = ()
    broken_off: str = ""

    @property
    def totals(self) -> Counts:
        """The sum over all prompts."""
        counts = [record.counts for record in self.prompts]
        return Counts(
            sum(each.drafts for each in counts),
            sum(each.draft_tokens for each in counts),
            sum(each.accepted for each in counts),
            tuple(map(sum, zip(*(each.per_position for each in counts), strict=True))),
        )

    @property
    def tokens(self) -> int:
        """How many tokens were generated in all."""
        return sum(record.tokens for record in self.prompts)

    def as_measurements(self) -> dict[str, Any]:
        """Return the raw counts as plain data for the run record, without the token ids."""
        return {
            "label": self.label,
            "k": self.k,
            "max_tokens": self.max_tokens,
            "source": self.source,
            "missing": self.missing,
            **({"broken_off": self.broken_off} if self.broken_off else {}),
            "totals": dataclasses.asdict(self.totals),
            "witnesses": [{**dataclasses.asdict(each), "agrees": each.agrees} for each in self.witnesses],
            "prompts": [
                {
                    "name": record.name,
                    "tokens": record.tokens,
                    "finish_reason": record.finish_reason,
                    "seconds": record.seconds,
                    **dataclasses.asdict(record.counts),
                }
                for record in self.prompts
            ],
        }


def measure(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    max_tokens: int,
    k: int,
    *,
    settle_s: float = 5.0,
    keep: Callable[[AcceptanceRun], None] = lambda _: None,
) -> AcceptanceRun:
    """Send `prompts` one at a time and difference the counters around each, so that every count has its prompt.

    Whatever else is counted between two readings lands on a prompt, where the accounting of its tokens shows it. An
    engine may answer before it counts, so a reading waits until the answer is accounted for, at most `settle_s` seconds
    in all. Missing counters are recorded, not raised. `keep` is given the counts so far after each prompt. Should the
    server fail after the first, they are returned, with the reason. Raises UsageError for unusable arguments, and what
    `Endpoint.generate` raises.
    """
    check_prompts(prompts, max_tokens)
    if k < 1:
        raise UsageError(f"K is {k}: a drafter proposes at least one token per step")
    reading = CounterReading.of(endpoint)
    source = reading.counters.source if reading.counters else ""
    records: list[PromptRecord] = []
    missing = reading.missing
    witnesses: tuple[Witness, ...] = ()

    def steps() -> Iterator[None]:
        nonlocal reading, missing, witnesses
        patience = settle_s
        for prompt in prompts:
            before = reading.counters
            if before is None:
                return
            answer = endpoint.generate(prompt, max_tokens)
            began = time.monotonic()
            reading = _settled(endpoint, before, len(answer.token_ids), began + patience)
            patience = max(0.0, patience - (time.monotonic() - began))
            counts, missing = counted_between(CounterReading(before), reading)
            if counts is None:
                return
            records.append(
                PromptRecord(
                    prompt.name, prompt.ignore_eos, answer.token_ids, answer.finish_reason, answer.seconds, counts
                )
            )
            yield
        try:
            witnesses = endpoint.witnesses()
        except EvidenceError as error:
            missing = error.message

    def so_far(why: str) -> AcceptanceRun:
        return AcceptanceRun(
            endpoint.label, endpoint.speculative, k, max_tokens, tuple(records), source, missing, witnesses, why
        )

    return in_steps(steps(), so_far, keep)


def _settled(endpoint: Endpoint, before: Counters, tokens: int, deadline: float) -> CounterReading:
    """Read the counters until they account for `tokens` generated since `before`, or until `deadline`."""
    while True:
        reading = CounterReading.of(endpoint)
        now = reading.counters
        if now is None or time.monotonic() >= deadline:
            return reading
        # Backwards is as final as enough: more waiting would hide a restart behind later traffic.
        if now.drafts < before.drafts or 1 + now.drafts - before.drafts + now.accepted - before.accepted >= tokens:
            return reading
        time.sleep(_POLL_S)


def judge_exact(run: AcceptanceRun, oracle: Mapping[str, ExpectedCounts]) -> Judgement:
    """Compare every count of every prompt with an oracle, keyed by prompt name: a canary's acceptance is an equality.

    FAIL names the first prompt that differs, and the first position that is accepted too rarely.
    """
    evidence = evidence_findings(run)
    if refused(evidence):
        return Judgement("acceptance", evidence, run.as_measurements())
    truth = {
        name: {"drafts": counts.drafts, "accepted": counts.accepted, "per_position": tuple(counts.per_position)}
        for name, counts in oracle.items()
    }
    return Judgement("acceptance", (*evidence, _exact(run, oracle)), run.as_measurements() | {"oracle": truth})


def _exact(run: AcceptanceRun, oracle: Mapping[str, ExpectedCounts]) -> Finding:
    names = {record.name for record in run.prompts}
    if names != set(oracle):
        return Finding(
            "ACC021",
            Verdict.INVALID,
            "the prompts that ran are not the oracle's",
            expected=", ".join(sorted(oracle)) or "none",
            actual=", ".join(sorted(names)),
            source=run.source,
            remedy="run every prompt of the oracle, and no other",
        )
    wrong = [
        (record, oracle[record.name]) for record in run.prompts if _plain(record.counts) != _plain(oracle[record.name])
    ]
    totals = run.totals
    if not wrong:
        return Finding(
            "ACC020",
            Verdict.PASS,
            "every count equals the oracle's on every prompt",
            expected=_exact_text(totals),
            actual=_exact_text(totals),
            n=totals.drafts,
            source=run.source,
        )
    first, expected = wrong[0]
    return Finding(
        "ACC020",
        Verdict.FAIL,
        f"{len(wrong)} of {len(run.prompts)} prompts differ from the oracle, the first is {first.name!r}",
        expected=_exact_text(expected),
        actual=_exact_text(first.counts),
        n=totals.drafts,
        source=run.source,
        cause=dead_cause(run) if is_dead(run) else _where(first.counts, expected),
        remedy="run the weights and aux_hidden suites on this pair: they name the tensor or the layer",
    )


def _plain(counts: ExpectedCounts) -> tuple[int, int, tuple[int, ...]]:
    return counts.drafts, counts.accepted, tuple(counts.per_position)


def _exact_text(counts: ExpectedCounts) -> str:
    return f"{counts.drafts} drafts, {counts.accepted} accepted, per position {list(counts.per_position)}"


def _where(counts: ExpectedCounts, expected: ExpectedCounts) -> str:
    """Say what the first draft position that differs in rate points to; position 0 is fed by the target itself."""
    pairs = itertools.zip_longest(counts.per_position, expected.per_position, fillvalue=0)
    for position, (seen, wanted) in enumerate(pairs):
        if seen * expected.drafts < wanted * counts.drafts:
            return position_cause(position)
    return (
        "no position is accepted too rarely: more is accepted than the drafter can know, or steps are counted otherwise"
    )


def position_cause(position: int) -> str:
    """Say what the first draft position that is accepted too rarely points to."""
    if position == 0:
        return "position 0 is accepted too rarely: what the target feeds the drafter, or its weights, are off"
    return (
        f"positions before {position} are as expected, {position} is accepted too rarely: the drafter's own "
        "output, fed back from step to step, is off (rounding, cache slots, rotary positions)"
    )


def judge_threshold(run: AcceptanceRun, minimum: float, *, alpha: float = 0.05, seed: int = SEED) -> Judgement:
    """Judge the accept length, 1 + accepted / drafts, against `minimum` with one-sided bounds at `alpha` each.

    PASS if the lower bound reaches `minimum`, FAIL if the upper bound is below it, INCONCLUSIVE between, with what
    could have been decided. A drafter of which practically nothing is accepted is FAIL whatever the interval. Raises
    UsageError for a `minimum` that no drafter could miss or reach.
    """
    if not 1.0 < minimum <= run.k + 1:
        raise UsageError(
            f"a minimum accept length of {minimum} for K = {run.k}",
            remedy=f"give a number above 1 (nothing accepted) and at most K + 1 = {run.k + 1} (everything accepted)",
        )
    evidence = evidence_findings(run)
    if not refused(evidence):
        evidence = (*evidence, *simulated_findings(run))
    if refused(evidence):
        return Judgement("acceptance", evidence, run.as_measurements())
    if is_dead(run) and run.totals.accept_length < minimum:
        return Judgement("acceptance", (*evidence, _dead(run, minimum)), run.as_measurements())
    stepped = [record.counts for record in run.prompts if record.counts.drafts]
    if len(stepped) < MIN_PROMPTS:
        return Judgement("acceptance", (*evidence, _too_few(run, minimum, len(stepped))), run.as_measurements())
    bounds = ratio_bounds([c.accepted for c in stepped], [c.drafts for c in stepped], alpha=alpha, seed=seed)
    # No accept length lies outside 1 to K + 1, so neither does a bound.
    lower, upper = (min(max(1.0 + bound, 1.0), run.k + 1.0) for bound in (bounds.lower, bounds.upper))
    measurements = run.as_measurements() | {
        "accept_length": dataclasses.asdict(bounds)
        | {"estimate": 1.0 + bounds.estimate, "lower": lower, "upper": upper},
        "minimum": minimum,
    }
    return Judgement("acceptance", (*evidence, _threshold(run, minimum, bounds, (lower, upper))), measurements)


def _threshold(run: AcceptanceRun, minimum: float, bounds: Bounds, interval: tuple[float, float]) -> Finding:
    lower, upper = interval
    estimate = 1.0 + bounds.estimate
    if lower >= minimum:
        verdict, cause, remedy = Verdict.PASS, "", ""
    elif upper < minimum:
        verdict = Verdict.FAIL
        cause = f"acceptance by position, given the one before: {by_position(run.totals)}"
        remedy = "compare the positions with the last good run; run the weights and aux_hidden suites on this pair"
    else:
        verdict = Verdict.INCONCLUSIVE
        cause = (
            f"{bounds.n} prompts like these decide a difference of {bounds.detectable:.2f} in {POWER:.0%} of runs; "
            f"the one seen is {abs(estimate - minimum):.2f}"
        )
        remedy = more_prompts(bounds, abs(estimate - minimum))
    return Finding(
        "ACC030",
        verdict,
        f"accept length of {run.label}",
        expected=f"at least {minimum:.2f}",
        actual=f"{estimate:.3f} at K = {run.k} (by position, given the one before: {by_position(run.totals)})",
        n=bounds.n,
        interval=interval,
        source=f"{run.source}; {bounds.method}, each bound at {bounds.alpha:.0%}",
        cause=cause,
        remedy=remedy,
    )


def more_prompts(bounds: Bounds, distance: float) -> str:
    """Return how many prompts would have decided, for a truth as far from the threshold as what was seen."""
    needed = bounds.n * (bounds.detectable / distance) ** 2 if distance > 0 else float("inf")
    if needed > 100 * bounds.n:
        return "the accept length is practically the threshold itself: review the threshold"
    return f"use about {max(needed, bounds.n + 1):.0f} prompts, or review the threshold"


def _too_few(run: AcceptanceRun, minimum: float, n: int) -> Finding:
    return Finding(
        "ACC030",
        Verdict.INCONCLUSIVE,
        f"too few prompts to judge the accept length of {run.label}",
        expected=f"at least {minimum:.2f}, from {MIN_PROMPTS} prompts or more",
        actual=f"{run.totals.accept_length:.3f}, from {n}",
        n=n,
        source=run.source,
        cause="prompts differ more than steps within one, so they are the samples",
        remedy=f"use at least {MIN_PROMPTS} prompts; more tokens per prompt do not replace them",
    )


def is_dead(run: AcceptanceRun) -> bool:
    """Return whether practically nothing was accepted, in enough steps to say so."""
    return run.totals.drafts >= DEAD_MIN_STEPS and run.totals.accept_length < DEAD_ACCEPT_LENGTH


def _dead(run: AcceptanceRun, minimum: float) -> Finding:
    return Finding(
        "ACC031",
        Verdict.FAIL,
        "the drafter is dead: practically no draft token is accepted",
        expected=f"accept length of at least {minimum:.2f}",
        actual=_exact_text(run.totals),
        n=run.totals.drafts,
        source=run.source,
        cause=dead_cause(run),
        remedy="run the weights suite, then the aux_hidden suite: they look at causes 1 to 3 in the running engine",
    )


def dead_cause(run: AcceptanceRun) -> str:
    """Return what a dead drafter looks like in the engine's log, and what may have killed it, in the order to look."""
    # SGLang's logged rate counted the target's own token up to 0.5.10.post1; see harness/diagnose/acceptance.py.
    length, k = run.totals.accept_length, run.k
    return (
        f"accept length {length:.2f} (in SGLang's log: accept len: {length:.2f}, accept rate: {(length - 1) / k:.2f}; "
        f"up to 0.5.10.post1 accept rate: {length / (k + 1):.2f}, where 1/(K+1) = {1 / (k + 1):.2f} is zero drafts "
        "accepted). "
        f"In the order to look: {DEAD_CAUSES}"
    )


def by_position(totals: Counts) -> str:
    """Return the acceptance rate at each position among the steps that accepted the one before."""
    reached = (totals.drafts, *totals.per_position)
    rates = [f"{now / then:.2f}" if then else "-" for then, now in itertools.pairwise(reached)]
    return "[" + ", ".join(rates) + "]"


def refused(findings: tuple[Finding, ...]) -> bool:
    """Return whether evidence was found wanting, so that no number may be judged on it."""
    return any(finding.verdict is not Verdict.PASS for finding in findings)

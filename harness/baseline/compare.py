"""A measurement against its baseline: pure judgements, with the uncertainty of both.

The promise is that nothing has become worse by more than a tolerance (`ACCEPTANCE_TOLERANCE`, `SPEED_TOLERANCE`): PASS
where the lower bound of now / then reaches 1 - tolerance, FAIL where the upper bound is below it, INCONCLUSIVE between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import harness
from harness.baseline import measured, text
from harness.baseline.model import Acceptance, Baseline, CaseFacts, Throughput
from harness.errors import EvidenceError, HarnessError
from harness.measure.acceptance import MIN_PROMPTS, SEED, by_position
from harness.measure.change import ACCEPTANCE_TOLERANCE
from harness.measure.endpoint import Counts
from harness.measure.sequential import ALPHA
from harness.measure.statistics import (
    POWER,
    Bounds,
    mean_and_error,
    minimum_detectable_effect,
    paired_bounds,
    t_quantile,
)
from harness.verdict import Finding, Judgement, Verdict, some

__all__ = [
    "SPEED_TOLERANCE",
    "accept_change",
    "hold",
    "judge_acceptance",
    "judge_throughput",
    "mismatch",
    "speed_change",
]

SPEED_TOLERANCE = 0.10
"""Share by which the speed-up may fall. Runs of different days differ by more than the rounds of one do."""

_BLESS = "run the suites and bless the run: `draftgate bless RUN --yes`"


def accept_change(
    then: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]], *, tolerance: float, alpha: float
) -> Bounds:
    """Return bounds for accept length now / then, from counts per prompt as `Acceptance` has them.

    Both sides ran the same prompts, so that prompts are drawn in pairs: what makes one prompt easier than another is
    common to both and cancels, and what is left holds the uncertainty of both. The bounds are made to be compared with
    1 - `tolerance`.
    """

    def tokens_and_steps(counts: Mapping[str, Sequence[int]]) -> tuple[list[int], list[int]]:
        return [sum(counts[name]) for name in then], [counts[name][0] for name in then]

    return paired_bounds(tokens_and_steps(now), tokens_and_steps(then), factor=1.0 - tolerance, alpha=alpha, seed=SEED)


def speed_change(then: Sequence[float], now: Sequence[float], *, alpha: float) -> Bounds:
    """Return bounds for speed-up now / then, from the logarithms of each.

    Welch's t, its degrees of freedom rounded down. `detectable` is a share.
    """
    (before, error_then), (after, error_now) = mean_and_error(then), mean_and_error(now)
    error = math.hypot(error_then, error_now)
    spread = error_then**4 / (len(then) - 1) + error_now**4 / (len(now) - 1)
    least = min(len(then), len(now)) - 1
    dof = max(least, math.floor(error**4 / spread)) if spread else least
    change, half = after - before, t_quantile(1.0 - alpha, dof) * error
    return Bounds(
        math.exp(change),
        math.exp(change - half),
        math.exp(change + half),
        alpha,
        len(then) + len(now),
        math.expm1(minimum_detectable_effect(error, dof, alpha)),
        f"Welch's t on logarithms, {dof} degrees of freedom",
    )


def _verdict(lower: float, upper: float, tolerance: float) -> Verdict:
    if lower >= 1.0 - tolerance:
        return Verdict.PASS
    return Verdict.FAIL if upper < 1.0 - tolerance else Verdict.INCONCLUSIVE


def _undecided(bounds: Bounds, samples: str, tolerance: float) -> str:
    return (
        f"{samples} that vary like these decide {bounds.detectable:.1%} from the limit of {-tolerance:.1%} in "
        f"{POWER:.0%} of runs; the change seen is {bounds.estimate - 1:+.1%}"
    )


def judge_acceptance(
    baseline: Acceptance, counts: Mapping[str, Sequence[int]], *, differs: Sequence[str] = (), source: str = ""
) -> Finding:
    """Hold counts per prompt against those of a baseline: equality for a canary, else the accept length.

    `differs` names what else is different from the baseline's run, for the likely cause; `source` is the file.
    """
    shapes, expected = ({name: len(row) for name, row in each.items()} for each in (counts, baseline.counts))
    if shapes != expected:
        return Finding(
            "BAS002",
            Verdict.INVALID,
            "the prompts or positions that were counted are not the baseline's",
            expected=some(sorted(baseline.counts), 20),
            actual=some(sorted(counts), 20),
            source=source,
            remedy="run all prompts of the pair, or bless a run that does",
        )
    then, now = _totals(baseline.counts), _totals(counts)
    if baseline.exact:
        return _exact(baseline, counts, differs, source)
    stepped = sum(row[0] > 0 for row in counts.values())
    if stepped < MIN_PROMPTS:
        return Finding(
            "BAS011",
            Verdict.INCONCLUSIVE,
            "too few prompts to hold the accept length against the baseline",
            expected=f"{MIN_PROMPTS} prompts or more",
            actual=str(stepped),
            n=stepped,
            source=source,
            remedy=f"use at least {MIN_PROMPTS} prompts, and bless a run with them",
        )
    bounds = accept_change(baseline.counts, counts, tolerance=ACCEPTANCE_TOLERANCE, alpha=ALPHA)
    verdict = _verdict(bounds.lower, bounds.upper, ACCEPTANCE_TOLERANCE)
    cause = remedy = ""
    if verdict is Verdict.FAIL:
        cause = _different(differs)
        remedy = "run the weights and aux_hidden suites; if it is meant to be so, bless this pair anew"
    elif verdict is Verdict.INCONCLUSIVE:
        cause = _undecided(bounds, f"{bounds.n} prompts", ACCEPTANCE_TOLERANCE)
        remedy = "use more prompts, and bless a run with them"
    length = then.accept_length
    return Finding(
        "BAS011",
        verdict,
        f"accept length against the baseline: {bounds.estimate - 1:+.1%}",
        expected=f"at least {1 - ACCEPTANCE_TOLERANCE:.0%} of {length:.3f} (by position, given the one before: "
        f"{by_position(then)})",
        actual=f"{now.accept_length:.3f} (by position, given the one before: {by_position(now)}), change between "
        f"{bounds.lower - 1:+.1%} and {bounds.upper - 1:+.1%}",
        n=bounds.n,
        interval=(length * bounds.lower, length * bounds.upper),
        source=f"{source}; {bounds.method}, each bound at {ALPHA:.0%}",
        cause=cause,
        remedy=remedy,
    )


def _totals(counts: Mapping[str, Sequence[int]]) -> Counts:
    drafts, *positions = (int(total) for total in np.sum(list(counts.values()), axis=0))
    return Counts(drafts, drafts * len(positions), sum(positions), tuple(positions))


def _exact(baseline: Acceptance, counts: Mapping[str, Sequence[int]], differs: Sequence[str], source: str) -> Finding:
    wrong = [name for name in sorted(counts) if list(counts[name]) != list(baseline.counts[name])]
    first = wrong[0] if wrong else min(counts)
    return Finding(
        "BAS010",
        Verdict.FAIL if wrong else Verdict.PASS,
        f"{len(wrong)} of {len(counts)} prompts differ from the baseline, the first is {first!r}"
        if wrong
        else "every count equals the baseline's on every prompt",
        expected=f"{first}: [verify steps, accepted by position] {list(baseline.counts[first])}",
        actual=f"{first}: {list(counts[first])}",
        n=len(counts),
        source=source,
        cause=_different(differs) if wrong else "",
        remedy="read the finding of the oracle (ACC020); a canary's counts do not change by chance" if wrong else "",
    )


def _different(differs: Sequence[str]) -> str:
    if not differs:
        return "the engine, its packages, its arguments and the machine are those of the baseline"
    return f"different from the baseline's run: {some(differs, 12)}"


def judge_throughput(
    baseline: Throughput | None, now: Throughput, *, differs: Sequence[str] = (), source: str = ""
) -> Iterator[Finding]:
    """Hold the speed-up at each concurrency against a baseline's. The other arguments are as in `judge_acceptance`.

    All loads must pass, which keeps a wrong PASS at `ALPHA`; one red load fails the whole, so that an upper bound errs
    with `ALPHA` divided by their number.
    """
    if baseline is None:
        yield _unmatched("the baseline has no speed-up, and this run measures one", "a speed-up", "none", source)
        return
    if told := now.differences(baseline):
        yield _unlike(told, source)
        return
    then_loads, now_loads = baseline.log_ratios.keys(), now.log_ratios.keys()
    for load in sorted(now_loads ^ then_loads):
        whose = "the baseline" if load in now_loads else "this run"
        yield _unmatched(
            f"{whose} has nothing at concurrency {load}", str(sorted(then_loads)), str(sorted(now_loads)), source
        )
    both = sorted(now_loads & then_loads)
    for load in both:
        yield _speed(load, baseline.log_ratios[load], now.log_ratios[load], ALPHA / len(both), differs, source)


def _speed(
    load: int, then: Sequence[float], now: Sequence[float], alpha_fail: float, differs: Sequence[str], source: str
) -> Finding:
    bounds = speed_change(then, now, alpha=ALPHA)
    upper = speed_change(then, now, alpha=alpha_fail).upper
    verdict = _verdict(bounds.lower, upper, SPEED_TOLERANCE)
    cause = remedy = ""
    if verdict is Verdict.FAIL:
        cause = _different(differs)
        remedy = "if the accept length is as it was, a verify step costs more; if not, look at the acceptance suite"
    elif verdict is Verdict.INCONCLUSIVE:
        cause = _undecided(bounds, f"{len(then)} and {len(now)} pairs of rounds", SPEED_TOLERANCE)
        remedy = "run more rounds, or quieten the machine"
    before, after = (math.exp(float(np.mean(values))) for values in (then, now))
    return Finding(
        "BAS020",
        verdict,
        f"speed-up at concurrency {load} against the baseline: {bounds.estimate - 1:+.1%}",
        expected=f"at least {1 - SPEED_TOLERANCE:.0%} of {before:.3f}x",
        actual=f"{after:.3f}x, change between {bounds.lower - 1:+.1%} and {upper - 1:+.1%}",
        n=bounds.n,
        interval=(before * bounds.lower, before * upper),
        source=f"{source}; {bounds.method}, lower bound at {ALPHA:.1%}, upper at {alpha_fail:.1%}",
        cause=cause,
        remedy=remedy,
    )


def _unmatched(summary: str, expected: str, actual: str, source: str) -> Finding:
    return Finding("BAS021", Verdict.INVALID, summary, expected=expected, actual=actual, source=source, remedy=_BLESS)


def mismatch(baseline: CaseFacts, now: CaseFacts, source: str) -> Finding | None:
    """Return why a baseline cannot be compared with a case at all, with both values; None if it can."""
    told = now.differences(baseline)
    return _unlike(told, source) if told else None


def _unlike(told: Sequence[str], source: str) -> Finding:
    return Finding(
        "BAS002",
        Verdict.INVALID,
        f"the baseline is of something else: {'; '.join(told)}",
        source=source,
        cause="it was blessed for another case than the one that runs (the baseline's value stands first)",
        remedy=f"compare like with like, or {_BLESS}, with --replace where it is the successor",
    )


def hold(judgement: Judgement, folder: Path, case: Mapping[str, Any]) -> Judgement:
    """Return a judgement of the acceptance or throughput suite with the findings against the case's baseline added.

    `case` is what the record says of it, with the run's machine (`RunFolder.read_case`). Figures that were found
    INVALID are not compared; other suites are returned as they are. A baseline that cannot be read any more, or figures
    that cannot be held against it, are a finding: what was measured is not lost by it.
    """
    judged: dict[str, Callable[..., Iterator[Finding]]] = {"acceptance": _acceptance, "throughput": _throughput}
    if judgement.suite not in judged or any(each.verdict is Verdict.INVALID for each in judgement.findings):
        return judgement
    findings = list(judgement.findings)
    try:
        findings.extend(_against(judgement, folder, case, judged[judgement.suite]))
    except (HarnessError, OSError) as error:
        why, remedy = (error.message, error.remedy) if isinstance(error, HarnessError) else (str(error), "")
        findings.append(
            Finding(
                "BAS003",
                Verdict.INVALID,
                f"could not be held against the baseline: {why}",
                source="--baseline",
                cause="the folder or a file of it was changed while the run went on, or the figures are incomplete",
                remedy=remedy or "see that the baselines can be read, and run the suites again",
            )
        )
    return Judgement(judgement.suite, tuple(findings), judgement.measurements)


def _against(
    judgement: Judgement,
    folder: Path,
    case: Mapping[str, Any],
    judge: Callable[..., Iterator[Finding]],
) -> Iterator[Finding]:
    try:
        facts = measured.case_facts(case, case["machine"])
    except EvidenceError as error:
        yield Finding("BAS002", Verdict.INVALID, error.message, remedy=error.remedy, source="the run's machine")
        return
    path = text.path_of(folder, facts)
    if not path.exists():
        yield _missing(folder, path, facts)
        return
    baseline = text.read(path)
    if (unlike := mismatch(baseline.case, facts, path.name)) is not None:
        yield unlike
        return
    run = {"machine": case["machine"], "draftgate": harness.__version__}
    differs = measured.provenance(run, case, "").differences(baseline.provenance)
    yield from judge(baseline, judgement.measurements, case, differs, path.name)


def _missing(folder: Path, path: Path, facts: CaseFacts) -> Finding:
    """Say that a case has no baseline, or whose there is."""
    there = text.read_all(folder)
    for other, near in ((other, baseline.case) for other, baseline in there.items()):
        if (near.pair, near.engine, near.runner) == (facts.pair, facts.engine, facts.runner):
            return _unlike(facts.differences(near), other.name)
    return Finding(
        "BAS001",
        Verdict.INVALID,
        f"there is no baseline of {facts.pair} on {facts.engine}, runner {facts.runner}, {facts.device}",
        expected=path.name,
        actual=some([each.name for each in there], 6) or "no baseline at all",
        source="--baseline",
        remedy=_BLESS,
    )


def _acceptance(
    baseline: Baseline, data: Mapping[str, Any], case: Mapping[str, Any], differs: Sequence[str], source: str
) -> Iterator[Finding]:
    yield judge_acceptance(baseline.acceptance, measured.accept_counts(data), differs=differs, source=source)
    why = case.get("not_asked", {}).get("throughput")
    if why and baseline.throughput is not None:
        # The throughput suite does not run, so that nobody else would say that its baseline was not looked at.
        yield _unmatched("the baseline has a speed-up, and this run does not measure it", "a speed-up", why, source)


def _throughput(
    baseline: Baseline, data: Mapping[str, Any], case: Mapping[str, Any], differs: Sequence[str], source: str
) -> Iterator[Finding]:
    now = Throughput.of(measured.log_ratios(data), **measured.throughput_work(case))
    yield from judge_throughput(baseline.throughput, now, differs=differs, source=source)

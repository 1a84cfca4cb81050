"""Whether each of the engine's acceptance figures means what is written of it for this release."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness.measure.endpoint import SEVERAL, Counts, Said
from harness.metrics.meaning import LOGGED, lines_of, meanings, of_steps
from harness.metrics.measure import MetricsRun
from harness.metrics.truth import Answered, whole
from harness.verdict import Finding, Judgement, Verdict

__all__ = ["Contract", "Known", "contract", "judge"]

SUITE = "metrics"

CONTRACT = Path(__file__).with_name("contract.toml")


@dataclasses.dataclass(frozen=True)
class Known:
    """What is written of one figure: its meaning ("scope: formula"), and what to beware of, "" if nothing."""

    meaning: str
    beware: str = ""


@dataclasses.dataclass(frozen=True)
class Contract:
    """What is written of the figures of the releases `first` to `last` of an engine."""

    engine: str
    first: str
    last: str
    figures: Mapping[str, Known]

    def covers(self, version: str) -> bool:
        """Whether the figures were looked at in this release, or in ones before and after it."""
        try:
            public = Version(Version(version).public)  # a local build of a release is that release
        except InvalidVersion:
            return False
        return Version(self.first) <= public <= Version(self.last)


@functools.cache
def _contracts() -> tuple[Contract, ...]:
    rows = tomllib.loads(CONTRACT.read_text(encoding="utf-8"))["contracts"]
    return tuple(
        Contract(
            row["engine"],
            row["first"],
            row["last"],
            {each["name"]: Known(each["meaning"], each.get("beware", "")) for each in row["figures"]},
        )
        for row in rows
    )


def contract(engine: str, version: str) -> Contract | None:
    """Return what is written for a release, or for the nearest of the engine's; None if nothing is for the engine."""
    rows = [row for row in _contracts() if row.engine == engine]
    if not rows:
        return None
    try:
        wanted = Version(version)
    except InvalidVersion:
        return rows[-1]
    for row in rows:
        if row.covers(version):
            return row
    older = [row for row in rows if Version(row.last) < wanted]
    return older[-1] if older else rows[0]


def judge(run: MetricsRun, held_to: Contract, version: str) -> Judgement:
    """Judge every figure that `held_to` has, and name what there is beside.

    PASS if it can mean what is written; FAIL if it is gone, or means something else, which is named where it can be;
    INCONCLUSIVE if it was not seen often enough. INVALID (and nothing else) where what happened is not known: outputs
    that are not the canary's, or acceptance that is not.
    """
    measurements = run.as_measurements() | {"contract": {"first": held_to.first, "last": held_to.last}}
    if invalid := tuple(_unknown_truth(run)):
        return Judgement(SUITE, invalid, measurements)
    can_mean = meanings(run.k, run.requests, run.readings, every=run.every) | lines_of(
        run.k,
        run.requests,
        run.lines,
        {name: each.meaning for name, each in held_to.figures.items() if name.startswith(LOGGED)},
        every=run.every,
    )
    wrong = [
        (name, each)
        for name, known in held_to.figures.items()
        if (each := _figure(run, name, known, can_mean.get(name), held_to)) is not None
    ]
    red = {name for name, _ in wrong}
    held = [name for name in held_to.figures if name not in red]
    disagree = _acceptance(run)
    vouching = [name for name in held if not name.startswith(LOGGED) and of_steps(held_to.figures[name].meaning)]
    if disagree and not vouching:
        # Not one figure is of what should have been accepted: it is acceptance that is another.
        return Judgement(SUITE, (disagree,), measurements)
    measurements["can_mean"] = {name: list(each) for name, each in sorted(can_mean.items())}
    source = f"{len(run.requests)} requests of a canary, whose verify steps are known; {CONTRACT.name} "
    source += f"{held_to.engine} {held_to.first} to {held_to.last}"
    if not held_to.covers(version):
        source += f", the nearest to {version}, of which nothing is written"
    findings = [finding for _, finding in wrong]
    if disagree and all(name.startswith(LOGGED) for name in red):
        findings.append(disagree)  # figures agree with what happened, and what is read for the suites does not
    if held:
        findings.append(
            Finding(
                "MET010",
                Verdict.PASS,
                f"{len(held)} acceptance figures of {run.label} mean what is written of them",
                actual="; ".join(
                    f"{name}: {held_to.figures[name].meaning}"
                    + (f" (beware: {held_to.figures[name].beware})" if held_to.figures[name].beware else "")
                    for name in held
                ),
                n=len(run.requests),
                source=source,
            )
        )
    if more := sorted(can_mean.keys() - held_to.figures.keys()):
        findings.append(
            Finding(
                "MET013",
                Verdict.PASS,
                f"{len(more)} further figures of {run.label}, of which nothing is written",
                actual="; ".join(f"{name}: {' or '.join(can_mean[name]) or _odd(run, name)}" for name in more),
                n=len(run.requests),
                source=source,
                remedy=f"write down in {CONTRACT.name} what a dashboard may rest on",
            )
        )
    return Judgement(SUITE, tuple(findings), measurements)


def _unknown_truth(run: MetricsRun) -> Iterator[Finding]:
    if run.wrong:
        yield Finding(
            "MET001",
            Verdict.INVALID,
            f"{len(run.wrong)} outputs are not the canary's, the first is that of {run.wrong[0]!r}",
            expected="the outputs that the canary's arithmetic gives, so that what happened is known",
            actual=", ".join(run.wrong),
            n=len(run.requests),
            source=run.label,
            cause="the target or the verification is wrong, or the engine ends outputs elsewhere",
            remedy="run the losslessness and acceptance suites",
        )
    places = {name.split(" ", 1)[0] for name in run.readings}
    for place in sorted(places):
        readings = [said[1:] for name, said in run.readings.items() if name.startswith(f"{place} ")]
        empty = [number for number, each in enumerate(zip(*readings, strict=True), start=1) if not any(each)]
        if 0 < len(empty) < len(run.requests):
            yield Finding(
                "MET002",
                Verdict.INVALID,
                f"{place} of {run.label} showed no acceptance figure at {len(empty)} of {len(run.requests)} readings",
                expected="the same figures after each request",
                actual=f"none after request {', '.join(map(str, empty))}",
                n=len(run.requests),
                source=run.label,
                cause="a page that was cut or came from another process, or answers without their figures",
                remedy="run the suite again; if it stays, read the page by hand while the server works",
            )
    if not run.readings and not run.lines:
        yield Finding(
            "MET002",
            Verdict.INVALID,
            f"{run.label} shows no acceptance figure at all",
            expected="figures on its pages, in its answers and in its log",
            actual="none",
            n=0,
            source=run.label,
            cause="metrics are switched off, or the server does not speculate",
            remedy="check the launch flags; run the acceptance suite",
        )


def _acceptance(run: MetricsRun) -> Finding | None:
    """Say that the adapter's own counters are not those of what should have happened."""
    truth = whole(run.k, run.requests)
    expected = Counts(truth.drafts, run.k * truth.drafts, truth.accepted, truth.per_position)
    if run.counts == expected:
        return None
    return Finding(
        "MET003",
        Verdict.INVALID,
        f"acceptance on {run.label} is not the canary's, so its figures cannot be held against it",
        expected=str(expected),
        actual=run.missing or str(run.counts),
        n=truth.drafts,
        source=run.label,
        cause="the drafter does not do what its weights say, or several figures have changed their meaning at once",
        remedy="run the acceptance suite: it names the causes in order",
    )


def _figure(
    run: MetricsRun, name: str, known: Known, can_mean: tuple[str, ...] | None, held_to: Contract
) -> Finding | None:
    """Return what is wrong with a figure, None if nothing is."""
    where = f"{held_to.engine} {held_to.first} to {held_to.last}"
    if (absent := _absent(run, name, known, where)) is not None:
        return absent
    if can_mean and known.meaning in can_mean:
        return None
    said = [_shown(each.value) for each in _said(run, name) if each is not None]
    return Finding(
        "MET011",
        Verdict.FAIL,
        f"{name} does not mean what it meant",
        expected=f"{known.meaning}, as in {where}",
        actual=f"said {', '.join(said[:8])}{' ...' if len(said) > 8 else ''}; {_truth(run.requests, run.k)}",
        n=len(said),
        source=where,
        cause=f"it now means {' or '.join(can_mean)}"
        if can_mean
        else "it is no figure of what happened, as far as known",
        remedy="do not compare it with older releases; change what reads it, and then contract.toml",
    )


def _said(run: MetricsRun, name: str) -> list[Said | None]:
    """Return what a figure said after each request, or in each line of the log."""
    if name.startswith(LOGGED):
        return [line.get(name) for line in run.lines]
    return list(run.readings.get(name, ())[1:])


def _absent(run: MetricsRun, name: str, known: Known, where: str) -> Finding | None:
    """Return how a figure is not there, None if it is."""
    expected = f"{known.meaning}, as in {where}"
    if name.startswith(LOGGED) and not run.lines:
        return Finding(
            "MET014",
            Verdict.INCONCLUSIVE,
            f"{name}: the log said nothing of acceptance meanwhile",
            expected=expected,
            actual="no line",
            n=0,
            source=where,
            cause="the log is written less often, or its words have changed",
            remedy="look at the server's log; extend log_figures of the adapter for this release",
        )
    if several := [each for each in run.readings.get(f"{name}{SEVERAL}", ()) if each is not None]:
        return Finding(
            "MET014",
            Verdict.INCONCLUSIVE,
            f"{name} is there once for each rank, and they differ",
            expected=expected,
            actual=_shown(several[-1].value),
            n=len(several),
            source=where,
            cause="a gauge of one rank does not speak for the engine",
            remedy="judge figures on a single rank; a dashboard must choose a rank, or say that it averages",
        )
    said = _said(run, name)
    if not any(said):
        there = sorted({*run.readings, *(each for line in run.lines for each in line)})
        return Finding(
            "MET012",
            Verdict.FAIL,
            f"{name} is not there any more",
            expected=expected,
            actual=f"not among the {len(there)} figures shown: {', '.join(there)}",
            n=len(said),
            source=where,
            cause="the release renamed or dropped it; dashboards and alerts that read it see nothing",
            remedy="find its successor among the figures shown, and change what reads it",
        )
    if known.meaning.startswith(("average", "interval")):
        # It may be that the first update is still to come.
        said = list(itertools.dropwhile(lambda each: each is None, said))
    if lacking := said.count(None):
        return Finding(
            "MET012",
            Verdict.FAIL,
            f"{name} is missing in {lacking} of {len(said)} readings",
            expected=expected,
            actual=f"there in {len(said) - lacking}",
            n=len(said),
            source=where,
            cause="the release leaves it out at times, such as from answers that a stop token ends",
            remedy="do not rest on it; read the totals",
        )
    return None


def _odd(run: MetricsRun, name: str) -> str:
    """Return what can be said of a figure that is not understood."""
    said = [each.value for each in run.readings.get(name, ()) if each is not None]
    return f"always {_shown(said[0])}" if said and len(set(said)) == 1 else "not understood"


def _truth(requests: tuple[Answered, ...], k: int) -> str:
    truth = whole(k, requests)
    return (
        f"in all {truth.drafts} verify steps, {truth.accepted} of {k * truth.drafts} draft tokens accepted, "
        f"{truth.delivered} tokens delivered to {truth.requests} requests"
    )


def _shown(value: float | tuple[float, ...]) -> str:
    return str([*value]) if isinstance(value, tuple) else f"{value:.6g}"

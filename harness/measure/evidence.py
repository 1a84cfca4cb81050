"""Whether the counters of an acceptance run can be believed, before anything is concluded from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.measure.endpoint import of_right_length
from harness.measure.partial import broken_off
from harness.verdict import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.measure.acceptance import AcceptanceRun
    from harness.measure.endpoint import Counts

__all__ = ["SIMULATED_MIN_STEPS", "evidence_findings", "shown", "simulated_findings"]

SIMULATED_MIN_STEPS = 30
"""Verify steps after which accepting the same 0 < a < K tokens in every one of them is no accident."""


def evidence_findings(run: AcceptanceRun) -> tuple[Finding, ...]:
    """Return one INVALID finding per way in which the evidence of `run` is missing or contradicts itself.

    A single PASS finding (ACC000) means that every count was looked at and adds up. Later checks presume earlier ones,
    so the first group that finds something ends the search: a counter that ran backwards says nothing about K.
    """
    for check in (_whole, _present, _forward, _positions, _output, _sums, _accounting, _witnesses):
        if found := tuple(check(run)):
            return found
    totals = run.totals
    return (
        Finding(
            "ACC000",
            Verdict.PASS,
            f"the counters of {run.label} add up and account for every generated token",
            actual=f"{run.tokens} tokens in {totals.drafts} verify steps over {len(run.prompts)} prompts"
            + "".join(f"; {each.source} agrees" for each in run.witnesses),
            n=totals.drafts,
            source=run.source,
        ),
    )


def _whole(run: AcceptanceRun) -> Iterator[Finding]:
    if run.broken_off:
        yield broken_off(
            "ACC013",
            f"the prompts on {run.label}",
            run.broken_off,
            expected="every prompt answered",
            actual=f"{len(run.prompts)} prompts, {run.tokens} tokens",
            source=run.source or run.label,
        )


def _present(run: AcceptanceRun) -> Iterator[Finding]:
    if run.missing:
        yield Finding(
            "ACC001",
            Verdict.INVALID,
            f"the speculation counters of {run.label} could not be read",
            expected="cumulative counters of drafts, draft tokens and accepted tokens",
            actual=run.missing,
            n=0,
            cause=(
                "the server was started without a drafter"
                if run.speculative
                else "the endpoint is a plain one: its launch has no speculation flag"
            ),
            remedy="check the speculation flags in the server's command line, and that metrics are switched on",
        )
    elif not run.speculative:
        yield Finding(
            "ACC002",
            Verdict.INVALID,
            f"{run.label} was launched without a drafter but has speculation counters",
            expected="a speculative endpoint",
            actual="an endpoint declared plain",
            source=run.source,
            remedy="measure the endpoint that serves the drafter, or correct its launch spec",
        )


def _forward(run: AcceptanceRun) -> Iterator[Finding]:
    for record in run.prompts:
        counts = record.counts
        if min(counts.drafts, counts.draft_tokens, counts.accepted, *counts.per_position, 0) < 0:
            yield Finding(
                "ACC003",
                Verdict.INVALID,
                f"counters went backwards during prompt {record.name!r}",
                expected="cumulative counters",
                actual=shown(counts),
                source=run.source,
                cause="the engine, or the process that counts, was restarted or its metrics were reset",
                remedy="read the server's log around this prompt; measure again on a server that stays up",
            )
            return
    if run.totals.drafts == 0:
        yield Finding(
            "ACC004",
            Verdict.INVALID,
            "no verify step happened: the counters did not move",
            expected=f"verify steps during {run.tokens} generated tokens",
            actual=shown(run.totals),
            n=0,
            source=run.source,
            cause="speculation is configured but not running (a batch limit, sampling settings or the context limit "
            "turned it off), or the counters belong to another process",
            remedy="read the server's log for speculation being disabled; check that the counters are of this server",
        )


def _positions(run: AcceptanceRun) -> Iterator[Finding]:
    positions = len(run.totals.per_position)
    if positions == 0:
        yield Finding(
            "ACC005",
            Verdict.INVALID,
            "the engine gives no counts per draft position",
            expected=f"{run.k} positions",
            actual="none",
            source=run.source,
            remedy="use an engine version whose per-position counters the adapter can read",
        )
    elif positions != run.k:
        yield _wrong_k(run, f"{positions} positions")


def _wrong_k(run: AcceptanceRun, actual: str, prompt: str = "") -> Finding:
    return Finding(
        "ACC006",
        Verdict.INVALID,
        f"the engine does not draft K = {run.k} tokens per step" + (f" (prompt {prompt!r})" if prompt else ""),
        expected=f"K = {run.k}",
        actual=actual,
        n=run.totals.drafts,
        source=run.source,
        cause="the speculation flags give another K (SGLang's --speculative-num-draft-tokens counts the root: K + 1), "
        "or the engine varies K with the load",
        remedy="make the pair's K and the launch flags agree; switch dynamic draft lengths off for this measurement",
    )


def _output(run: AcceptanceRun) -> Iterator[Finding]:
    for record in run.prompts:
        if not of_right_length(record.tokens, run.max_tokens, ignore_eos=record.ignore_eos):
            yield Finding(
                "ACC007",
                Verdict.INVALID,
                f"prompt {record.name!r} got an output of the wrong length",
                expected=f"{'exactly' if record.ignore_eos else '1 to'} {run.max_tokens} tokens",
                actual=f"{record.tokens} tokens, finish reason {record.finish_reason!r}",
                source=run.label,
                cause="the context limit, a stop condition, or an aborted request cut it",
                remedy="check the server's maximum length against prompt + output, and its log for aborted requests",
            )


def _sums(run: AcceptanceRun) -> Iterator[Finding]:
    for record in run.prompts:
        counts = record.counts
        falling = all(a >= b for a, b in zip((counts.drafts, *counts.per_position), counts.per_position, strict=False))
        for holds, rule in (
            (sum(counts.per_position) == counts.accepted, "the positions' counts sum to the accepted tokens"),
            (counts.accepted <= counts.draft_tokens, "no more tokens are accepted than were drafted"),
            (falling, "a position is accepted at most as often as the one before it, the first at most once per step"),
        ):
            if not holds:
                yield Finding(
                    "ACC008",
                    Verdict.INVALID,
                    f"the counters contradict each other on prompt {record.name!r}",
                    expected=rule,
                    actual=shown(counts),
                    n=counts.drafts,
                    source=run.source,
                    cause="the counters are read from different moments, processes or units",
                    remedy="check which counters the adapter reads, and that every process's share is summed",
                )
                return
        # A step is only ever shortened when fewer than K tokens are left to generate, which K - 1 steps can meet, with
        # 1 to K - 1 tokens missing.
        missing = counts.drafts * run.k - counts.draft_tokens
        if not 0 <= missing <= run.k * (run.k - 1) // 2:
            mean = counts.draft_tokens / counts.drafts if counts.drafts else float("nan")
            yield _wrong_k(run, f"{mean:.2f} draft tokens per step: {shown(counts)}", record.name)
            return
    totals = run.totals
    if totals.draft_tokens % totals.drafts == 0 and totals.draft_tokens != totals.drafts * run.k:
        yield _wrong_k(run, f"{totals.draft_tokens // totals.drafts} draft tokens in every step")


def _accounting(run: AcceptanceRun) -> Iterator[Finding]:
    for record in run.prompts:
        # Prefill gives the first token, each verify step what it accepts and one more; the last step may accept tokens
        # past the end of the output, which are counted (vLLM 0.32.0, v1/core/sched/scheduler.py) but not delivered.
        surplus = record.surplus
        if surplus < 0:
            yield Finding(
                "ACC009",
                Verdict.INVALID,
                f"prompt {record.name!r} has {-surplus} tokens that no verify step accounts for",
                expected=f"1 + drafts + accepted between {record.tokens} and {record.tokens + run.k}",
                actual=f"{1 + record.counts.drafts + record.counts.accepted} ({shown(record.counts)})",
                n=record.counts.drafts,
                source=run.source,
                cause="some steps ran without draft tokens, the counters lag behind the answer, or they do not count "
                "what was generated (simulated acceptance, another process)",
                remedy="check that speculation stays on for the whole output and that acceptance is not simulated",
            )
        elif surplus > run.k:
            yield Finding(
                "ACC010",
                Verdict.INVALID,
                f"more was counted during prompt {record.name!r} than its output can explain",
                expected=f"1 + drafts + accepted between {record.tokens} and {record.tokens + run.k}",
                actual=f"{1 + record.counts.drafts + record.counts.accepted} ({shown(record.counts)})",
                n=record.counts.drafts,
                source=run.source,
                cause="another client uses the server, or the counters do not count what was generated (simulated "
                "acceptance, twice counted processes)",
                remedy="measure on a server that nobody else uses, with simulated acceptance off",
            )


def _witnesses(run: AcceptanceRun) -> Iterator[Finding]:
    for witness in run.witnesses:
        if not witness.agrees:
            wanted = f"{witness.low:.4g}" if witness.low == witness.high else f"{witness.low:.4g} to {witness.high:.4g}"
            yield Finding(
                "ACC012",
                Verdict.INVALID,
                f"two figures of {run.label} contradict each other: {witness.what}",
                expected=f"{wanted}, from {run.source}",
                actual=f"{witness.says:.4g}, from {witness.source}",
                n=run.totals.drafts,
                source=f"{run.source}; {witness.source}",
                cause="one of the two counts something else in this release, another client uses the server, or a "
                "process's share is missing from one of them",
                remedy="measure on a server that nobody else uses; if it stays, a figure of this release has "
                "changed its meaning",
            )


def simulated_findings(run: AcceptanceRun) -> Iterator[Finding]:
    """Yield a finding if acceptance looks simulated: the same number in every step, which no text produces.

    Not for canaries: there an exact count speaks for itself. `run` must have passed `evidence_findings`.
    """
    totals = run.totals
    each, rest = divmod(totals.accepted, totals.drafts)
    constant = totals.per_position == (totals.drafts,) * each + (0,) * (run.k - each)
    if rest == 0 and 0 < each < run.k and constant and totals.drafts >= SIMULATED_MIN_STEPS:
        yield Finding(
            "ACC011",
            Verdict.INVALID,
            f"every single verify step accepted exactly {each} of {run.k} draft tokens",
            expected="acceptance that depends on the text",
            actual=shown(totals),
            n=totals.drafts,
            source=run.source,
            cause="acceptance is simulated (SGLang: SGLANG_SIMULATE_ACC_LEN; vLLM: a synthetic rejection sampler), or "
            f"draft tokens after position {each} are never right",
            remedy="start the server without simulated acceptance; if it is off, check the drafter's later steps",
        )


def shown(counts: Counts) -> str:
    """Return `counts` as a person reads them."""
    return (
        f"{counts.drafts} drafts, {counts.draft_tokens} draft tokens, {counts.accepted} accepted, "
        f"per position {list(counts.per_position)}"
    )

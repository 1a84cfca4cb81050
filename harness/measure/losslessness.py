"""Does speculation change the text: the same greedy tokens with and without a drafter, and what rounding may excuse.

And does a request get other tokens when others are under way with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.measure.outputs import MAX_RESUMES, TOP_LOGITS, Comparison, Divergence, LosslessnessRun, measure
from harness.measure.statistics import ulp
from harness.verdict import Finding, Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["MIN_COMPARED", "MIN_OVERLAPPING", "NEAR_TIE_ULPS", "TURN", "LosslessnessRun", "judge", "measure"]

NEAR_TIE_ULPS = 4.0
"""How many ulps of the target's dtype below the highest logit a token may lie to be its equal: see docs/judging.md."""

MIN_COMPARED = 0.9
"""Share of the generated tokens that must have been compared; what lies behind the last divergence is not.

Of those of requests sent at once, as large a share must have come of verify steps.
"""

TURN = 0.5
"""Share of the time that a request took alone. One answered in less since the answer before was served beside it.

A server that takes requests in turn needs the whole of that time for each.
"""

MIN_OVERLAPPING = 0.25
"""Share of the requests sent at once that must have been served beside another one.

Of requests of one length, 2 at a time, every second one shows it, and 4 at a time, three in four. Of requests of any
length, where a batch of four takes four times as long as one (a small CPU), gaps between answers are on average what
a request took alone: if they come at random, 39 % are below half of it. A request that happened to take long alone
shows it wrongly, and the first ones of a server may.
"""


def judge(
    run: LosslessnessRun,
    dtype: str,
    *,
    oracle: Mapping[str, Sequence[int]] | None = None,
    near_tie_ulps: float = NEAR_TIE_ULPS,
) -> Judgement:
    """Judge whether speculation changed the text of a target computing in `dtype` (float32, bfloat16, float16).

    In float32 the tokens must be equal. Otherwise the first difference must be a near-tie: both tokens at most
    `near_tie_ulps` ulps (of `dtype`, at the size of the logits) below the plain target's highest logit. With an
    `oracle` (prompt name -> tokens) both outputs must equal it, whatever the dtype: a canary has no near-ties. The same
    holds of the outputs of requests that were sent at once, against those that the prompts got alone. Raises UsageError
    for an unknown dtype or an oracle for other prompts.
    """
    ulp(1.0, dtype)
    if oracle is not None and set(oracle) != {each.name for each in run.comparisons}:
        raise UsageError("the oracle is for other prompts than those that ran", remedy="pass one entry per prompt")
    looked_at = (*_speculated(run), *_whole(run))
    if any(finding.verdict is Verdict.INVALID for finding in looked_at):
        return Judgement("losslessness", looked_at, run.as_measurements())
    rule = _Rule(dtype, near_tie_ulps)
    repeats = tuple(_repeats(run, rule))
    unstable = any(finding.verdict is Verdict.INVALID for finding in repeats)
    findings = [
        *looked_at,
        *repeats,
        *_oracle(run, oracle or {}),
        *_divergences(run, rule, unstable=unstable),
        *_concurrent(run, rule, oracle, unstable=unstable),
    ]
    measurements = run.as_measurements() | {"dtype": dtype, "near_tie_ulps": near_tie_ulps} | _shares(run.comparisons)
    measurements["concurrent"] |= {"overlapping": _overlapping(run)} | _shares(run.concurrent.comparisons)
    return Judgement("losslessness", tuple(findings), measurements)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """When a difference is rounding and when it is not."""

    dtype: str
    near_tie_ulps: float

    def gap(self, divergence: Divergence) -> tuple[float, float]:
        """Return how far the lower of the two tokens lies below the highest logit, in logits and in ulps.

        A token that is not among the logits lies below all of them: the gap is then at least what is returned.
        """
        known = {each.token_id: each.logit for each in divergence.logits}
        top, bottom = divergence.logits[0].logit, divergence.logits[-1].logit
        lower = min(known.get(divergence.spec_token, bottom), known.get(divergence.plain_token, bottom))
        return top - lower, (top - lower) / ulp(max(abs(top), abs(lower)), self.dtype)

    def excuses(self, divergence: Divergence) -> bool:
        """Say whether both tokens are in the group that ties for the highest logit."""
        known = {each.token_id for each in divergence.logits}
        return (
            self.dtype != "float32"
            and {divergence.spec_token, divergence.plain_token} <= known
            and self.gap(divergence)[1] <= self.near_tie_ulps
        )

    def shown(self, divergence: Divergence) -> str:
        """Return the divergence as a person reads it."""
        where = f"token {divergence.position}: {divergence.spec_token} instead of {divergence.plain_token}"
        if divergence.missing:
            return where
        gap, ulps = self.gap(divergence)
        known = {each.token_id for each in divergence.logits}
        least = "" if {divergence.spec_token, divergence.plain_token} <= known else "at least "
        return f"{where}, {least}{gap:.4g} logits or {ulps:.1f} ulps of {self.dtype} below the highest"


def _speculated(run: LosslessnessRun) -> Iterator[Finding]:
    """Check that one side speculated and the other did not: otherwise equal outputs prove nothing."""
    if run.spec_counts is None or run.spec_counts.drafts <= 0:
        yield Finding(
            "LOS001",
            Verdict.INVALID,
            f"no evidence that {run.spec_label} speculated",
            expected="drafts counted while it generated",
            actual=run.spec_missing or f"{0 if run.spec_counts is None else run.spec_counts.drafts} drafts",
            source=run.spec_label,
            cause="the speculation flags were forgotten, metrics are off, or the engine was restarted",
            remedy="check the command line of the speculative server and read its counters by hand",
        )
    if run.plain_speculative or (run.plain_counts is not None and run.plain_counts.drafts != 0):
        yield Finding(
            "LOS002",
            Verdict.INVALID,
            f"the plain endpoint {run.plain_label} speculates",
            expected="an endpoint without a drafter",
            actual="launched as speculative" if run.plain_counts is None else f"{run.plain_counts.drafts} drafts",
            source=run.plain_label,
            cause="both endpoints are the same server, or the plain launch carries a speculation flag",
            remedy="start the plain server without any speculation flag",
        )


def _whole(run: LosslessnessRun) -> Iterator[Finding]:
    """Check that both outputs of every segment are there and of the right length."""
    for comparison, segment in ((each, segment) for each in run.comparisons for segment in each.segments):
        wanted = run.max_tokens - segment.start
        sides = (("spec", run.spec_label, segment.spec), ("plain", run.plain_label, segment.plain))
        empty = [label for _, label, output in sides if not output]
        if empty:
            yield Finding(
                "LOS003",
                Verdict.INVALID,
                f"prompt {comparison.name!r} got an empty output from {' and '.join(empty)}",
                expected=f"{'' if comparison.ignore_eos else 'up to '}{wanted} tokens",
                actual=f"finish reasons {segment.spec_finish!r} (speculative), {segment.plain_finish!r} (plain)",
                remedy="read the server's log for this request; an empty output cannot be compared",
            )
            continue
        for side, label, output in sides:
            if comparison.ignore_eos:
                wrong = len(output) != wanted
            elif segment.divergence is None:
                wrong = len(output) > wanted or len(output) != len(segment.plain)
            else:
                wrong = len(output) > wanted
            if wrong:
                yield Finding(
                    "LOS004",
                    Verdict.FAIL if side == "spec" else Verdict.INVALID,
                    f"prompt {comparison.name!r} got an output of the wrong length from {label}",
                    expected=f"{wanted} tokens"
                    if comparison.ignore_eos
                    else f"{len(segment.plain)}, at most {wanted} tokens",
                    actual=f"{len(output)} tokens, finish reasons {segment.spec_finish!r} (speculative), "
                    f"{segment.plain_finish!r} (plain)",
                    source=label,
                    cause="accepted draft tokens were dropped or not cut at the end"
                    if side == "spec"
                    else "the context limit, a stop condition, or an aborted request",
                    remedy="check the server's maximum length against prompt + output, and its log",
                )


def _repeats(run: LosslessnessRun, rule: _Rule) -> Iterator[Finding]:
    """Check that the reference repeats itself: otherwise a difference says nothing about speculation."""
    if not run.repeats:
        return
    apart = [(each.name, divergence) for each in run.repeats for divergence in each.divergences]
    beyond = [(name, divergence) for name, divergence in apart if not rule.excuses(divergence)]
    lengths = [each.name for each in run.repeats if each.ends_differently]
    if beyond or lengths:
        yield Finding(
            "LOS009",
            Verdict.INVALID,
            f"plain decoding on {run.plain_label} does not repeat itself",
            expected="the same tokens, or a near-tie, when a prompt is run twice",
            actual=f"prompt {beyond[0][0]!r}, {rule.shown(beyond[0][1])}" if beyond else f"lengths of {lengths[0]!r}",
            n=len(run.repeats),
            source=run.plain_label,
            cause="the engine is not deterministic (kernels, cache state, other traffic), or faulty without a drafter",
            remedy="make plain decoding repeat itself first; until then no difference says anything about speculation",
        )
    elif apart:
        yield Finding(
            "LOS009",
            Verdict.PASS,
            f"plain decoding on {run.plain_label} repeats itself only up to near-ties",
            actual=f"{len(apart)} near-ties in {len(run.repeats)} prompts run twice; {rule.shown(apart[0][1])}",
            n=len(run.repeats),
            source=run.plain_label,
        )


def _oracle(run: LosslessnessRun, oracle: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    if not oracle:
        return
    yield from _against(
        oracle,
        {each.name: each.segments[0].plain for each in run.comparisons},
        "LOS010",
        run.plain_label,
        cause="the target itself computes something else, with or without a drafter",
        remedy="check the target's checkpoint and dtype before looking at the drafter",
    )
    yield from _against(
        oracle,
        {each.name: each.segments[0].spec for each in run.comparisons},
        "LOS011",
        run.spec_label,
        cause="speculation changed the text, if the plain output is right",
        remedy="look at how the engine verifies: the rejection sampler, cache slots and positions of rejected tokens",
    )


def _against(
    oracle: Mapping[str, Sequence[int]],
    outputs: Mapping[str, Sequence[int]],
    code: str,
    label: str,
    *,
    cause: str,
    remedy: str,
) -> Iterator[Finding]:
    """Compare outputs with the oracle's, exactly."""
    wrong = [name for name, output in outputs.items() if tuple(output) != tuple(oracle[name])]
    if not wrong:
        return
    output, truth = outputs[wrong[0]], oracle[wrong[0]]
    at = next((i for i, (a, b) in enumerate(zip(output, truth, strict=False)) if a != b), None)
    yield Finding(
        code,
        Verdict.FAIL,
        f"{len(wrong)} of {len(outputs)} outputs of {label} differ from the oracle, the first is {wrong[0]!r}",
        expected=f"{len(truth)} tokens" if at is None else f"token {at} is {truth[at]}",
        actual=f"{len(output)} tokens" if at is None else f"{output[at]}",
        n=len(outputs),
        source=label,
        cause=cause,
        remedy=remedy,
    )


def _divergences(run: LosslessnessRun, rule: _Rule, *, unstable: bool) -> Iterator[Finding]:
    found, wrong = _sorted_out(run.comparisons, rule)
    shares = _shares(run.comparisons)
    prompts = f"{shares['diverging_prompts']} of {len(run.comparisons)} prompts diverge"
    unseen = list(_unseen(run, run.comparisons, rule))
    yield from unseen
    if wrong:
        name, divergence = wrong[0]
        exact = rule.dtype == "float32"
        yield Finding(
            "LOS005" if exact else "LOS006",
            Verdict.INVALID if unstable else Verdict.FAIL,
            f"speculation changed the text of {len({name for name, _ in wrong})} of {len(run.comparisons)} prompts"
            + ("" if exact else f" where rounding does not explain it, the first is {name!r}"),
            expected="equal tokens"
            if exact
            else f"equal tokens, or both within {rule.near_tie_ulps:g} ulps of the top",
            actual=f"prompt {name!r}, {rule.shown(divergence)}",
            n=shares["compared_tokens"],
            source=f"{run.spec_label} against {run.plain_label}; {prompts}",
            cause="plain decoding does not repeat itself either (LOS009)"
            if unstable
            else "tokens are accepted that the target would not have chosen: simulated or lenient acceptance, sampling "
            "that is not greedy, or verification that reads wrong cache slots or positions",
            remedy="look at the first divergence: what was accepted there, at which draft position",
        )
    if not wrong and not any(each.verdict is Verdict.INVALID for each in unseen):
        yield _equal(run, rule, [divergence for _, divergence in found], prompts)


def _sorted_out(
    comparisons: Sequence[Comparison], rule: _Rule
) -> tuple[list[tuple[str, Divergence]], list[tuple[str, Divergence]]]:
    """Return all divergences by prompt, and those that are shown to be more than rounding."""
    found = [(each.name, divergence) for each in comparisons for divergence in each.divergences]
    exact = rule.dtype == "float32"
    return found, [(name, each) for name, each in found if exact or not (each.missing or rule.excuses(each))]


def _unseen(run: LosslessnessRun, comparisons: Sequence[Comparison], rule: _Rule, of: str = "") -> Iterator[Finding]:
    """Check that each divergence has the logits that say what it is, and that little is left uncompared behind one."""
    found, _ = _sorted_out(comparisons, rule)
    blind = [(name, divergence) for name, divergence in found if divergence.missing]
    shares = _shares(comparisons)
    if blind and rule.dtype != "float32":
        name, divergence = blind[0]
        yield Finding(
            "LOS008",
            Verdict.INVALID,
            f"the target's logits are missing at {len(blind)} of {len(found)} divergences{of}",
            expected=f"the {TOP_LOGITS} highest logits after the common prefix",
            actual=f"prompt {name!r}, {rule.shown(divergence)}: {divergence.missing}",
            source=run.plain_label,
            remedy="give prompts as token ids, and let the plain server return raw logits",
        )
    if shares["compared_share"] < MIN_COMPARED:
        yield Finding(
            "LOS012",
            Verdict.INCONCLUSIVE,
            f"too little of the outputs{of} could be compared",
            expected=f"{MIN_COMPARED:.0%} of the generated tokens",
            actual=f"{shares['compared_share']:.0%}; "
            f"{shares['diverging_prompts']} of {len(comparisons)} prompts diverge",
            n=shares["compared_tokens"],
            cause=f"divergences that could not be resumed, or more than {MAX_RESUMES} of them in one output",
            remedy="give prompts as token ids; use a target with fewer near-ties, or float32",
        )


def _equal(run: LosslessnessRun, rule: _Rule, ties: Sequence[Divergence], prompts: str) -> Finding:
    worst = max(ties, key=lambda each: rule.gap(each)[1], default=None)
    return Finding(
        "LOS007" if worst else "LOS000",
        Verdict.PASS,
        "the outputs differ only at near-ties"
        if worst
        else "the outputs with and without speculation are the same tokens",
        expected=f"equal tokens, or both within {rule.near_tie_ulps:g} ulps of the top" if worst else "equal tokens",
        actual=f"{prompts}, at {len(ties)} near-ties; the widest: {rule.shown(worst)}" if worst else prompts,
        n=_shares(run.comparisons)["compared_tokens"],
        source=f"{run.spec_label} against {run.plain_label}",
    )


def _concurrent(
    run: LosslessnessRun, rule: _Rule, oracle: Mapping[str, Sequence[int]] | None, *, unstable: bool
) -> Iterator[Finding]:
    """Check that requests get the same text with others under way, and that this was seen.

    Of a canary the oracle decides; of another pair, what the prompt got alone, by the rule for other batch shapes.
    """
    comparisons, at_once = run.concurrent.comparisons, f"{run.concurrent.concurrency} requests at once"
    of = f" of {at_once}"
    evidence = list(_seen_concurrently(run, at_once))
    yield from evidence
    if not comparisons:
        return
    advice = {
        "cause": "a request's rows, cache slots or rejected tokens are mixed up with those of another in the same step",
        "remedy": "look at how the engine lays out a batch of several requests: padding, offsets of draft tokens",
    }
    if oracle is not None:
        outputs = {each.name: each.segments[0].spec for each in comparisons}
        if all(each.segments[0].spec in (each.segments[0].plain, tuple(oracle[each.name])) for each in comparisons):
            advice = {"cause": "the outputs are wrong alone too, and the same (LOS011)", "remedy": "see LOS011"}
        wrong_outputs = list(_against(oracle, outputs, "LOS013", f"{run.spec_label} with {at_once}", **advice))
        yield from wrong_outputs
        if not wrong_outputs and not evidence:
            yield _same(run, f"the oracle's tokens with {at_once}", "")
        return
    found, wrong = _sorted_out(comparisons, rule)
    unseen = list(_unseen(run, comparisons, rule, of))
    yield from unseen
    ends = [each for each in comparisons if each.ends_differently]
    if wrong or ends:
        if wrong:
            name, divergence = wrong[0]
            actual = f"prompt {name!r}, {rule.shown(divergence)}"
        else:
            last = ends[0].segments[-1]
            actual = f"prompt {ends[0].name!r} ends after {last.start + len(last.spec)} tokens ({last.spec_finish!r}), "
            actual += f"alone after {last.start + len(last.plain)} ({last.plain_finish!r})"
        yield Finding(
            "LOS013",
            Verdict.INVALID if unstable else Verdict.FAIL,
            f"{len({each for each, _ in wrong} | {each.name for each in ends})} of {len(comparisons)} prompts got "
            f"another text with {at_once} than alone",
            expected="equal tokens"
            if rule.dtype == "float32"
            else f"equal tokens, or both within {rule.near_tie_ulps:g} ulps of the top",
            actual=actual,
            n=_shares(comparisons)["compared_tokens"],
            source=run.spec_label,
            cause="plain decoding does not repeat itself either (LOS009)" if unstable else advice["cause"],
            remedy=advice["remedy"],
        )
    elif not evidence and not any(each.verdict is Verdict.INVALID for each in unseen):
        widest = max((each for _, each in found), key=lambda each: rule.gap(each)[1], default=None)
        ties = f"; {len(found)} near-ties, the widest: {rule.shown(widest)}" if widest else ""
        yield _same(run, f"the same tokens with {at_once} as alone" + (", up to near-ties" if ties else ""), ties)


def _same(run: LosslessnessRun, what: str, ties: str) -> Finding:
    seen = run.concurrent
    return Finding(
        "LOS013",
        Verdict.PASS,
        f"the prompts got {what}",
        actual=f"{len(_overlapping(run))} of {len(seen.requests)} requests were served beside another one{ties}",
        n=_shares(seen.comparisons)["compared_tokens"],
        source=run.spec_label,
    )


def _seen_concurrently(run: LosslessnessRun, at_once: str) -> Iterator[Finding]:
    """Check that requests were served beside each other, and with speculation: else nothing was seen of it."""
    seen = run.concurrent
    if not seen.requests:
        yield Finding(
            "LOS014",
            Verdict.INVALID,
            "nothing was seen of several requests at once",
            expected="two prompts or more",
            actual=f"{len(run.comparisons)}",
            source=run.spec_label,
            remedy="give the pair's workload a count of 2 or more",
        )
        return
    overlapping = _overlapping(run)
    if len(overlapping) < MIN_OVERLAPPING * len(seen.requests):
        yield Finding(
            "LOS014",
            Verdict.INVALID,
            f"it was not seen that {run.spec_label} serves {at_once}",
            expected=f"{MIN_OVERLAPPING:.0%} of the answers sooner after the one before than {TURN:.0%} of what the "
            "request took alone",
            actual=f"{len(overlapping)} of {len(seen.requests)}",
            n=len(seen.requests),
            source="times of the requests",
            cause="the server takes requests in turn: a limit of one running request, or too little room in its cache",
            remedy="raise the pair's --max-num-seqs (vLLM) or --max-running-requests (SGLang), or its KV cache",
        )
    tokens = sum(each.tokens for each in seen.requests)
    # Each request's first token comes from prefill.
    verified = 0 if seen.counts is None else seen.counts.drafts + seen.counts.accepted
    if seen.counts is None or verified + len(seen.requests) < MIN_COMPARED * tokens:
        yield Finding(
            "LOS014",
            Verdict.INVALID,
            f"no evidence that {run.spec_label} speculated with {at_once}",
            expected=f"{MIN_COMPARED:.0%} of {tokens} tokens from prefill and verify steps",
            actual=seen.missing or f"{len(seen.requests)} + {verified}",
            n=len(seen.requests),
            source=run.spec_label,
            cause="the engine turns speculation off when several requests run, or does not count then",
            remedy="look in the server's log for a limit of the batch size, and read its counters by hand",
        )


def _overlapping(run: LosslessnessRun) -> list[str]:
    """Return the prompts whose requests cannot have been served in turn: see `TURN`."""
    alone = {each.name: each.segments[0].spec_seconds for each in run.comparisons}
    found, before = [], 0.0
    for each in sorted(run.concurrent.requests, key=lambda each: each.started + each.seconds):
        ended = each.started + each.seconds
        if ended - max(before, each.started) < TURN * alone[each.prompt]:
            found.append(each.prompt)
        before = ended
    return found


def _shares(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    compared, total = (sum(getattr(each, what) for each in comparisons) for what in ("compared", "total"))
    return {
        "compared_tokens": compared,
        "compared_share": compared / total if total else 0.0,
        "diverging_prompts": sum(bool(each.divergences) for each in comparisons),
        "divergences": len(list(itertools.chain.from_iterable(each.divergences for each in comparisons))),
    }

"""Does speculation change the text: the same greedy tokens with and without a drafter, and what rounding may excuse."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.measure.outputs import MAX_RESUMES, TOP_LOGITS, Divergence, LosslessnessRun, measure
from harness.measure.statistics import ulp
from harness.verdict import Finding, Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["MIN_COMPARED", "NEAR_TIE_ULPS", "LosslessnessRun", "judge", "measure"]

NEAR_TIE_ULPS = 4.0
"""How many ulps of the target's dtype below the highest logit a token may lie to be its equal: see docs/judging.md."""

MIN_COMPARED = 0.9
"""Share of the generated tokens that must have been compared; what lies behind the last divergence is not."""


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
    `oracle` (prompt name -> tokens) both outputs must equal it, whatever the dtype: a canary has no near-ties. Raises
    UsageError for an unknown dtype or an oracle for other prompts.
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
    findings = [*looked_at, *repeats, *_oracle(run, oracle or {}), *_divergences(run, rule, unstable=unstable)]
    measurements = run.as_measurements() | {"dtype": dtype, "near_tie_ulps": near_tie_ulps} | _shares(run)
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
    lengths = [each.name for each in run.repeats if len(each.segments[-1].spec) != len(each.segments[-1].plain)]
    if beyond or (lengths and not apart):
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
    for code, label, side in (("LOS010", run.plain_label, "plain"), ("LOS011", run.spec_label, "spec")):
        wrong = []
        for each in run.comparisons if oracle else ():
            output, truth = getattr(each.segments[0], side), tuple(oracle[each.name])
            if output != truth:
                at = next((i for i, (a, b) in enumerate(zip(output, truth, strict=False)) if a != b), None)
                wrong.append((each.name, at, output, truth))
        if not wrong:
            continue
        name, at, output, truth = wrong[0]
        yield Finding(
            code,
            Verdict.FAIL,
            f"{len(wrong)} of {len(run.comparisons)} outputs of {label} differ from the oracle, the first is {name!r}",
            expected=f"{len(truth)} tokens" if at is None else f"token {at} is {truth[at]}",
            actual=f"{len(output)} tokens" if at is None else f"{output[at]}",
            n=len(run.comparisons),
            source=label,
            cause="the target itself computes something else, with or without a drafter"
            if side == "plain"
            else "speculation changed the text, if the plain output is right",
            remedy="check the target's checkpoint and dtype before looking at the drafter"
            if side == "plain"
            else "look at how the engine verifies: the rejection sampler, cache slots and positions of rejected tokens",
        )


def _divergences(run: LosslessnessRun, rule: _Rule, *, unstable: bool) -> Iterator[Finding]:
    found = [(each.name, divergence) for each in run.comparisons for divergence in each.divergences]
    blind = [(name, divergence) for name, divergence in found if divergence.missing]
    beyond = [(name, each) for name, each in found if not each.missing and not rule.excuses(each)]
    shares = _shares(run)
    prompts = f"{shares['diverging_prompts']} of {len(run.comparisons)} prompts diverge"
    if blind and rule.dtype != "float32":
        name, divergence = blind[0]
        yield Finding(
            "LOS008",
            Verdict.INVALID,
            f"the target's logits are missing at {len(blind)} of {len(found)} divergences",
            expected=f"the {TOP_LOGITS} highest logits after the common prefix",
            actual=f"prompt {name!r}, {rule.shown(divergence)}: {divergence.missing}",
            source=run.plain_label,
            remedy="give prompts as token ids, and let the plain server return raw logits",
        )
    wrong = found if rule.dtype == "float32" else beyond
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
    share = shares["compared_share"]
    if share < MIN_COMPARED:
        yield Finding(
            "LOS012",
            Verdict.INCONCLUSIVE,
            "too little of the outputs could be compared",
            expected=f"{MIN_COMPARED:.0%} of the generated tokens",
            actual=f"{share:.0%}; {prompts}",
            n=shares["compared_tokens"],
            cause=f"divergences that could not be resumed, or more than {MAX_RESUMES} of them in one output",
            remedy="give prompts as token ids; use a target with fewer near-ties, or float32",
        )
    if not wrong and not (blind and rule.dtype != "float32"):
        yield _equal(run, rule, [divergence for _, divergence in found], prompts)


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
        n=_shares(run)["compared_tokens"],
        source=f"{run.spec_label} against {run.plain_label}",
    )


def _shares(run: LosslessnessRun) -> dict[str, Any]:
    compared, total = (sum(getattr(each, what) for each in run.comparisons) for what in ("compared", "total"))
    return {
        "compared_tokens": compared,
        "compared_share": compared / total if total else 0.0,
        "diverging_prompts": sum(bool(each.divergences) for each in run.comparisons),
        "divergences": len(list(itertools.chain.from_iterable(each.divergences for each in run.comparisons))),
    }

"""Texts that speculation changed must be red, near-ties must not; equal texts that prove nothing must be invalid."""

from __future__ import annotations

import dataclasses

import pytest

from harness.errors import EvidenceError, UsageError
from harness.measure import losslessness
from harness.measure.endpoint import Prompt, TokenLogit
from harness.measure.outputs import MAX_RESUMES
from harness.verdict import Judgement, Verdict
from tests.measure.simulated_engine import AtOnce, Engine, beside_others, prompts

TOKENS = 64


class Plain(Engine):
    def __init__(self, **settings):
        super().__init__(k=0, label="plain", **settings)


def run(spec, plain=None, asked=None, *, rows=4, spoil=lambda _: None, **settings):
    server = AtOnce(spec, rows, spoil)
    return losslessness.measure(server, plain or Plain(), asked or prompts(8), TOKENS, clock=server.clock, **settings)


def red(judgement: Judgement) -> dict[str, Verdict]:
    return {finding.code: finding.verdict for finding in judgement.findings if finding.verdict is not Verdict.PASS}


def codes(judgement: Judgement) -> list[str]:
    return [finding.code for finding in judgement.findings]


def oracle(engine, n=8):
    """The continuation by definition, token by token, without any engine."""
    outputs = {}
    for prompt in prompts(n):
        context = list(prompt.token_ids)
        for _ in range(TOKENS):
            context.append(engine.logits(context)[0].token_id)
        outputs[prompt.name] = tuple(context[3:])
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_outputs_pass_and_equal_the_oracle(dtype):
    judgement = losslessness.judge(run(Engine(rate=0.5)), dtype, oracle=oracle(Plain()))
    assert judgement.verdict is Verdict.PASS
    assert codes(judgement) == ["LOS000", "LOS013"]
    assert judgement.measurements["compared_tokens"] == 8 * TOKENS
    assert judgement.measurements["compared_share"] == 1.0


def tied(gap=0.125, **settings):
    return {"ties": 0.02, "gap": gap, **settings}


def test_a_near_tie_is_excused_in_bfloat16_and_reported():
    measured = run(Engine(rounds=True, **tied()), Plain(**tied()))
    judgement = losslessness.judge(measured, "bfloat16")
    assert codes(judgement) == ["LOS007", "LOS013"], judgement.as_text()
    assert judgement.verdict is Verdict.PASS
    assert "0.125 logits or 1.0 ulps" in judgement.as_text()
    assert judgement.measurements["diverging_prompts"] > 1
    # Comparison goes on behind each near-tie, so that nothing is left out.
    assert judgement.measurements["compared_share"] == 1.0
    assert max(len(each.segments) for each in measured.comparisons) > 2


def test_the_same_near_tie_is_not_excused_in_float32():
    judgement = losslessness.judge(run(Engine(rounds=True, **tied()), Plain(**tied())), "float32")
    assert red(judgement) == {"LOS005": Verdict.FAIL}


# At logits of 16 to 32 an ulp is 2^-3 in bfloat16 and 2^-6 in float16, and 4 of them are excused.
@pytest.mark.parametrize(
    ("dtype", "gap", "verdict"),
    [
        ("bfloat16", 0.5, Verdict.PASS),
        ("bfloat16", 0.51, Verdict.FAIL),
        ("float16", 0.0625, Verdict.PASS),
        ("float16", 0.125, Verdict.FAIL),
    ],
)
def test_the_tolerance_is_in_ulps_of_the_targets_dtype(dtype, gap, verdict):
    judgement = losslessness.judge(run(Engine(rounds=True, **tied(gap)), Plain(**tied(gap))), dtype)
    assert judgement.verdict is verdict
    assert red(judgement) == ({} if verdict is Verdict.PASS else {"LOS006": Verdict.FAIL})


class ChangesOneToken(Engine):
    """Accepts a draft token that the target would not have chosen, once, where nothing is tied. `by` picks it."""

    by = 1

    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        if prompt.name != "p03" or max_tokens != TOKENS:
            return answer
        tokens = list(answer.token_ids)
        tokens[40] = (tokens[40] + self.by) % 997
        return dataclasses.replace(answer, token_ids=tuple(tokens))


class ChangesToAnUnlikelyToken(ChangesOneToken):
    by = 400


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("engine", [ChangesOneToken, ChangesToAnUnlikelyToken])
def test_one_changed_token_fails_in_every_dtype(engine, dtype):
    judgement = losslessness.judge(run(engine()), dtype)
    assert red(judgement) == {"LOS005" if dtype == "float32" else "LOS006": Verdict.FAIL}
    text = judgement.as_text()
    assert "'p03', token 40:" in text
    assert ("at least 17 logits" if engine is ChangesToAnUnlikelyToken else "5 logits") in text


@pytest.mark.parametrize("engine", [Engine, ChangesOneToken])
def test_servers_that_take_turns(engine):
    """The speculative one has answered everything before the plain one is asked, and is not asked again."""
    asked = []

    def noting(cls, name, **settings):
        class Noting(cls):
            def generate(self, prompt, max_tokens):
                asked.append(name)
                return super().generate(prompt, max_tokens)

        return Noting(**settings)

    measured = run(noting(engine, "spec"), noting(Plain, "plain"), side_by_side=False)
    assert asked == ["spec"] * 16 + ["plain"] * (len(asked) - 16)
    judgement = losslessness.judge(measured, "float32")
    assert red(judgement) == ({} if engine is Engine else {"LOS005": Verdict.FAIL})


def test_a_changed_token_behind_a_near_tie_is_still_found():
    class Spec(Engine):
        def generate(self, prompt, max_tokens):
            answer = super().generate(prompt, max_tokens)
            return dataclasses.replace(answer, token_ids=(*answer.token_ids[:-1], answer.token_ids[-1] + 1))

    judgement = losslessness.judge(run(Spec(rounds=True, **tied()), Plain(**tied())), "bfloat16")
    assert red(judgement) == {"LOS006": Verdict.FAIL}
    assert "of 8 of 8 prompts" in judgement.as_text()


class SimulatedAcceptance(Engine):
    """Acceptance that ignores the target: counters and lengths agree, the text is the drafter's."""

    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        return dataclasses.replace(answer, token_ids=tuple((token * 7 + 1) % 997 for token in answer.token_ids))


def test_simulated_acceptance_fails():
    judgement = losslessness.judge(run(SimulatedAcceptance()), "bfloat16")
    assert red(judgement)["LOS006"] is Verdict.FAIL


class Forgotten(Engine):
    """The speculation flag was forgotten: labelled speculative, but plain."""

    speculative = True

    def __init__(self):
        super().__init__(k=0)


class Idle(Engine):
    def count(self, accepted):
        pass


@pytest.mark.parametrize("spec", [Forgotten, Idle])
def test_equal_outputs_without_speculation_are_invalid(spec):
    assert red(losslessness.judge(run(spec()), "float32")) == {"LOS001": Verdict.INVALID}


class SecretlySpeculates(Engine):
    speculative = False


@pytest.mark.parametrize("plain", [Engine, SecretlySpeculates])
def test_a_plain_endpoint_that_speculates_is_invalid(plain):
    assert red(losslessness.judge(run(Engine(), plain()), "float32")) == {"LOS002": Verdict.INVALID}


def cut(base, keep):
    class Cut(base):
        def generate(self, prompt, max_tokens):
            answer = super().generate(prompt, max_tokens)
            return dataclasses.replace(answer, token_ids=answer.token_ids[:keep], finish_reason="abort")

    return Cut()


@pytest.mark.parametrize(
    ("spec", "plain", "code", "verdict"),
    [
        (cut(Engine, 0), Plain(), "LOS003", Verdict.INVALID),
        (Engine(), cut(Plain, 0), "LOS003", Verdict.INVALID),
        (cut(Engine, 60), Plain(), "LOS004", Verdict.FAIL),
        (Engine(), cut(Plain, 60), "LOS004", Verdict.INVALID),
    ],
)
def test_an_output_that_is_empty_or_cut_is_red(spec, plain, code, verdict):
    judgement = losslessness.judge(run(spec, plain), "bfloat16")
    assert red(judgement) == {code: verdict} or verdict is Verdict.FAIL
    assert red(judgement)[code] is verdict
    assert judgement.verdict is verdict


class OneTokenTooMany(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        return dataclasses.replace(answer, token_ids=(*answer.token_ids, 5))


def test_an_output_that_is_too_long_is_red():
    assert red(losslessness.judge(run(OneTokenTooMany()), "bfloat16"))["LOS004"] is Verdict.FAIL


def test_outputs_that_end_by_themselves_may_be_short_but_must_be_equal():
    spec, plain = Engine(rate=0.5, eos=23), Plain(eos=23)
    asked = prompts(8, ignore_eos=False)
    judgement = losslessness.judge(run(spec, plain, asked), "float32")
    assert judgement.verdict is Verdict.PASS
    assert judgement.measurements["compared_tokens"] < 8 * TOKENS
    assert red(losslessness.judge(run(OneTokenTooMany(eos=23), plain, asked), "float32"))["LOS004"] is Verdict.FAIL


class NoLogits(Plain):
    def next_token_logits(self, prompt_token_ids, top):
        raise EvidenceError(f"logprobs are off ({len(prompt_token_ids)} tokens, top {top})")


class EmptyLogits(Plain):
    def next_token_logits(self, prompt_token_ids, top):
        return super().next_token_logits(prompt_token_ids, top)[:0]


class NanLogits(Plain):
    def next_token_logits(self, prompt_token_ids, top):
        return [TokenLogit(each.token_id, float("nan")) for each in super().next_token_logits(prompt_token_ids, top)]


@pytest.mark.parametrize("plain", [NoLogits, EmptyLogits, NanLogits])
def test_missing_logits_are_invalid_never_a_near_tie(plain):
    measured = run(Engine(rounds=True, **tied()), plain(**tied()))
    assert red(losslessness.judge(measured, "bfloat16")) == {"LOS008": Verdict.INVALID}
    # In float32 nothing needs excusing, so nothing is missing.
    assert red(losslessness.judge(measured, "float32")) == {"LOS005": Verdict.FAIL}


def test_a_text_prompt_without_token_ids_cannot_be_resumed():
    text = [Prompt(f"t{i}", text="x" * (i + 1)) for i in range(8)]
    judgement = losslessness.judge(run(Engine(rounds=True, **tied()), Plain(**tied()), text), "bfloat16")
    assert red(judgement) == {"LOS008": Verdict.INVALID, "LOS012": Verdict.INCONCLUSIVE}


class NotDeterministic(Plain):
    calls = 0

    def next_token(self, context):
        self.calls += 1
        return (super().next_token(context) + (self.calls % 97 == 0)) % 997


class TurnsAtTies(Plain):
    calls = 0

    def generate(self, prompt, max_tokens):
        self.calls += 1
        self.rounds = self.calls % 2 == 0
        return super().generate(prompt, max_tokens)


def test_a_plain_endpoint_that_does_not_repeat_itself_blames_nobody():
    judgement = losslessness.judge(run(Engine(), NotDeterministic(), repeat=8), "bfloat16")
    assert red(judgement)["LOS009"] is Verdict.INVALID
    assert red(judgement)["LOS006"] is Verdict.INVALID
    assert judgement.verdict is Verdict.INVALID


def test_a_plain_endpoint_that_repeats_itself_up_to_near_ties_is_said_so():
    judgement = losslessness.judge(run(Engine(**tied()), TurnsAtTies(**tied()), repeat=8), "bfloat16")
    assert judgement.verdict is Verdict.PASS
    assert "LOS009" in codes(judgement)
    assert "only up to near-ties" in judgement.as_text()


def test_a_target_that_is_itself_wrong_is_told_from_a_drafter_that_is():
    class WrongTarget(Plain):
        def next_token(self, context):
            return (super().next_token(context) + 1) % 997

    truth = oracle(Plain())
    judgement = losslessness.judge(run(ChangesOneToken()), "bfloat16", oracle=truth)
    assert red(judgement) == dict.fromkeys(("LOS006", "LOS011", "LOS013"), Verdict.FAIL)
    assert "wrong alone too" in judgement.as_text()
    assert "same step" not in judgement.as_text()
    assert red(losslessness.judge(run(Engine(), WrongTarget()), "float32", oracle=truth))["LOS010"] is Verdict.FAIL


def test_a_canary_has_no_near_ties_to_excuse():
    judgement = losslessness.judge(
        run(Engine(rounds=True, **tied()), Plain(**tied())), "bfloat16", oracle=oracle(Plain(**tied()))
    )
    assert red(judgement) == {"LOS011": Verdict.FAIL, "LOS013": Verdict.FAIL}


def swap_rows(answers):
    answers[0], answers[1] = answers[1], answers[0]


def change_a_token(answers):
    """The last row gets a draft token that should have been rejected."""
    tokens = list(answers[-1].token_ids)
    tokens[40] = (tokens[40] + 1) % 997
    answers[-1] = dataclasses.replace(answers[-1], token_ids=tuple(tokens))


def drop_the_end(answers):
    answers[2] = dataclasses.replace(answers[2], token_ids=answers[2].token_ids[:-3])


def empty(answers):
    answers[1] = dataclasses.replace(answers[1], token_ids=())


SPOILS = [swap_rows, change_a_token, drop_the_end, empty]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_text_that_is_wrong_only_beside_other_requests_is_red(spoil, dtype, side_by_side):
    measured = run(Engine(), spoil=spoil, side_by_side=side_by_side)
    canary = losslessness.judge(measured, "bfloat16", oracle=oracle(Plain()))
    natural = losslessness.judge(measured, dtype)
    assert red(canary) == {"LOS013": Verdict.FAIL}
    assert red(natural) | {"LOS012": Verdict.INCONCLUSIVE} == {
        "LOS012": Verdict.INCONCLUSIVE,
        "LOS013": Verdict.FAIL,
    }, "a changed text may also be hard to follow to its end"
    assert "with 4 requests at once" in natural.as_text()
    assert "same step" in natural.as_text()


class RoundsBesideOthers(Engine):
    """A batch of several requests is computed in another shape, so it takes the other token of a tie."""

    def next_token(self, context):
        self.rounds = beside_others()
        return super().next_token(context)


@pytest.mark.parametrize(
    ("dtype", "gap", "plain", "found"),
    [
        ("bfloat16", 0.5, Plain, {}),
        ("bfloat16", 0.51, Plain, {"LOS013": Verdict.FAIL}),
        ("float32", 0.125, Plain, {"LOS013": Verdict.FAIL}),
        ("bfloat16", 0.125, NoLogits, {"LOS008": Verdict.INVALID}),
    ],
)
@pytest.mark.parametrize("side_by_side", [True, False])
def test_rounding_in_a_batch_of_several_is_excused_as_in_other_shapes(dtype, gap, plain, found, side_by_side):
    engine = RoundsBesideOthers(**tied(gap))
    judgement = losslessness.judge(run(engine, plain(**tied(gap)), side_by_side=side_by_side), dtype)
    assert red(judgement) == found
    if not found:
        assert codes(judgement) == ["LOS000", "LOS013"]
        assert "near-ties, the widest" in judgement.as_text()
        assert judgement.measurements["concurrent"]["compared_share"] == 1.0


def test_a_plain_endpoint_that_does_not_repeat_itself_blames_no_batch():
    measured = run(Engine(), NotDeterministic(), repeat=8, spoil=swap_rows)
    assert red(losslessness.judge(measured, "float32"))["LOS013"] is Verdict.INVALID


class PlainBesideOthers(Engine):
    """Speculation is off for batches of several requests."""

    def count(self, accepted):
        if not beside_others():
            super().count(accepted)


@pytest.mark.parametrize("truth", [None, oracle(Plain())])
@pytest.mark.parametrize(
    ("engine", "asked", "rows", "words"),
    [
        (Engine(), prompts(8), 1, "serves 4 requests at once"),
        (Engine(rate=0.5), prompts(8), 1, "serves 4 requests at once"),
        (PlainBesideOthers(), prompts(8), 4, "speculated with 4 requests at once"),
        (Engine(), prompts(1), 1, "nothing was seen"),
    ],
)
def test_equal_texts_that_were_not_seen_beside_others_are_invalid(engine, asked, rows, words, truth):
    truth = truth and {each.name: truth[each.name] for each in asked}
    judgement = losslessness.judge(run(engine, None, asked, rows=rows), "bfloat16", oracle=truth)
    assert red(judgement) == {"LOS014": Verdict.INVALID}
    assert "LOS013" not in codes(judgement)
    assert words in judgement.as_text()


@pytest.mark.parametrize(("n", "overlapping"), [(2, 1), (8, 6)])
def test_requests_that_were_served_beside_others_are_recorded(n, overlapping):
    judgement = losslessness.judge(run(Engine(), None, prompts(n), rows=min(n, 4)), "float32")
    concurrent = judgement.measurements["concurrent"]
    assert len(concurrent["overlapping"]) == overlapping
    assert [each["prompt"] for each in concurrent["requests"]] == [each.name for each in prompts(n)]
    assert concurrent["counts"]["drafts"] > 0


def test_too_many_near_ties_leave_too_little_compared():
    dense = {"ties": 0.5, "gap": 0.125}
    measured = run(Engine(rounds=True, **dense), Plain(**dense))
    assert max(len(each.segments) for each in measured.comparisons) == MAX_RESUMES + 1
    assert red(losslessness.judge(measured, "bfloat16")) == {"LOS012": Verdict.INCONCLUSIVE}


def test_an_oracle_for_other_prompts_and_an_unknown_dtype_are_refused():
    measured = run(Engine())
    with pytest.raises(UsageError, match="other prompts"):
        losslessness.judge(measured, "float32", oracle={"p00": ()})
    with pytest.raises(UsageError, match="unknown dtype"):
        losslessness.judge(measured, "int8")

"""Every way in which acceptance evidence can lie is put into a simulated engine and must come out red and named."""

from __future__ import annotations

import dataclasses

import pytest

from harness.errors import EvidenceError, ServerError, UsageError
from harness.measure import acceptance
from harness.measure.endpoint import Counts, Prompt, Witness
from harness.verdict import Judgement, Verdict
from tests.measure.simulated_engine import Engine, Fails, prompts, realistic_rates

K, TOKENS = 4, 64

# A perfect drafter: 1 token from prefill, then 5 per step, so 13 steps for 64 tokens, all 4 drafts accepted in each.
PERFECT = Counts(13, 52, 52, (13, 13, 13, 13))


def run(engine, n=12, k=K, settle_s=0.0):
    return acceptance.measure(engine, prompts(n), TOKENS, k, settle_s=settle_s)


def red(judgement: Judgement) -> dict[str, Verdict]:
    return {finding.code: finding.verdict for finding in judgement.findings if finding.verdict is not Verdict.PASS}


def oracle(n=12):
    return {prompt.name: PERFECT for prompt in prompts(n)}


def test_a_perfect_drafter_equals_its_oracle():
    judgement = acceptance.judge_exact(run(Engine()), oracle())
    assert judgement.verdict is Verdict.PASS
    assert [finding.code for finding in judgement.findings] == ["ACC000", "ACC020"]
    assert judgement.measurements["totals"] == {
        "drafts": 156,
        "draft_tokens": 624,
        "accepted": 624,
        "per_position": (156,) * 4,
    }


def test_counts_belong_to_their_prompt():
    rates = {prompt.name: float(i % 2) for i, prompt in enumerate(prompts(12))}
    measured = run(Engine(rate=rates))
    assert [record.counts.drafts for record in measured.prompts] == [63, 13] * 6


class DiesAtItsWitnesses(Engine):
    def witnesses(self):
        raise ServerError("it is gone")


@pytest.mark.parametrize(
    ("engine", "answered"), [(Fails(11, ServerError("it is gone")), 11), (DiesAtItsWitnesses(), 12)]
)
def test_a_server_that_fails_at_the_end_keeps_the_counts_and_is_invalid(engine, answered):
    kept = []
    measured = acceptance.measure(engine, prompts(12), TOKENS, K, settle_s=0.0, keep=kept.append)
    for judgement in (acceptance.judge_exact(measured, oracle(answered)), acceptance.judge_threshold(measured, 1.5)):
        assert red(judgement) == {"ACC013": Verdict.INVALID}
        assert "broken off: it is gone" in judgement.as_text()
        assert len(judgement.measurements["prompts"]) == answered
    assert [len(each.prompts) for each in kept] == list(range(1, answered + 1))
    assert not any(each.broken_off for each in kept)


def test_a_server_that_never_answered_is_an_error():
    with pytest.raises(ServerError, match="gone"):
        run(Fails(0, ServerError("it is gone")))


class Plain(Engine):
    def __init__(self):
        super().__init__(k=0)


class CountersUnderAPlainFlag(Engine):
    speculative = False


class Restarted(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        if prompt.name == "p02":
            self.totals, self.positions = [0, 0, 0], [0] * self.k
        return answer


class RestartedWithAnotherK(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        if prompt.name == "p02":
            self.positions.append(0)
        return answer


class CountersVanish(Engine):
    asked = 0

    def counters(self):
        self.asked += 1
        if self.asked > 3:
            raise EvidenceError("HTTP 404 at /metrics")
        return super().counters()


class Frozen(Engine):
    def count(self, accepted):
        pass


class NoPositions(Engine):
    def counters(self):
        return dataclasses.replace(super().counters(), per_position=())


class DraftsThree(Engine):
    def __init__(self):
        super().__init__(k=3)


class DraftsThreeOfFourPositions(Engine):
    """The flags say 4, so there are four positions, but three tokens are drafted."""

    fixed = 3

    def count(self, accepted):
        super().count(accepted)
        self.totals[1] -= 1


class DraftTokensTwice(Engine):
    def count(self, accepted):
        super().count(accepted)
        self.totals[1] += self.k


class Truncated(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        return dataclasses.replace(answer, token_ids=answer.token_ids[:-1]) if prompt.name == "p03" else answer


class Empty(Engine):
    def generate(self, prompt, max_tokens):
        return dataclasses.replace(super().generate(prompt, max_tokens), token_ids=())


class OneCounterOff(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        if prompt.name == "p02":
            self.totals[2] += 1
        return answer


class OnePositionOff(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        self.positions[1] += 1
        return answer


class PositionsShuffled(Engine):
    def __init__(self):
        super().__init__(rate=0.5)

    def counters(self):
        counters = super().counters()
        return dataclasses.replace(counters, per_position=counters.per_position[::-1])


class MoreAcceptedThanDrafted(Engine):
    def counters(self):
        counters = super().counters()
        return dataclasses.replace(counters, draft_tokens=counters.accepted - counters.drafts)


class StepsWithoutDrafts(Engine):
    """Every third step is plain: its token is not counted."""

    steps = 0

    def count(self, accepted):
        self.steps += 1
        if self.steps % 3:
            super().count(accepted)


class OtherTraffic(Engine):
    def generate(self, prompt, max_tokens):
        if prompt.name == "p05":
            super().generate(Prompt("somebody else's", token_ids=(1, 2, 3)), 32)
        return super().generate(prompt, max_tokens)


class TrafficBetweenPrompts(Engine):
    """The other client's request falls between two of ours."""

    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        if prompt.name == "p05":
            super().generate(Prompt("somebody else's", token_ids=(1, 2, 3)), 32)
        return answer


class ConstantCounters(Engine):
    """Simulated acceptance of the crudest kind: a fixed sum per request, whatever was generated."""

    added = (40, 160, 100, (40, 30, 20, 10))

    def generate(self, prompt, max_tokens):
        answer = Frozen.generate(self, prompt, max_tokens)
        drafts, draft_tokens, accepted, positions = self.added
        self.totals = [a + b for a, b in zip(self.totals, (drafts, draft_tokens, accepted), strict=True)]
        self.positions = [a + b for a, b in zip(self.positions, positions, strict=True)]
        return answer

    def count(self, accepted):
        pass


class ConstantCountersTooFew(ConstantCounters):
    added = (10, 40, 20, (10, 5, 3, 2))


@pytest.mark.parametrize(
    ("engine", "code"),
    [
        (Plain, "ACC001"),
        (CountersVanish, "ACC001"),
        (RestartedWithAnotherK, "ACC001"),
        (CountersUnderAPlainFlag, "ACC002"),
        (Restarted, "ACC003"),
        (Frozen, "ACC004"),
        (NoPositions, "ACC005"),
        (DraftsThree, "ACC006"),
        (DraftsThreeOfFourPositions, "ACC006"),
        (DraftTokensTwice, "ACC006"),
        (Truncated, "ACC007"),
        (Empty, "ACC007"),
        (OneCounterOff, "ACC008"),
        (OnePositionOff, "ACC008"),
        (PositionsShuffled, "ACC008"),
        (MoreAcceptedThanDrafted, "ACC008"),
        (StepsWithoutDrafts, "ACC009"),
        (ConstantCountersTooFew, "ACC009"),
        (OtherTraffic, "ACC010"),
        (TrafficBetweenPrompts, "ACC010"),
        (ConstantCounters, "ACC010"),
    ],
)
def test_evidence_that_lies_is_invalid_and_named(engine, code):
    measured = run(engine())
    for judgement in (acceptance.judge_exact(measured, oracle()), acceptance.judge_threshold(measured, 1.5)):
        assert set(red(judgement)) == {code}, judgement.as_text()
        assert judgement.verdict is Verdict.INVALID
        finding = judgement.findings[0]
        assert finding.expected
        assert finding.actual
        assert finding.remedy


class Simulated(Engine):
    """SGLang's SGLANG_SIMULATE_ACC_LEN=3: counters and tokens agree, but every step accepts two."""

    fixed = 2


def test_acceptance_that_never_varies_is_simulated():
    assert red(acceptance.judge_threshold(run(Simulated()), 1.5)) == {"ACC011": Verdict.INVALID}
    # A canary needs no such guess: its counts are wrong.
    assert red(acceptance.judge_exact(run(Simulated()), oracle())) == {"ACC020": Verdict.FAIL}


class Doubts(Engine):
    says = 9.0

    def witnesses(self):
        return (Witness("a gauge", "verify steps", self.says, 12.0, 12.0),)


class NoWitness(Engine):
    def witnesses(self):
        raise EvidenceError("HTTP 404 at /server_info")


def test_another_figure_of_the_engine_contradicts():
    judgement = acceptance.judge_exact(run(Doubts()), oracle())
    assert red(judgement) == {"ACC012": Verdict.INVALID}
    (finding,) = judgement.findings
    assert "12" in finding.expected
    assert "9" in finding.actual
    assert red(acceptance.judge_exact(run(NoWitness()), oracle())) == {"ACC001": Verdict.INVALID}


def test_another_figure_of_the_engine_agrees():
    class Agrees(Doubts):
        says = 12.0

    judgement = acceptance.judge_exact(run(Agrees()), oracle())
    assert judgement.verdict is Verdict.PASS
    assert "a gauge agrees" in judgement.findings[0].actual
    assert judgement.measurements["witnesses"][0]["agrees"]


def test_an_engine_may_answer_before_it_counts():
    class Late(Engine):
        hidden = 0

        def generate(self, prompt, max_tokens):
            self.shown = super().counters()
            self.hidden = 3
            return super().generate(prompt, max_tokens)

        def counters(self):
            self.hidden -= 1
            return self.shown if self.hidden >= 0 else super().counters()

    assert acceptance.judge_exact(run(Late(), settle_s=30.0), oracle()).verdict is Verdict.PASS
    assert red(acceptance.judge_exact(run(Late()), oracle())) == {"ACC009": Verdict.INVALID}


def test_an_engine_may_shorten_the_last_steps():
    class Shortens(Engine):
        """Drafts no more than are wanted: 64 = 1 + 12 * 5 + 3, so the last step drafts 2."""

        def generate(self, prompt, max_tokens):
            answer = super().generate(prompt, max_tokens)
            self.totals[1] -= 2
            self.totals[2] -= 2
            self.positions[2] -= 1
            self.positions[3] -= 1
            return answer

    measured = run(Shortens())
    assert acceptance.judge_exact(measured, dict.fromkeys(oracle(), Counts(13, 50, 50, (13, 13, 12, 12)))).verdict is (
        Verdict.PASS
    )


def test_outputs_that_end_by_themselves_are_accounted_for():
    measured = acceptance.measure(Engine(rate=0.6, eos=23), prompts(24, ignore_eos=False), TOKENS, K, settle_s=0.0)
    assert {record.finish_reason for record in measured.prompts} == {"stop", "length"}
    assert red(acceptance.judge_threshold(measured, 1.5)) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: dataclasses.replace(c, drafts=c.drafts + 1, draft_tokens=c.draft_tokens + 4), "13 drafts"),
        (lambda c: dataclasses.replace(c, accepted=51, per_position=(13, 13, 13, 12)), "positions before 3"),
    ],
)
def test_a_count_one_off_the_oracle_fails_and_names_the_prompt(change, words):
    """Within the overshoot of the last step, where no accounting can see it: only equality does."""
    measured = run(Engine())
    records = [
        dataclasses.replace(record, counts=change(record.counts)) if record.name in {"p04", "p07"} else record
        for record in measured.prompts
    ]
    judgement = acceptance.judge_exact(dataclasses.replace(measured, prompts=tuple(records)), oracle())
    assert red(judgement) == {"ACC020": Verdict.FAIL}
    text = judgement.as_text()
    assert "2 of 12 prompts" in text
    assert "'p04'" in text
    assert words in text


def test_the_first_position_is_told_from_the_later_ones():
    judgement = acceptance.judge_exact(run(Engine(rate=0.9)), oracle())
    assert "position 0 is accepted too rarely" in judgement.as_text()


def test_prompts_that_are_not_the_oracles_are_invalid():
    assert red(acceptance.judge_exact(run(Engine()), oracle(11))) == {"ACC021": Verdict.INVALID}
    assert red(acceptance.judge_exact(run(Engine()), {})) == {"ACC021": Verdict.INVALID}


@pytest.mark.parametrize("rate", [0.0, 0.005])
def test_a_dead_drafter_is_recognised_with_its_causes_in_order(rate):
    measured = run(Engine(rate=rate, seed=3), n=2)
    judgement = acceptance.judge_threshold(measured, 2.0)
    assert red(judgement) == {"ACC031": Verdict.FAIL}
    cause = judgement.findings[-1].cause
    assert "accept rate: 0.20" in cause
    assert cause.index("never landed") < cause.index("hidden states") < cause.index("d2t")
    assert "never landed" in acceptance.judge_exact(measured, oracle(2)).as_text()


def test_the_threshold_has_three_outcomes():
    measured = run(Engine(rate=realistic_rates(24, seed=1)), n=24)
    length = measured.totals.accept_length
    for minimum, verdict in ((length - 1, Verdict.PASS), (length + 1.5, Verdict.FAIL), (length, Verdict.INCONCLUSIVE)):
        judgement = acceptance.judge_threshold(measured, minimum)
        assert judgement.verdict is verdict, judgement.as_text()
        lower, upper = judgement.findings[-1].interval
        assert lower < length < upper
    near = acceptance.judge_threshold(measured, length + 0.1).findings[-1]
    assert near.verdict is Verdict.INCONCLUSIVE
    assert "prompts like these decide a difference of" in near.cause
    assert "prompts, or review" in near.remedy


def test_one_run_always_gets_one_verdict():
    measured = run(Engine(rate=realistic_rates(16, seed=2)), n=16)
    first, second = (acceptance.judge_threshold(measured, 2.0) for _ in range(2))
    assert first == second
    assert first.measurements["accept_length"]["seed"] == acceptance.SEED


def test_few_prompts_never_pass_however_long():
    judgement = acceptance.judge_threshold(run(Engine(rate=0.8), n=acceptance.MIN_PROMPTS - 1), 1.1)
    assert red(judgement) == {"ACC030": Verdict.INCONCLUSIVE}


@pytest.mark.parametrize("minimum", [0.0, 1.0, 5.01])
def test_a_threshold_that_cannot_fail_or_pass_is_refused(minimum):
    with pytest.raises(UsageError, match="minimum accept length"):
        acceptance.judge_threshold(run(Engine()), minimum)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], TOKENS, K), "no prompts"),
        ((prompts(1) * 2, TOKENS, K), "twice"),
        ((prompts(1), 1, K), "max_tokens"),
        ((prompts(1), TOKENS, 0), "K is 0"),
    ],
)
def test_a_measurement_that_could_see_nothing_is_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        acceptance.measure(Engine(), *arguments)


@pytest.mark.parametrize("content", [{}, {"text": ""}, {"token_ids": (1,), "text": "x"}])
def test_a_prompt_has_exactly_one_content(content):
    with pytest.raises(UsageError, match="exactly one"):
        Prompt("p", **content)


def test_a_failing_request_is_not_swallowed():
    class Fails(Engine):
        def next_token(self, context):
            raise ConnectionError(f"gone after {len(context)} tokens")

    with pytest.raises(ConnectionError, match="gone"):
        run(Fails())

"""A new version that is worse is red with its cause named, and one that cannot be compared is invalid."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from harness.errors import EvidenceError, ServerError, UsageError
from harness.measure import acceptance
from harness.measure.change import (
    ACCEPTANCE_TOLERANCE,
    ROUND,
    TURN,
    acceptance_change,
    measure_in_turns,
    measure_until_decided,
    throughput_change,
)
from harness.measure.endpoint import Counts
from harness.measure.sequential import ALPHA, EFFECT, plan
from harness.measure.statistics import POWER, paired_bounds
from harness.verdict import Judgement, Verdict
from tests.measure.simulated_engine import Engine, Fails, VirtualClock, prompts, realistic_rates
from tests.measure.simulations import SIMULATIONS, prompt_rates, slack, verify

TOKENS = 64


def red(judgement: Judgement) -> dict[str, Verdict]:
    assert judgement.suite == "upgrade"
    return {finding.code: finding.verdict for finding in judgement.findings if finding.verdict is not Verdict.PASS}


def accepted(engine, n=32, k=4, tokens=TOKENS, **settings):
    return acceptance.measure(engine, prompts(n, **settings), tokens, k, settle_s=0.0)


def engine(n=32, scale=1.0, **settings):
    rates = {name: scale * rate for name, rate in realistic_rates(n, 1).items()}
    return Engine(rate=rates, **settings)


class Positions(Engine):
    """A drafter that is right with its own probability at each position."""

    chances: tuple[float, ...] = ()

    def accepted_in_step(self, prompt, rng):
        return next((i for i in range(self.k) if rng.random() >= self.chances[i]), self.k)


def positions(*chances: float, seed: int = 0):
    made = Positions(k=len(chances), seed=seed)
    made.chances = chances
    return made


def test_a_version_compared_with_itself_passes_and_says_what_it_could_have_found():
    judgement = acceptance_change(accepted(engine()), accepted(engine()))
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    assert [finding.code for finding in judgement.findings] == ["ACC000", "ACC000", "CHG010", "CHG011"]
    length = judgement.findings[2]
    assert length.n == 32
    assert length.interval[0] < 1.0 < length.interval[1]
    for finding in judgement.findings[2:]:
        assert "alpha 5.0%" in finding.source
        assert "power 80% for a loss of" in finding.source
    assert judgement.measurements["accept_length_ratio"]["estimate"] == pytest.approx(1.0)


def test_even_no_tolerance_at_all_passes_where_every_count_is_the_same():
    judgement = acceptance_change(accepted(engine()), accepted(engine()), tolerance=0.0)
    assert judgement.verdict is Verdict.PASS, judgement.as_text()


def test_a_better_version_passes():
    assert acceptance_change(accepted(engine(scale=0.8)), accepted(engine())).verdict is Verdict.PASS


def test_halved_acceptance_fails_and_the_first_position_points_to_the_cause():
    judgement = acceptance_change(accepted(engine()), accepted(engine(scale=0.5)))
    assert red(judgement) == {"CHG010": Verdict.FAIL, "CHG011": Verdict.FAIL}
    assert "the first position that fell: position 0 is accepted too rarely" in judgement.as_text()


def test_a_later_position_that_fell_is_named():
    old, new = accepted(positions(0.7, 0.7, 0.7, 0.7)), accepted(positions(0.7, 0.7, 0.4, 0.7, seed=1))
    judgement = acceptance_change(old, new)
    finding = next(finding for finding in judgement.findings if finding.code == "CHG011")
    assert finding.verdict is Verdict.FAIL
    assert finding.summary == "acceptance fell at draft position 2"
    assert finding.cause.startswith("positions before 2 are as expected")


def test_a_dead_last_position_is_found_though_the_length_hardly_shows_it():
    good = (0.7,) * 7
    old, new = accepted(positions(*good), k=7, n=48), accepted(positions(*good[:6], 0.0), k=7, n=48)
    judgement = acceptance_change(old, new)
    length, by_position = judgement.findings[2:]
    assert length.verdict is not Verdict.FAIL
    assert by_position.verdict is Verdict.FAIL
    assert by_position.summary == "acceptance fell at draft position 6"


def test_a_small_loss_everywhere_fails_without_a_position_to_blame():
    judgement = acceptance_change(accepted(positions(*(0.7,) * 4)), accepted(positions(*(0.62,) * 4, seed=2)))
    assert red(judgement) == {"CHG010": Verdict.FAIL}
    assert "no single position is shown to have fallen" in judgement.as_text()


def test_a_drafter_that_died_is_called_dead():
    judgement = acceptance_change(accepted(engine()), accepted(engine(scale=0.0)))
    assert red(judgement) == {"CHG012": Verdict.FAIL}
    assert "drafter weights that never landed" in judgement.as_text()


def test_a_dead_old_side_has_nothing_to_lose():
    judgement = acceptance_change(accepted(engine(scale=0.0)), accepted(engine(scale=0.0)))
    assert red(judgement) == {"CHG002": Verdict.INVALID}


def test_a_drafter_that_the_new_side_brings_to_life_is_no_loss():
    judgement = acceptance_change(accepted(engine(scale=0.0)), accepted(engine()))
    assert judgement.verdict is Verdict.PASS
    assert "CHG002" in {finding.code for finding in judgement.findings}


def test_too_few_prompts_decide_nothing():
    judgement = acceptance_change(accepted(engine(), 11), accepted(engine(scale=0.5), 11))
    assert red(judgement) == {"CHG010": Verdict.INCONCLUSIVE}
    assert "12 prompts or more" in judgement.as_text()


def test_noise_is_inconclusive_and_says_how_many_prompts_would_do():
    judgement = acceptance_change(accepted(engine()), accepted(engine(scale=0.96, seed=1)))
    assert red(judgement) == {"CHG010": Verdict.INCONCLUSIVE}
    assert "prompts like these decide a difference of" in judgement.as_text()


def test_positions_that_nobody_reached_are_inconclusive():
    """Twelve short outputs, nothing accepted, too few steps to call anything dead."""
    dead = accepted(engine(scale=0.0), 12, tokens=3)
    judgement = acceptance_change(dead, dead)
    assert red(judgement)["CHG011"] is Verdict.INCONCLUSIVE


class CountersVanish(Engine):
    asked = 0

    def counters(self):
        self.asked += 1
        if self.asked > 20:
            raise EvidenceError("HTTP 404 at /metrics")
        return super().counters()


class Simulated(Engine):
    fixed = 2


@pytest.mark.parametrize(
    ("broken", "code"), [(Engine(k=0), "ACC001"), (CountersVanish(), "ACC001"), (Simulated(), "ACC011")]
)
@pytest.mark.parametrize("side", ["old", "new"])
def test_evidence_that_lacks_on_either_side_is_invalid_and_the_side_is_named(broken, code, side):
    sides = {"old": accepted(engine()), "new": accepted(engine())} | {side: accepted(dataclasses.replace(broken))}
    judgement = acceptance_change(**sides)
    assert red(judgement) == {code: Verdict.INVALID}
    if code == "ACC001":
        assert f"counters of {side} (simulated)" in judgement.as_text()


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (lambda: accepted(engine(), 31), "only old: p31"),
        (lambda: accepted(engine(), ignore_eos=False), "only new: p00"),
        (lambda: accepted(Engine(k=3), k=3), "K is not the same"),
        (lambda: accepted(engine(), tokens=48), "number of tokens"),
    ],
)
def test_sides_that_did_other_work_are_invalid(new, words):
    judgement = acceptance_change(accepted(engine()), new())
    assert red(judgement) == {"CHG001": Verdict.INVALID}
    assert words in judgement.as_text()


@pytest.mark.parametrize("arguments", [{"tolerance": 1.0}, {"tolerance": -0.1}, {"alpha": 0.0}, {"alpha": 0.5}])
def test_an_acceptance_rule_that_decides_nothing_is_refused(arguments):
    run = accepted(engine())
    with pytest.raises(UsageError):
        acceptance_change(run, run, **arguments)


def shares(old, new, factor, alpha=ALPHA):
    """Return how often new / old is called above and below `factor`, and how large a change would have been seen.

    Fewer resamples than in earnest, so the seed changes now and then: the chance in one set of them must not bias all.
    """
    bounds = [
        paired_bounds(
            (new[0][i], new[1][i]), (old[0][i], old[1][i]), factor=factor, alpha=alpha, seed=i // 50, resamples=1_000
        )
        for i in range(len(old[0]))
    ]
    return (
        np.mean([each.lower >= factor for each in bounds]),
        np.mean([each.upper < factor for each in bounds]),
        np.mean([each.detectable for each in bounds]),
    )


def lengths(counts):
    """Return tokens and steps of every prompt: their ratio is the accept length."""
    steps, per_position = counts
    return steps + per_position.sum(axis=2), steps


def at(position):
    """Return a function like `lengths` for the acceptance at a position, given the one before."""

    def tried(counts):
        steps, per_position = counts
        return per_position[..., position], per_position[..., position - 1] if position else steps

    return tried


def truth(of, mean, concentration, scale):
    """Return new / old over a population of prompts, where new acceptance rates are `scale` times the old ones."""
    rates = prompt_rates(1, 50_000, mean, concentration, np.random.default_rng(1))
    tops, bottoms = of(verify(rates, np.random.default_rng(2), scale=scale))
    old_tops, old_bottoms = of(verify(rates, np.random.default_rng(3)))
    return (tops.sum() / bottoms.sum()) / (old_tops.sum() / old_bottoms.sum())


@pytest.mark.parametrize(
    ("n", "mean", "concentration"),
    [
        # A general mix, prompts of one kind, and most prompts near the top or the bottom of the scale.
        (32, 0.6, 6.0),
        (16, 0.5, 40.0),
        (acceptance.MIN_PROMPTS, 0.85, 8.0),
        (acceptance.MIN_PROMPTS, 0.3, 3.0),
    ],
)
def test_acceptance_errs_no_more_often_than_stated(n, mean, concentration):
    """2,000 gates at the tolerance and 2,000 of a version with itself; outputs share nothing but their prompts."""
    rng = np.random.default_rng(20_250_401)
    rates = prompt_rates(SIMULATIONS, n, mean, concentration, rng)
    edge = truth(lengths, mean, concentration, 0.94)
    old, worse, same = (lengths(verify(rates, rng, scale=scale)) for scale in (1.0, 0.94, 1.0))
    passed, failed, _ = shares(old, worse, edge)
    assert passed <= ALPHA + slack(ALPHA)
    assert failed <= ALPHA + slack(ALPHA)
    # Bounds that never decide would pass the above.
    assert passed + failed > ALPHA
    _, alarms, _ = shares(old, same, 1.0 - ACCEPTANCE_TOLERANCE)
    assert alarms <= ALPHA / 2


def test_acceptance_has_its_power_at_the_effect_and_at_what_it_says_it_can_detect():
    rng = np.random.default_rng(20_250_401)
    rates = prompt_rates(SIMULATIONS, 24, 0.6, 6.0, rng)
    old, worse = (lengths(verify(rates, rng, scale=scale)) for scale in (1.0, 0.825))
    there = truth(lengths, 0.6, 6.0, 0.825)
    assert there == pytest.approx(1 - EFFECT, abs=0.005)
    _, failed, detectable = shares(old, worse, 1.0 - ACCEPTANCE_TOLERANCE)
    assert failed >= POWER
    _, failed, _ = shares(old, worse, there + detectable)
    assert POWER - slack(POWER) <= failed < POWER + 0.08


@pytest.mark.parametrize("position", [0, 3])
def test_a_position_at_the_tolerance_is_rarely_said_to_have_fallen(position):
    rng = np.random.default_rng(20_250_401)
    alpha = ALPHA / 4
    rates = prompt_rates(SIMULATIONS, 16, 0.6, 6.0, rng)
    scale = np.where(np.arange(4) == position, 1.0 - ACCEPTANCE_TOLERANCE, 1.0)
    old, worse = (at(position)(verify(rates, rng, scale=each)) for each in (1.0, scale))
    _, failed, _ = shares(old, worse, truth(at(position), 0.6, 6.0, scale), alpha)
    assert 0 < failed <= alpha + slack(alpha)


def test_steps_taken_as_samples_break_alpha_in_the_same_simulation():
    """Versions that differ from prompt to prompt, and on the whole just as far as at the edge."""

    def versions(runs, n, rng):
        rates = prompt_rates(runs, n, 0.6, 6.0, rng)
        other = np.clip(rates * rng.choice([0.7, 1.3], rates.shape), 0.0, 1.0)
        return verify(rates, rng), verify(other, rng)

    def tokens_per_step(steps, per_position):
        """Return mean and variance of the tokens of a step, and the steps, of each run."""
        n, reached = steps.sum(axis=1), per_position.sum(axis=1)
        mean = 1 + reached.sum(axis=1) / n
        # An accepted length a is the sum of 1 over the positions below it, and a * a that of 1, 3, 5, ...
        return mean, reached @ [1, 3, 5, 7] / n - (mean - 1) ** 2, n

    (old_mean, _, _), (new_mean, _, _) = (
        tokens_per_step(*each) for each in versions(1, 50_000, np.random.default_rng(1))
    )
    edge = float(new_mean[0] / old_mean[0])
    old, new = versions(SIMULATIONS, 16, np.random.default_rng(20_250_401))
    passed, failed, _ = shares(lengths(old), lengths(new), edge)
    assert max(passed, failed) <= ALPHA + slack(ALPHA)
    (before, old_variance, old_n), (after, new_variance, new_n) = tokens_per_step(*old), tokens_per_step(*new)
    error = np.sqrt(new_variance / new_n + edge**2 * old_variance / old_n)
    assert np.mean((after - edge * before) / error < -1.645) > 2 * ALPHA + slack(ALPHA)


def served(
    old=None, new=None, ladder=(1,), n=6, tokens=32, clock=None, max_seconds=math.inf, rule=None, keep=lambda _: None,
    **settings,
):  # fmt: skip
    """Measure on virtual time."""
    clock = clock or VirtualClock()
    old, new = old or Engine(label="old"), new or Engine(label="new")
    old.clock = new.clock = clock
    return measure_until_decided(
        old,
        new,
        prompts(n, **settings),
        tokens,
        concurrency_ladder=ladder,
        plan=rule or plan(loads=len(ladder)),
        max_seconds=max_seconds,
        keep=keep,
        clock=clock,
    )


def test_equal_versions_pass_at_the_first_look_at_every_load():
    run = served(Engine(label="old", noise=0.02), Engine(label="new", noise=0.02, seed=1), ladder=(1, 2))
    judgement = throughput_change(run)
    assert [finding.code for finding in judgement.findings] == ["CHG020", "CHG020"]
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    assert run.ended == {1: "decided", 2: "decided"}
    assert "alpha 5.0% for a wrong PASS" in judgement.as_text()
    assert (
        "planned for a loss of 15.0% with power 80%; these data show with that power a loss of" in judgement.as_text()
    )
    assert len(judgement.measurements["new_rounds"]) == len(run.new_rounds)


def test_rounds_alternate_and_every_one_is_recorded():
    run = served(Engine(label="old", noise=0.9, seed=1), Engine(label="new", noise=0.9, seed=2), n=1)
    assert run.ended == {1: "pairs"}
    order = "".join("A" if each.label == "new" else "B" for each in run.rounds)
    assert order == "AB" + "ABBABAAB" * 6
    assert [each.order for each in run.rounds] == list(range(50))
    judgement = throughput_change(run)
    assert red(judgement) == {"CHG020": Verdict.INCONCLUSIVE}
    assert "log ratios vary with a standard deviation of" in judgement.as_text()


GONE = ServerError("the server is gone", remedy="read its log")
LOAD = 6 + 4 * 6 * ROUND
"""Requests to each side at the first load: a warm-up, and the pairs up to the first look, which decides."""


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_server_that_fails_in_the_last_round_keeps_the_others_and_is_invalid(side):
    kept = []
    run = served(**{side: Fails(LOAD - 1, GONE, label=side)}, keep=kept.append)
    judgement = throughput_change(run)
    assert red(judgement) == {"CHG005": Verdict.INVALID}
    assert "broken off: the server is gone" in judgement.as_text()
    assert "3 pairs at concurrency 1" in judgement.as_text()
    assert not judgement.measurements["in_turns"]
    assert [len(each.pairs(1)) for each in kept] == [1, 2, 3]
    with pytest.raises(ServerError, match="gone"):
        served(**{side: Fails(6, GONE, label=side)})


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASS), (1.5, Verdict.FAIL)])
def test_a_load_that_was_decided_before_a_server_failed_stands(factor, verdict):
    new = Fails(LOAD, GONE, label="new", step_s=factor * Engine.step_s)
    judgement = throughput_change(served(new=new, ladder=(1, 2)))
    assert [finding.code for finding in judgement.findings] == ["CHG020", "CHG005"]
    assert judgement.findings[0].verdict is verdict
    assert "0 pairs at concurrency 2" in judgement.as_text()
    assert judgement.verdict is (Verdict.FAIL if verdict is Verdict.FAIL else Verdict.INVALID)


def test_an_interrupt_leaves_the_rounds_that_were_kept():
    kept = []
    with pytest.raises(KeyboardInterrupt):
        served(new=Fails(LOAD - 1, KeyboardInterrupt(), label="new"), keep=kept.append)
    assert len(kept[-1].pairs(1)) == 3


def slower(factor, **settings):
    return Engine(label="new", step_s=factor * Engine.step_s, noise=0.02, seed=3, **settings)


def test_a_slower_step_fails_and_is_the_cause():
    judgement = throughput_change(served(Engine(label="old", noise=0.02), slower(1.15)))
    assert red(judgement) == {"CHG020": Verdict.FAIL}
    assert "step time: a step takes 1.1" in judgement.as_text()
    assert "CUDA graphs" in judgement.as_text()


def test_fewer_tokens_per_step_fail_and_are_the_cause():
    judgement = throughput_change(served(Engine(label="old", noise=0.02), slower(1.0, rate=0.5)))
    assert red(judgement) == {"CHG020": Verdict.FAIL}
    assert "accept length: a step yields 0." in judgement.as_text()
    assert "CHG010" in judgement.as_text()


def test_both_at_once_are_both_named():
    judgement = throughput_change(served(Engine(label="old", noise=0.02, rate=0.9), slower(1.3, rate=0.75)))
    assert red(judgement) == {"CHG020": Verdict.FAIL}
    assert "both: a step yields" in judgement.as_text()


def test_a_step_that_got_dearer_and_yields_more_is_judged_by_the_speed():
    """The yield rose, but by less than the time of a step: the step is the cause, and the factors multiply."""
    finding = throughput_change(served(Engine(label="old", rate=0.75, noise=0.02), slower(2.0, rate=0.9))).findings[0]
    assert finding.verdict is Verdict.FAIL
    assert finding.cause.startswith("step time")
    words = finding.actual.split()
    ratio, tokens, steps = (float(words[i]) for i in (0, 2, words.index("x") + 1))
    assert ratio == pytest.approx(tokens * steps, abs=2e-3)


def test_plain_versions_are_compared_without_a_yield():
    plain = {"k": 0, "noise": 0.02}
    judgement = throughput_change(served(Engine(label="old", **plain), slower(1.15, k=0)))
    assert red(judgement) == {"CHG020": Verdict.FAIL}
    assert "tokens per step;" not in judgement.as_text()
    assert throughput_change(served(Engine(label="old", **plain), Engine(label="new", **plain))).verdict is Verdict.PASS


def test_time_that_is_used_up_is_shared_among_loads_and_inconclusive():
    run = served(
        Engine(label="old", noise=0.9, seed=1),
        Engine(label="new", noise=0.9, seed=2),
        (1, 2),
        n=1,
        max_seconds=400 * Engine.step_s,
    )
    assert run.ended == {1: "seconds", 2: "seconds"}
    measured = [len(run.pairs(concurrency)) for concurrency in (1, 2)]
    assert all(0 < pairs < 24 for pairs in measured)
    judgement = throughput_change(run)
    assert red(judgement) == {"CHG020": Verdict.INCONCLUSIVE}
    assert f"the time was used up after {measured[0]} pairs" in judgement.as_text()


def test_time_that_is_used_up_at_once_decides_nothing():
    judgement = throughput_change(served(max_seconds=Engine.step_s))
    assert red(judgement) == {"CHG020": Verdict.INCONCLUSIVE}
    assert "no pair of rounds was run" in judgement.as_text()


class Idle(Engine):
    def count(self, accepted):
        pass


class Cuts(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        return dataclasses.replace(answer, token_ids=answer.token_ids[:-2]) if prompt.name == "p04" else answer


class Secret(Engine):
    speculative = False


@pytest.mark.parametrize("side", ["old", "new"])
@pytest.mark.parametrize(
    ("broken", "codes"),
    [
        (Idle, {"THR001"}),
        (Cuts, {"THR003"}),
        (lambda **_: Engine(k=0, label="plain"), {"CHG003"}),
        (Secret, {"CHG003", "THR002"}),
    ],
)
def test_rounds_that_cannot_be_compared_are_invalid(broken, codes, side):
    judgement = throughput_change(served(**{side: broken(label=side)}))
    assert red(judgement) == dict.fromkeys(codes, Verdict.INVALID)


def test_a_busy_client_is_invalid():
    run = served()
    busy = tuple(dataclasses.replace(each, client_cpu_s=0.8 * each.seconds) for each in run.old_rounds)
    run = dataclasses.replace(run, old_rounds=busy)
    assert red(throughput_change(run)) == {"THR004": Verdict.INVALID}


@pytest.mark.parametrize(
    "tampered",
    [
        # The worst round of one side is left out; the last pair is; a load is.
        lambda run: dataclasses.replace(run, old_rounds=(*run.old_rounds[:3], *run.old_rounds[4:])),
        lambda run: dataclasses.replace(run, old_rounds=run.old_rounds[:-1], new_rounds=run.new_rounds[:-1]),
        lambda run: dataclasses.replace(run, ended={}),
        lambda run: dataclasses.replace(run, plan=plan(loads=2)),
    ],
)
def test_rounds_left_out_after_the_fact_are_invalid(tampered):
    run = served()
    assert throughput_change(run).verdict is Verdict.PASS
    assert set(red(throughput_change(tampered(run))).values()) == {Verdict.INVALID}
    assert "CHG004" in red(throughput_change(tampered(run)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": plan(loads=2)}, "a plan for 2 loads"),
        ({"ladder": ()}, "ladder"),
        ({"n": 0}, "no prompts"),
        ({"max_seconds": 0}, "budget of 0 seconds"),
    ],
)
def test_a_comparison_that_could_show_nothing_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        served(**{"rule": plan(), **settings})


def test_counts_of_a_round_are_what_the_yield_is_taken_from():
    run = served()
    assert run.new_rounds[0].counts == Counts(42, 168, 168, (42,) * 4)


class Starts:
    """What was started, in order. Speeds of starts differ by `spread`; the start numbered `fails` does not come up."""

    def __init__(self, spread=0.0, fails=None, **new):
        self.order, self.clock, self.spread, self.fails = [], VirtualClock(), spread, fails
        self.settings = {"old": {}, "new": new}
        self.noise = np.random.default_rng(3)

    def start(self, label):
        if len(self.order) == self.fails:
            raise ServerError("the server did not start", remedy="read its log")
        self.order.append(label)
        settings = {"step_s": Engine.step_s, **self.settings[label]}
        settings["step_s"] *= math.exp(self.spread * self.noise.normal())
        return Engine(label=label, clock=self.clock, seed=len(self.order), **settings)

    def measure(self, ladder=(1,), max_pairs=8, **more):
        return measure_in_turns(
            lambda: self.start("old"),
            lambda: self.start("new"),
            prompts(3),
            32,
            concurrency_ladder=ladder,
            plan=plan(max_pairs=max_pairs, looks=max_pairs // 4, loads=len(ladder)),
            clock=self.clock,
            **more,
        )


def test_releases_that_take_turns_start_anew_for_each_round_until_decided():
    starts = Starts(spread=0.005)
    run = starts.measure(ladder=(1, 2))
    judgement = throughput_change(run)
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    assert starts.order == [{"A": "new", "B": "old"}[side] for side in "ABBABAAB"], "the first look decides"
    assert run.ended == {1: "decided", 2: "decided"}
    assert judgement.measurements["in_turns"] is True
    assert "each on a server started for it" in judgement.as_text()
    lengths = {(each.concurrency, each.pair is None): len(each.requests) for each in run.rounds}
    assert lengths == {(1, True): 3, (1, False): 3 * TURN, (2, True): 6, (2, False): 6 * TURN}


def test_a_slower_release_fails_though_it_takes_turns_and_starts_differ():
    judgement = throughput_change(Starts(spread=0.02, step_s=1.15 * Engine.step_s).measure())
    assert red(judgement) == {"CHG020": Verdict.FAIL}
    assert "step time" in judgement.as_text()


def test_starts_that_differ_as_much_as_a_loss_decide_nothing():
    starts = Starts(spread=0.3)
    judgement = throughput_change(starts.measure())
    assert red(judgement) == {"CHG020": Verdict.INCONCLUSIVE}
    assert len(starts.order) == 16


class Unsteady(Engine):
    """Steady for the requests of its first load, 3 to warm up and 3 x TURN; later ones take its start's own time."""

    asked = 0

    def generate(self, prompt, max_tokens):
        self.asked += 1
        if self.asked == 3 + 3 * TURN + 1:
            self.step_s *= math.exp(self._noise.uniform(-1, 1))
        return super().generate(prompt, max_tokens)


def test_a_load_that_is_decided_is_not_put_on_again():
    starts = Starts()
    steady = starts.start
    starts.start = lambda label: Unsteady(label=label, clock=starts.clock, seed=steady(label).seed)
    run = starts.measure(ladder=(1, 2))
    assert [len(run.pairs(concurrency)) for concurrency in (1, 2)] == [4, 8]
    assert red(throughput_change(run)) == {"CHG020": Verdict.INCONCLUSIVE}


def test_a_start_that_fails_later_keeps_what_was_measured_and_says_so():
    kept = []
    run = Starts(fails=5).measure(keep=kept.append)
    judgement = throughput_change(run)
    assert red(judgement) == {"CHG005": Verdict.INVALID}
    assert "broken off: the server did not start" in judgement.as_text()
    assert "remedy: read its log" not in judgement.as_text().split("mend")[0], "one line, not the whole scene"
    assert "2 pairs at concurrency 1" in judgement.as_text()
    assert len(judgement.measurements["new_rounds"]) == 2 * 2
    assert [len(each.pairs(1)) for each in kept] == [1, 2]
    with pytest.raises(ServerError, match="did not start"):
        Starts(fails=1).measure()


@pytest.mark.parametrize(("step_s", "verdict"), [(Engine.step_s, Verdict.PASS), (2 * Engine.step_s, Verdict.FAIL)])
def test_what_was_decided_before_a_start_failed_stands(step_s, verdict):
    starts = Starts(fails=10)
    steady = starts.start
    starts.start = lambda label: Unsteady(
        label=label, clock=starts.clock, seed=steady(label).seed, step_s=step_s if label == "new" else Engine.step_s
    )
    judgement = throughput_change(starts.measure(ladder=(1, 2)))
    assert [finding.code for finding in judgement.findings] == ["CHG020", "CHG005"]
    assert judgement.findings[0].verdict is verdict
    assert judgement.verdict is (Verdict.FAIL if verdict is Verdict.FAIL else Verdict.INVALID)


def test_rounds_that_claim_to_be_broken_off_for_no_reason_are_invalid():
    run = dataclasses.replace(Starts(fails=5).measure(), broken_off="")
    assert "CHG004" in red(throughput_change(run))

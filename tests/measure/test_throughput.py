"""Rounds are run in order and recorded whole; a speed-up is judged from all of them, and a rigged one is invalid."""

from __future__ import annotations

import dataclasses
import math
import re
import threading

import numpy as np
import pytest

from harness.errors import EvidenceError, UsageError
from harness.measure import throughput
from harness.measure.endpoint import Counts
from harness.measure.load import RequestRecord, Round
from harness.verdict import Judgement, Verdict
from tests.measure.simulated_engine import Engine, Fails, VirtualClock, prompts

TOKENS = 32


def red(judgement: Judgement) -> dict[str, Verdict]:
    return {finding.code: finding.verdict for finding in judgement.findings if finding.verdict is not Verdict.PASS}


def run(spec=None, plain=None, ladder=(1,), rounds=4, n=6, keep=lambda _: None, interleaved=True, **settings):
    """Measure on virtual time: a verify step of the default engines takes 1.5 plain steps."""
    clock = VirtualClock()
    spec = spec or Engine(step_s=15.0)
    plain = plain or Engine(k=0, label="plain")
    spec.clock = plain.clock = clock
    return throughput.measure(
        spec,
        plain,
        prompts(n, **settings),
        TOKENS,
        concurrency_ladder=ladder,
        rounds=rounds,
        interleaved=interleaved,
        keep=keep,
        clock=clock,
    )


def test_servers_that_take_turns_are_measured_one_after_the_other_and_it_is_said():
    spec, plain = Engine(step_s=15.0), Engine(k=0, label="plain")
    spec.clock = plain.clock = clock = VirtualClock()
    measured = throughput.measure(
        spec, plain, prompts(6), TOKENS, concurrency_ladder=(1, 2), rounds=2, interleaved=False, clock=clock
    )
    assert [each.speculative for each in measured.rounds] == [False] * 6 + [True] * 6
    assert [each.concurrency for each in measured.rounds] == [1, 1, 1, 2, 2, 2] * 2
    judgement = throughput.judge(measured, {1: 1.0, 2: 1.0})
    assert judgement.verdict is Verdict.PASS
    assert "all without speculation before all with" in judgement.findings[0].source


def test_rounds_alternate_a_b_b_a_b_a_a_b_after_a_recorded_warm_up():
    measured = run(rounds=4, ladder=(1, 2))
    for concurrency in (1, 2):
        rounds = [each for each in measured.rounds if each.concurrency == concurrency]
        assert "".join("A" if each.speculative else "B" for each in rounds) == "AB" + "ABBABAAB"
        assert [each.pair for each in rounds] == [None, None, 0, 0, 1, 1, 2, 2, 3, 3]
        assert len(measured.pairs(concurrency)) == 4
    assert [each.order for each in measured.rounds] == list(range(20))


def test_a_round_records_every_request_and_what_was_counted():
    measured = run()
    each = measured.rounds[2]
    assert [request.prompt for request in each.requests] == [prompt.name for prompt in prompts(6)]
    # 32 tokens from a perfect drafter: 1 + 6 * 5 + 1, so 7 verify steps and 15 s each, prefill included.
    assert [request.tokens for request in each.requests] == [TOKENS] * 6
    assert each.counts == Counts(42, 168, 168, (42,) * 4)
    assert each.seconds == pytest.approx(6 * 8 * 15.0)
    assert each.requests[1].started == pytest.approx(8 * 15.0)
    assert each.client_cpu_s >= 0
    assert measured.rounds[3].counts is None
    assert "no metric" in measured.rounds[3].missing


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 6), (3, 6), (4, 12), (16, 36)])
def test_a_round_is_a_closed_loop_with_every_prompt_equally_often(concurrency, requests):
    class Counting(Engine):
        inside = most = 0

        def generate(self, prompt, max_tokens):
            with self.gate:
                self.inside += 1
                self.most = max(self.most, self.inside)
                if self.inside == concurrency:
                    self.full.set()
            # All workers are inside at once, or this waits in vain.
            assert self.full.wait(30)
            answer = super().generate(prompt, max_tokens)
            with self.gate:
                self.inside -= 1
            return answer

    spec = Counting(step_s=15.0)
    spec.gate, spec.full = threading.Lock(), threading.Event()
    measured = run(spec, ladder=(concurrency,), rounds=2)
    assert spec.most == concurrency
    names = [request.prompt for request in measured.rounds[0].requests]
    assert len(names) == requests
    assert {names.count(prompt.name) for prompt in prompts(6)} == {requests // 6}


def test_a_worker_that_fails_is_not_swallowed():
    class Fails(Engine):
        def generate(self, prompt, max_tokens):
            if prompt.name == "p03":
                raise ConnectionError("gone")
            return super().generate(prompt, max_tokens)

    with pytest.raises(ConnectionError):
        run(Fails(), ladder=(2,))


GONE = ConnectionError("gone")
WARM_UP = ROUND = 6
"""Requests of each side."""


@pytest.mark.parametrize("side", ["spec", "plain"])
def test_a_server_that_fails_in_the_last_round_keeps_the_others_and_is_invalid(side):
    kept = []
    failing = Fails(WARM_UP + 4 * ROUND - 1, GONE, k=4 if side == "spec" else 0, label=side, step_s=15.0)
    measured = run(**{side: failing}, keep=kept.append)
    judgement = throughput.judge(measured, {1: 1.0})
    assert red(judgement) == {"THR006": Verdict.INVALID}
    assert "broken off: ConnectionError: gone" in judgement.as_text()
    # The fourth pair is A B: its second round is lost, or both are.
    assert len(judgement.measurements["rounds"]) == 2 + 3 * 2 + (side == "plain")
    assert [len(each.pairs(1)) for each in kept] == [1, 2, 3]


def test_a_server_that_does_not_start_again_keeps_the_other_ones_rounds():
    kept = []
    measured = run(Fails(0, GONE), interleaved=False, rounds=2, keep=kept.append)
    assert [each.speculative for each in measured.rounds] == [False] * 3
    assert red(throughput.judge(measured, {1: 1.0})) == {"THR006": Verdict.INVALID}
    assert [len(each.rounds) for each in kept] == [2, 3]


def test_rounds_that_are_all_there_are_not_believed_where_they_say_that_they_were_broken_off():
    measured = dataclasses.replace(run(), broken_off="gone")
    assert red(throughput.judge(measured, {1: 1.0})) == {"THR006": Verdict.INVALID}


def test_an_interrupt_leaves_the_rounds_that_were_kept():
    kept = []
    with pytest.raises(KeyboardInterrupt):
        run(Fails(WARM_UP + 4 * ROUND - 1, KeyboardInterrupt()), keep=kept.append)
    assert len(kept[-1].pairs(1)) == 3


def test_a_speed_up_passes_and_is_taken_apart():
    judgement = throughput.judge(run(), {1: 2.5})
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    # 32 steps of 10 s against 8 of 15 s.
    assert "2.667x = 4.00 tokens per step / 1.50" in judgement.as_text()
    assert "speculation pays at every load measured" in judgement.as_text()


def test_a_slower_engine_fails_and_the_cost_of_a_step_is_named():
    judgement = throughput.judge(run(Engine(step_s=80.0)), {1: 1.0})
    assert red(judgement) == {"THR010": Verdict.FAIL}
    assert "a step that yields 4.00 tokens takes 8.00 times a plain step" in judgement.as_text()
    assert "speculation stops paying at concurrency 1" in judgement.as_text()


def test_a_dead_drafter_is_named_as_the_cause():
    judgement = throughput.judge(run(Engine(rate=0.0, step_s=15.0)), {1: 1.2})
    assert red(judgement) == {"THR010": Verdict.FAIL}
    assert "the drafter is dead" in judgement.as_text()


def test_noise_is_inconclusive_and_says_what_would_do():
    noisy = run(Engine(step_s=15.0, noise=0.9, seed=1), Engine(k=0, noise=0.9, seed=2), n=1, rounds=6)
    judgement = throughput.judge(noisy, {1: 2.5})
    assert red(judgement) == {"THR010": Verdict.INCONCLUSIVE}
    assert "pairs that vary like these decide a difference of" in judgement.as_text()
    assert "pairs, or quieten" in judgement.as_text() or "review the threshold" in judgement.as_text()


class Forgotten(Engine):
    def __init__(self):
        super().__init__(k=0)


class Idle(Engine):
    def count(self, accepted):
        pass


class Restarts(Engine):
    calls = 0

    def generate(self, prompt, max_tokens):
        self.calls += 1
        if self.calls == 20:
            self.totals = [0, 0, 0]
        return super().generate(prompt, max_tokens)


class CountersVanish(Engine):
    asked = 0

    def counters(self):
        self.asked += 1
        if self.asked > 5:
            raise EvidenceError("HTTP 404 at /metrics")
        return super().counters()


@pytest.mark.parametrize("spec", [Forgotten, Idle, Restarts, CountersVanish])
def test_speed_without_speculation_is_invalid(spec):
    assert red(throughput.judge(run(spec()), {1: 1.0})) == {"THR001": Verdict.INVALID}


class SecretlySpeculates(Engine):
    speculative = False


@pytest.mark.parametrize("plain", [Engine, SecretlySpeculates])
def test_a_plain_endpoint_that_speculates_is_invalid(plain):
    assert red(throughput.judge(run(plain=plain()), {1: 1.0})) == {"THR002": Verdict.INVALID}


class Cuts(Engine):
    def generate(self, prompt, max_tokens):
        answer = super().generate(prompt, max_tokens)
        return dataclasses.replace(answer, token_ids=answer.token_ids[:-2]) if prompt.name == "p04" else answer


def test_outputs_that_are_cut_are_invalid():
    judgement = throughput.judge(run(Cuts()), {1: 1.0})
    assert red(judgement) == {"THR003": Verdict.INVALID}
    assert "'p04'" in judgement.as_text()


def test_sides_that_generate_different_amounts_are_invalid():
    assert red(throughput.judge(run(Cuts(), ignore_eos=False), {1: 1.0})) == {"THR003": Verdict.INVALID}
    assert red(throughput.judge(run(Engine(eos=23), Engine(k=0, eos=23), ignore_eos=False), {1: 1.0})).keys() <= {
        "THR010"
    }


@pytest.mark.parametrize("speculative", [True, False])
def test_a_busy_client_is_invalid_on_either_side(speculative):
    measured = run()
    rounds = tuple(
        dataclasses.replace(each, client_cpu_s=0.8 * each.seconds) if each.speculative is speculative else each
        for each in measured.rounds
    )
    judgement = throughput.judge(dataclasses.replace(measured, rounds=rounds), {1: 1.0})
    assert red(judgement) == {"THR004": Verdict.INVALID}
    label = measured.spec_label if speculative else measured.plain_label
    pairs = len(measured.pairs(1))
    assert f"beyond it in {pairs} of {pairs} rounds on {label}; in the first 80%" in judgement.as_text()


def waited(each, seconds):
    """Return the round with a first request that waited so long to be sent."""
    first = dataclasses.replace(each.requests[0], before_s=seconds)
    return dataclasses.replace(each, requests=(first, *each.requests[1:]))


@pytest.mark.parametrize(("stumbles", "invalid"), [(1, False), (2, False), (3, False), (4, True), (5, True), (8, True)])
@pytest.mark.parametrize("speculative", [True, False])
def test_a_client_that_stumbles_in_fewer_than_half_of_the_rounds_is_noise(stumbles, invalid, speculative):
    """However long: the wait of one request may be more than 5 % of all that the side's requests took."""
    measured = run(rounds=8)
    rounds = [*measured.rounds]
    side = [index for index, each in enumerate(rounds) if each.speculative is speculative and each.pair is not None]
    for index in side[:stumbles]:
        rounds[index] = waited(rounds[index], 0.5 * sum(each.seconds for each in rounds))
    judgement = throughput.judge(dataclasses.replace(measured, rounds=tuple(rounds)), {1: 1.0})
    assert ("THR004" in red(judgement)) is invalid
    if invalid:
        assert f"beyond it in {stumbles} of 8 rounds" in judgement.as_text()


def test_what_the_client_does_in_a_warm_up_does_not_count():
    measured = run()
    rounds = tuple(
        dataclasses.replace(each, client_cpu_s=0.8 * each.seconds) if each.pair is None else each
        for each in measured.rounds
    )
    assert "THR004" not in red(throughput.judge(dataclasses.replace(measured, rounds=rounds), {1: 1.0}))


def test_one_round_whose_waits_are_not_known_is_invalid():
    measured = run(rounds=8)
    rounds = [*measured.rounds]
    rounds[7] = waited(rounds[7], None)
    judgement = throughput.judge(dataclasses.replace(measured, rounds=tuple(rounds)), {1: 1.0})
    assert red(judgement) == {"THR004": Verdict.INVALID}
    assert "not measured at concurrency 1" in judgement.as_text()
    assert "beyond it in 1 of 8 rounds" in judgement.as_text()


@pytest.mark.parametrize("wait", ["send_s", "receive_s"])
def test_requests_that_wait_for_the_client_are_invalid(wait):
    """A request takes 8 steps of 15 s, 5 % of which is 6 s."""
    assert throughput.judge(run(Engine(step_s=15.0, **{wait: 5.0})), {1: 2.5}).verdict is Verdict.PASS
    judgement = throughput.judge(run(Engine(step_s=15.0, **{wait: 7.0})), {1: 2.5})
    assert red(judgement) == {"THR004": Verdict.INVALID}
    assert "requests waited for the load client at concurrency 1" in judgement.as_text()
    assert re.search(r"max 70\d\d\.", judgement.as_text())


@pytest.mark.parametrize("wait", ["send_s", "receive_s"])
def test_waits_that_were_not_measured_are_invalid(wait):
    judgement = throughput.judge(run(Engine(step_s=15.0, **{wait: None})), {1: 2.5})
    assert red(judgement) == {"THR004": Verdict.INVALID}
    assert "not measured" in judgement.as_text()


def test_the_record_states_the_headroom_of_each_round():
    rounds = run(Engine(step_s=15.0, send_s=1.0, receive_s=2.0)).as_measurements()["rounds"]
    assert rounds[0]["headroom"]["wait_share"] == pytest.approx(3.0 / 120.0, rel=0.01)
    assert rounds[0]["headroom"]["after"]["median"] == pytest.approx(2.0, abs=0.1)
    assert all(each["headroom"]["client_share"] >= 0 for each in rounds)


def test_a_threshold_that_nobody_measured_is_invalid():
    assert red(throughput.judge(run(), {1: 1.0, 8: 1.0})) == {"THR005": Verdict.INVALID}


def test_a_round_that_lost_its_partner_is_refused():
    measured = run()
    with pytest.raises(EvidenceError, match="partner"):
        throughput.judge(dataclasses.replace(measured, rounds=measured.rounds[:-1]), {1: 1.0})


@pytest.mark.parametrize("thresholds", [{}, {1: 0.0}])
def test_no_threshold_is_no_judgement(thresholds):
    with pytest.raises(UsageError, match="thresholds"):
        throughput.judge(run(), thresholds)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": 3}, "even number"),
        ({"rounds": 0}, "even number"),
        ({"ladder": ()}, "ladder"),
        ({"ladder": (0,)}, "ladder"),
        ({"ladder": (2, 2)}, "ladder"),
        ({"n": 0}, "no prompts"),
    ],
)
def test_a_measurement_that_could_show_nothing_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        run(**settings)


def synthetic(speed_ups: dict[int, float], pairs: int, spread: float, rng: np.random.Generator):
    """Rounds of a perfect drafter whose true speed-up at each load is given, with log-normal noise per round."""
    rounds = []
    for concurrency, speed_up in speed_ups.items():
        for pair in range(pairs):
            for speculative in (True, False) if pair % 2 == 0 else (False, True):
                speed = 100.0 * (speed_up if speculative else 1.0) * math.exp(rng.normal(0.0, spread))
                requests = (RequestRecord("p00", 0.0, TOKENS / speed, TOKENS, None, 0.0, 0.0, 0.0),)
                counts = Counts(7, 28, 28, (7,) * 4) if speculative else None
                order = len(rounds)
                rounds.append(
                    Round("e", speculative, concurrency, order, pair, TOKENS / speed, 0.0, requests, counts, "none")
                )
    return throughput.ThroughputRun("spec", "plain", True, False, TOKENS, True, tuple(rounds))


def test_where_speculation_stops_paying_is_said():
    measured = synthetic({1: 1.8, 4: 1.3, 16: 0.9, 64: 0.7}, 8, 0.01, np.random.default_rng(1))
    judgement = throughput.judge(measured, {1: 1.5})
    assert judgement.verdict is Verdict.PASS
    assert "speculation stops paying at concurrency 16" in judgement.as_text()


@pytest.mark.parametrize("threshold", [1.0, 1.5])
def test_a_speed_up_equal_to_its_thresholds_is_rarely_called_different(threshold, monkeypatch):
    """2,000 runs over three loads, each with its threshold as true speed-up: neither verdict errs beyond alpha."""
    # Copying every round into the record takes most of the time of a judgement, and is not what is tested.
    monkeypatch.setattr(throughput.ThroughputRun, "as_measurements", lambda _: {})
    rng = np.random.default_rng(20_250_401)
    ladder = dict.fromkeys((1, 4, 16), threshold)
    verdicts = [throughput.judge(synthetic(ladder, 6, 0.05, rng), ladder).verdict for _ in range(2_000)]
    slack = 3 * math.sqrt(0.05 * 0.95 / 2_000)
    assert verdicts.count(Verdict.PASS) / 2_000 <= 0.05 + slack
    assert verdicts.count(Verdict.FAIL) / 2_000 <= 0.05 + slack
    assert verdicts.count(Verdict.FAIL) > 0

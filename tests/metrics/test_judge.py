"""What an engine's figures mean is found out, held against what is written, and named when it is another."""

import dataclasses

import pytest

from harness.errors import EvidenceError, UsageError
from harness.measure.endpoint import SEVERAL, Said
from harness.metrics import measure as measuring
from harness.metrics.judge import contract, judge
from harness.metrics.measure import measure
from harness.metrics.truth import Stretch
from harness.verdict import Verdict
from tests.metrics.speaker import BY_TIME, HELD_TO, ORACLE, TOKENS, ByTime, K, Mute, Speaker, prompts


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(measuring, "_POLL_S", 0.0)
    monkeypatch.setattr(measuring, "SETTLE_S", 0.01)


def judged(speaker, held_to=HELD_TO, version="1.1"):
    return judge(measure(speaker, speaker.log(), prompts(), ORACLE, K, TOKENS), held_to, version)


def red(judgement):
    return {(each.code, each.verdict) for each in judgement.findings if each.verdict is not Verdict.PASS}


def only(judgement):
    [finding] = [each for each in judgement.findings if each.verdict is not Verdict.PASS]
    return finding


@pytest.mark.parametrize("before", [0, 3, 10, 27])
def test_figures_that_mean_what_is_written_pass_wherever_their_intervals_began(before):
    judgement = judged(Speaker(before=before)) if before else judged(Speaker(before=0))
    expected = {} if before == 0 else {"/info average"}
    # An average that was not reset when the readings began is of other steps, too.
    assert {each.summary.split(" does")[0] for each in judgement.findings if each.verdict is Verdict.FAIL} == set(
        expected
    )


def test_the_finding_lists_the_meanings_and_what_to_beware_of():
    finding = judged(Speaker()).findings[0]
    assert finding.code == "MET010"
    assert finding.summary == "13 acceptance figures of speaker mean what is written of them"
    assert "/metrics generated: total: delivered tokens (beware: it lacks what is accepted beyond" in finding.actual
    assert "1.0 to 1.2" in finding.source
    assert "nearest" not in finding.source


def test_a_release_of_which_nothing_is_written_is_held_to_the_nearest():
    assert "the nearest to 2.0, of which nothing is written" in judged(Speaker(), version="2.0").findings[0].source


def test_lines_of_any_length_are_understood():
    assert not red(judged(ByTime(), BY_TIME))


def test_the_meanings_are_told_apart():
    """Of the figures that are compared here, each has one meaning, but for those that are another by arithmetic."""
    can_mean = judged(Speaker()).measurements["can_mean"]
    assert {name: each for name, each in can_mean.items() if len(each) != 1} == {"/metrics idle": []}


class Distorted(Speaker):
    """One figure means something else."""

    def __init__(self, name, distortion, **settings):
        super().__init__(**settings)
        self.name, self.distortion = name, distortion

    def distort(self, said, last, done):
        if self.name in said:
            value = self.distortion(said[self.name], last, done)
            said = {name: each for name, each in said.items() if name != self.name}
            if value is not None:
                said[self.name] = value
        return said


CHANGES = {
    "accepted counts the target's token": (
        "/metrics accepted",
        lambda value, last, done: value + done.drafts,
        "total: accepted draft tokens and the target's of each step",
    ),
    "drafts counts draft tokens": (
        "/metrics drafts",
        lambda value, last, done: K * value,
        "total: draft tokens",
    ),
    "drafts counts the root": (
        "/metrics drafts",
        lambda value, last, done: (K + 1) * value,
        "total: draft tokens and the root of each step",
    ),
    "positions became a histogram": (
        "/metrics per_position",
        lambda value, last, done: tuple(map(float, done.histogram)),
        "total: steps that accepted exactly 0 to K",
    ),
    "the root is among the drafts": (
        "/metrics steps",
        lambda value, last, done: value + 1,
        "setting: K + 1, the root among the draft tokens",
    ),
    "length without the token of prefill": (
        "meta length",
        lambda value, last, done: (last.delivered - 1) / last.drafts,
        "request: delivered tokens per step, without that of prefill",
    ),
    "length of what was accepted": (
        "meta length",
        lambda value, last, done: 1 + last.accepted / last.drafts,
        "request: accept length",
    ),
    "length became a running average": (
        "meta length",
        lambda value, last, done: 1 + done.accepted / done.drafts,
        "average: accept length",
    ),
    "rate with the root among the drafts": (
        "meta rate",
        lambda value, last, done: last.accepted / ((K + 1) * last.drafts),
        "request: acceptance rate with the root among the drafts",
    ),
    "rate became a length": (
        "meta rate",
        lambda value, last, done: last.accepted / last.drafts,
        "request: accepted draft tokens per step",
    ),
    "the gauge became an average": (
        "/metrics gauge",
        lambda value, last, done: 1 + sum(done.steps[: done.drafts // 10 * 10]) / (done.drafts // 10 * 10),
        "average: accept length",
    ),
    "the average became a gauge": (
        "/info average",
        lambda value, last, done: 1 + sum(done.steps[done.drafts // 10 * 10 - 10 : done.drafts // 10 * 10]) / 10,
        "interval: accept length",
    ),
    "the gauge is of the last request": (
        "/metrics gauge",
        lambda value, last, done: 1 + last.accepted / last.drafts if last else value,
        "request: accept length",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_figure_that_means_something_else_fails_and_the_new_meaning_is_named(change):
    name, distortion, meaning = CHANGES[change]
    finding = only(judged(Distorted(name, distortion)))
    assert (finding.code, finding.verdict) == ("MET011", Verdict.FAIL)
    assert finding.summary == f"{name} does not mean what it meant"
    assert finding.cause.startswith("it now means ")
    assert meaning in finding.cause.removeprefix("it now means ").split(" or ")


UNKNOWN = {
    "twice": lambda value, last, done: 2.17 * value,
    "stale": lambda value, last, done: 3.0,
    "nought": lambda value, last, done: 0.0,
    "negative": lambda value, last, done: -value,
}


SEEN = [name for name in HELD_TO.figures if not name.startswith("log")]


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("change", UNKNOWN)
def test_a_figure_that_means_nothing_known_fails(name, change):
    def distortion(value, last, done):
        if isinstance(value, tuple):
            return tuple(UNKNOWN[change](each, last, done) for each in value)
        return UNKNOWN[change](value, last, done)

    finding = only(judged(Distorted(name, distortion)))
    assert (finding.code, finding.verdict) == ("MET011", Verdict.FAIL)
    assert "no figure of what happened" in finding.cause


@pytest.mark.parametrize("name", SEEN)
def test_a_figure_that_is_gone_fails(name):
    finding = only(judged(Distorted(name, lambda *_: None)))
    assert (finding.code, finding.verdict) == ("MET012", Verdict.FAIL)
    assert finding.summary == f"{name} is not there any more"
    assert "meta length" in finding.actual or name == "meta length"


class CountsTheTargets(ByTime):
    """Wherever accepted tokens are counted, the target's own of each step is counted, too."""

    def counters(self):
        done = super().counters()
        return dataclasses.replace(done, accepted=done.accepted + done.drafts)

    def distort(self, said, last, done):
        return said | {"/metrics accepted": done.accepted + done.drafts}

    def line(self, window):
        accepted = window.accepted + window.drafts
        return super().line(window) | {
            "log accepted": Said(float(accepted), 0.5),
            "log length": Said(1 + accepted / window.drafts, 0.005),
            "log rate": Said(accepted / (K * window.drafts), 0.005),
        }


def test_several_figures_that_change_at_once_fail_and_are_named_each():
    judgement = judged(CountsTheTargets(), BY_TIME)
    causes = {each.summary.split(" does not")[0]: each.cause for each in judgement.findings if each.code == "MET011"}
    assert causes == {
        "/metrics accepted": "it now means total: accepted draft tokens and the target's of each step",
        "log accepted": "it now means interval: accepted draft tokens and the target's of each step",
        "log length": "it is no figure of what happened, as far as known",
        "log rate": "it now means interval: accept length over K",
    }
    assert judgement.verdict is Verdict.FAIL


def test_figures_of_which_nothing_is_written_are_listed():
    [more] = [each for each in judged(Speaker()).findings if each.code == "MET013"]
    assert more.actual == "/metrics idle: always 0"


class Renamed(Speaker):
    def distort(self, said, last, done):
        return {name.replace("/metrics accepted", "/metrics accepted_tokens"): value for name, value in said.items()}


def test_a_renamed_figure_fails_and_its_successor_is_listed_with_its_meaning():
    judgement = judged(Renamed())
    assert only(judgement).code == "MET012"
    [more] = [each for each in judgement.findings if each.code == "MET013"]
    assert "/metrics accepted_tokens: total: accepted draft tokens" in more.actual


class OtherLines(Speaker):
    def __init__(self, line, **settings):
        super().__init__(**settings)
        self._line = line

    def line(self, window):
        return self._line(super().line(window), window)


@pytest.mark.parametrize(
    ("name", "change", "meaning"),
    [
        (
            "log rate",
            lambda said, window: said | {"log rate": Said(window.accepted / (5 * window.drafts), 0.005)},
            "interval: acceptance rate with the root among the drafts",
        ),
        (
            "log length",
            lambda said, window: said | {"log length": Said(window.accepted / window.drafts, 0.005)},
            "interval: accepted draft tokens per step",
        ),
        ("log length", lambda said, window: said | {"log length": Said(3.0, 0.005)}, ""),
    ],
)
def test_a_figure_of_the_log_that_means_something_else_fails(name, change, meaning):
    finding = only(judged(OtherLines(change)))
    assert (finding.code, finding.verdict) == ("MET011", Verdict.FAIL)
    assert finding.summary.startswith(name)
    assert meaning in finding.cause


def test_figures_that_left_the_log_fail():
    judgement = judged(OtherLines(lambda said, window: {"log length": said["log length"]}))
    assert only(judgement).code == "MET012"


@pytest.mark.parametrize("speaker", [ByTime, Speaker])
def test_a_log_that_forgets_steps_fails(speaker):
    class Forgets(speaker):
        def line(self, window):
            return super().line(Stretch(K, window.steps[:-2] or window.steps))

    held_to = BY_TIME if speaker is ByTime else HELD_TO
    found = red(judged(Forgets(), held_to))
    assert found == {("MET011", Verdict.FAIL)}


class Silent(Speaker):
    def lines(self):
        return []


def test_a_log_that_says_nothing_is_inconclusive():
    assert red(judged(Silent())) == {("MET014", Verdict.INCONCLUSIVE)}


class Dead(Speaker):
    def truth(self, prompt, tokens):
        return (0,) * (tokens - 1)


class Halved(Speaker):
    def truth(self, prompt, tokens):
        steps, known = [], 1
        for accepted in ORACLE.steps(prompt.token_ids, TOKENS, K):
            if known >= tokens:
                break
            steps.append(accepted // 2)
            known += steps[-1] + 1
        return (*steps, *(0,) * max(0, tokens - known))


@pytest.mark.parametrize("speaker", [Dead, Halved])
def test_acceptance_that_is_not_the_canarys_says_nothing_of_the_figures(speaker):
    judgement = judged(speaker())
    assert red(judgement) == {("MET003", Verdict.INVALID)}
    assert len(judgement.findings) == 1


class Wrong(Speaker):
    def output(self, prompt, tokens):
        output = super().output(prompt, tokens)
        return [*output[:-1], output[-1] ^ 1] if prompt.name == "p03" else output


def test_outputs_that_are_not_the_canarys_are_invalid():
    judgement = judged(Wrong())
    assert red(judgement) == {("MET001", Verdict.INVALID)}
    assert "'p03'" in judgement.as_text()


class Cut(Speaker):
    def output(self, prompt, tokens):
        return super().output(prompt, tokens)[:-2]


def test_outputs_that_are_cut_are_invalid():
    assert red(judged(Cut())) == {("MET001", Verdict.INVALID)}


def test_no_figure_at_all_is_invalid():
    assert red(judged(Mute())) == {("MET002", Verdict.INVALID)}


def test_too_few_prompts_are_refused():
    speaker = Speaker()
    with pytest.raises(UsageError, match="stopped within a verify step"):
        measure(speaker, speaker.log(), prompts(1), ORACLE, K, TOKENS)


def test_an_engine_that_leaves_out_the_token_that_ended_an_output_is_understood():
    class LeavesItOut(Speaker):
        def generate(self, prompt, max_tokens):
            answer = super().generate(prompt, max_tokens)
            if not prompt.stop_token_ids:
                return answer
            self.delivered -= 1
            self.last = dataclasses.replace(self.last, delivered=self.last.delivered - 1)
            return dataclasses.replace(answer, token_ids=answer.token_ids[:-1])

    assert not red(judged(LeavesItOut()))


def test_two_outputs_end_within_a_step():
    speaker = Speaker()
    run = measure(speaker, speaker.log(), prompts(), ORACLE, K, TOKENS)
    assert len(run.requests) == 10
    for request in run.requests[-2:]:
        assert 1 + len(request.steps) + sum(request.steps) - request.delivered >= 2


@pytest.mark.parametrize(
    ("engine", "version"), [("vllm", "0.28.0"), ("vllm", "0.32.0"), ("vllm", "9.9.9"), ("sglang", "0.5.23")]
)
def test_there_is_something_written_for_each_engine(engine, version):
    held_to = contract(engine, version)
    assert held_to is not None
    assert held_to.figures
    assert held_to.covers(version) is (version != "9.9.9")


def test_nothing_is_written_for_an_engine_that_nobody_knows():
    assert contract("other", "1.0") is None


# --- what a review of this suite found


class Capped(Speaker):
    """Its last step accepts nothing beyond the end of an output, so nothing is as the arithmetic has it."""

    def truth(self, prompt, tokens):
        *steps, last = ORACLE.steps(prompt.token_ids, tokens, K)
        return (*steps, min(last, tokens - 1 - len(steps) - sum(steps)))


class CappedByTime(Capped, ByTime):
    pass


class DeadByTime(Dead, ByTime):
    pass


class HalvedByTime(Halved, ByTime):
    pass


@pytest.mark.parametrize("speaker", [Capped, CappedByTime, DeadByTime, HalvedByTime])
def test_wrong_acceptance_is_not_blamed_on_figures_whatever_fits_by_luck(speaker):
    judgement = judged(speaker(), BY_TIME if issubclass(speaker, ByTime) else HELD_TO)
    assert [each.code for each in judgement.findings] == ["MET003"]
    assert "can_mean" not in judgement.measurements


class Leaves(Speaker):
    """Answers lack their figures where `out` says so."""

    def __init__(self, out):
        super().__init__()
        self.out = out

    def distort(self, said, last, done):
        if not self.out(self):
            return said
        return {name: value for name, value in said.items() if name not in {"meta length", "meta rate"}}


@pytest.mark.parametrize("out", [lambda it: it.requests > 3, lambda it: it.requests > 8, lambda it: it.requests == 5])
def test_figures_that_some_answers_lack_fail(out):
    judgement = judged(Leaves(out))
    assert red(judgement) == {("MET012", Verdict.FAIL)}
    assert "meta length is missing in" in judgement.as_text()


def test_a_gauge_of_the_latest_step_alone_fails():
    finding = only(judged(Distorted("/metrics gauge", lambda value, last, done: 1.0 + done.steps[-1])))
    assert "step: accept length" in finding.cause.removeprefix("it now means ").split(" or ")


class Contradicts(Speaker):
    def counters(self):
        done = super().counters()
        return dataclasses.replace(done, drafts=2 * done.drafts)


class NoCounters(Speaker):
    def counters(self):
        raise EvidenceError("HTTP 404 at /metrics")


@pytest.mark.parametrize("speaker", [Contradicts, NoCounters])
def test_counters_that_contradict_the_figures_are_invalid(speaker):
    judgement = judged(speaker())
    assert red(judgement) == {("MET003", Verdict.INVALID)}
    assert "MET010" in {each.code for each in judgement.findings}


class StopsLogging(ByTime):
    def lines(self):
        return super().lines()[:-1]


class WrongAtFirst(Speaker):
    def lines(self):
        return [
            {**line, "log length": Said(9.0, 0.005)} if number == 0 else line
            for number, line in enumerate(super().lines())
        ]


@pytest.mark.parametrize(("speaker", "held_to"), [(StopsLogging, BY_TIME), (WrongAtFirst, HELD_TO)])
def test_a_log_that_is_wrong_at_its_ends_fails(speaker, held_to):
    assert red(judged(speaker(), held_to)) == {("MET011", Verdict.FAIL)}


class Hole(Speaker):
    def figures(self):
        said = super().figures()
        return {name: value for name, value in said.items() if self.requests != 5 or not name.startswith("/metrics")}


def test_a_page_that_was_empty_once_is_invalid():
    judgement = judged(Hole())
    assert red(judgement) == {("MET002", Verdict.INVALID)}
    assert "none after request 5" in judgement.as_text()


class Lags(Speaker):
    """A page that catches up with an answer only after some readings of it."""

    waits = 0
    shown = 0.0

    def generate(self, prompt, max_tokens):
        self.waits = 6
        return super().generate(prompt, max_tokens)

    def distort(self, said, last, done):
        self.waits -= 1
        if self.waits <= 0:
            self.shown = float(done.drafts)
        return said | {"/metrics drafts": self.shown}


def test_a_page_that_lags_is_waited_for(monkeypatch):
    monkeypatch.setattr(measuring, "SETTLE_S", 3.0)
    speaker = Lags()
    readings = [measuring._settled(speaker, [])]
    for prompt in prompts()[:4]:
        speaker.generate(prompt, TOKENS)
        readings.append(measuring._settled(speaker, readings))
        assert readings[-1]["/metrics drafts"].value == len(speaker.steps)


class NoWords(Speaker):
    def line(self, window):
        return {}


def test_lines_that_lost_their_words_fail():
    assert red(judged(NoWords())) == {("MET012", Verdict.FAIL)}


def test_a_gauge_of_several_ranks_is_inconclusive():
    class Ranks(Speaker):
        def distort(self, said, last, done):
            gauge = said.pop("/metrics gauge", None)
            return said | ({} if gauge is None else {f"/metrics gauge{SEVERAL}": (gauge, gauge + 0.1)})

    judgement = judged(Ranks())
    assert red(judgement) == {("MET014", Verdict.INCONCLUSIVE)}
    assert "once for each rank" in judgement.as_text()


@pytest.mark.parametrize("version", ["nightly", "1.1+cpu", "1.2+local.3"])
def test_versions_that_are_no_release_are_judged(version):
    judgement = judged(Speaker(), version=version)
    assert not red(judgement)
    assert ("nearest" in judgement.findings[0].source) is (version == "nightly")


@pytest.mark.parametrize("k", [1, 2, 8])
def test_other_lengths_of_drafts(k, monkeypatch):
    monkeypatch.setattr("tests.metrics.speaker.K", k)
    for speaker, held_to in ((Speaker(), HELD_TO), (ByTime(), BY_TIME)):
        run = measure(speaker, speaker.log(), prompts(), ORACLE, k, TOKENS)
        assert not red(judge(run, held_to, "1.1"))

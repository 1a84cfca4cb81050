"""An engine that serves a canary by its oracle, and says figures of what it did, true or distorted."""

import dataclasses
import itertools

from harness.canary.oracle import make_oracle
from harness.canary.spec import SHIPPED
from harness.errors import EvidenceError
from harness.measure.endpoint import Counters, Generation, Prompt, Said
from harness.metrics.judge import Contract, Known
from harness.metrics.measure import Log
from harness.metrics.truth import Stretch

K = 4
TOKENS = 64
ORACLE = make_oracle(SHIPPED["small-wrong"])
EVERY = 10

HELD_TO = Contract(
    "engine",
    "1.0",
    "1.2",
    {
        "/metrics drafts": Known("total: verify steps"),
        "/metrics accepted": Known("total: accepted draft tokens"),
        "/metrics per_position": Known("total: steps that accepted each position"),
        "/metrics generated": Known("total: delivered tokens", "it lacks what is accepted beyond an output's end"),
        "/metrics steps": Known("setting: K"),
        "/metrics draft_tokens": Known("setting: K + 1, the root among the draft tokens"),
        "/metrics gauge": Known("interval: accept length"),
        "/info average": Known("average: accept length"),
        "meta length": Known("request: delivered tokens per step, that of prefill included"),
        "meta rate": Known("request: acceptance rate"),
        "meta histogram": Known("request: steps that accepted exactly 0 to K"),
        "log length": Known("interval: accept length"),
        "log rate": Known("interval: acceptance rate"),
    },
)


def prompts(count=8):
    return [Prompt(f"p{i:02d}", token_ids=tuple(ids)) for i, ids in enumerate(ORACLE.prompts(count, 24, 7))]


class Speaker:
    """`steps` of a request may be overridden; `distort` changes what figures say."""

    label = "speaker"
    speculative = True

    def __init__(self, *, every=EVERY, before=0):
        self.every = every
        self.steps = [2] * before
        self.delivered = 100.0
        self.requests = 0
        self.last = None
        self.line_ends = []

    def truth(self, prompt, tokens):
        return ORACLE.steps(prompt.token_ids, tokens, K)

    def output(self, prompt, tokens):
        return ORACLE.continuation(prompt.token_ids, tokens)

    def generate(self, prompt, max_tokens):
        output = self.output(prompt, max_tokens)
        for stop in prompt.stop_token_ids:
            output = output[: output.index(stop) + 1]
        steps = self.truth(prompt, len(output))
        self.steps += steps
        self.requests += 1
        self.delivered += len(output)
        self.last = Stretch(K, tuple(steps), 1, len(output))
        return Generation(tuple(output), 0.1, "length", len(prompt.token_ids))

    def counters(self):
        done = Stretch(K, tuple(self.steps))
        return Counters(done.drafts, K * done.drafts, done.accepted, done.per_position, "speaker", 0.0)

    def figures(self):
        done = Stretch(K, tuple(self.steps))
        latest = len(self.steps) // self.every * self.every
        said = {
            "/metrics drafts": done.drafts,
            "/metrics accepted": done.accepted,
            "/metrics per_position": tuple(map(float, done.per_position)),
            "/metrics generated": self.delivered,
            "/metrics steps": float(K) if self.last else 0.0,
            "/metrics draft_tokens": K + 1.0 if self.last else 0.0,
            "/metrics idle": 0.0,
        }
        if latest:
            window = Stretch(K, tuple(self.steps[latest - self.every : latest]))
            said["/metrics gauge"] = 1 + window.accepted / window.drafts
            said["/info average"] = 1 + sum(self.steps[:latest]) / latest
        if self.last is not None:
            said["meta length"] = self.last.delivered / self.last.drafts
            said["meta rate"] = self.last.accepted / (K * self.last.drafts)
            said["meta histogram"] = tuple(map(float, self.last.histogram))
        return {name: Said(value) for name, value in self.distort(said, self.last, done).items()}

    def distort(self, said, last, done):
        return said

    def lines(self):
        ends = range(self.every, len(self.steps) + 1, self.every)
        return [self.line(Stretch(K, tuple(self.steps[end - self.every : end]))) for end in ends]

    def line(self, window):
        return {
            "log length": Said(round(1 + window.accepted / window.drafts, 2), 0.005),
            "log rate": Said(round(window.accepted / (K * window.drafts), 2), 0.005),
        }

    def log(self):
        return Log(self.lines, self.every, 0.0)


class ByTime(Speaker):
    """Its log has a line for what was counted since the last one, of any number of steps."""

    def lines(self):
        ends = sorted({min(end, len(self.steps)) for end in (0, 7, 31, 33, 90, len(self.steps))})
        return [self.line(Stretch(K, tuple(self.steps[a:b]))) for a, b in itertools.pairwise(ends) if b > a]

    def line(self, window):
        return {
            **super().line(window),
            "log accepted": Said(float(window.accepted), 0.5),
            "log drafted": Said(float(K * window.drafts), 0.5),
        }

    def log(self):
        return Log(self.lines, None, 0.0)


BY_TIME = dataclasses.replace(
    HELD_TO,
    figures={
        **{name: known for name, known in HELD_TO.figures.items() if name not in {"/metrics gauge", "/info average"}},
        "log accepted": Known("interval: accepted draft tokens"),
        "log drafted": Known("interval: draft tokens"),
    },
)


class Mute(Speaker):
    def figures(self):
        return {}

    def lines(self):
        return []

    def counters(self):
        raise EvidenceError("no counters")

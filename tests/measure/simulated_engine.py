"""An engine in a hundred lines with exact accounting, so that every fault can be put in by hand and must be seen."""

from __future__ import annotations

import dataclasses
import random
import threading
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

from harness.errors import EvidenceError
from harness.measure.endpoint import Counters, Generation, Prompt, TokenLogit, Witness

VOCABULARY = 997


def prompts(n: int, *, ignore_eos: bool = True) -> list[Prompt]:
    """Return `n` prompts named p00, p01, ..."""
    return [Prompt(f"p{i:02}", token_ids=(i + 1, 2 * i + 3, 7), ignore_eos=ignore_eos) for i in range(n)]


class VirtualClock:
    """Seconds that pass only when an engine says so: long ones, so that real ones, which also pass, weigh nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


@dataclasses.dataclass
class Engine:
    """A target whose next token is a hash of the last three, and a drafter right with probability `rate(prompt)`.

    `k` = 0 is plain decoding. `ties` is the share of contexts with a near-tie, `gap` its width in logits; with `rounds`
    the engine takes the second token there, as one whose kernels round differently would.
    """

    k: int = 4
    rate: float | dict[str, float] = 1.0
    seed: int = 0
    ties: float = 0.0
    gap: float = 0.125
    rounds: bool = False
    step_s: float = 10.0
    clock: VirtualClock | None = None
    noise: float = 0.0
    label: str = "simulated"
    eos: int | None = None
    send_s: float | None = 0.0
    receive_s: float | None = 0.0
    fixed: ClassVar[int | None] = None
    totals: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])
    positions: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.positions = [0] * self.k
        self._lock = threading.Lock()
        self._noise = random.Random(self.seed)

    @property
    def speculative(self) -> bool:
        return self.k > 0

    def logits(self, context: list[int]) -> list[TokenLogit]:
        digest = zlib.crc32(repr(context[-3:]).encode())
        best = digest % VOCABULARY
        tie = (digest >> 12) % 1000 < self.ties * 1000
        second = 20.0 - (self.gap if tie else 5.0)
        return [
            TokenLogit(best, 20.0),
            TokenLogit((best + 1) % VOCABULARY, second),
            TokenLogit((best + 2) % VOCABULARY, 3),
        ]

    def next_token(self, context: list[int]) -> int:
        first, second, _ = self.logits(context)
        return second.token_id if self.rounds and first.logit - second.logit < self.gap + 1e-6 else first.token_id

    def accepted_in_step(self, prompt: Prompt, rng: random.Random) -> int:
        if self.fixed is not None:
            return self.fixed
        rate = self.rate[prompt.name] if isinstance(self.rate, dict) else self.rate
        return next((i for i in range(self.k) if rng.random() >= rate), self.k)

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        rng = random.Random(f"{self.seed} {prompt.name} {len(prompt.token_ids or ())}")
        context = list(prompt.token_ids or (len(prompt.name),))
        start = len(context)
        seconds = self.step_s
        context.append(self.next_token(context))
        while len(context) - start < max_tokens and not self._ended(prompt, context[start:]):
            accepted = self.accepted_in_step(prompt, rng)
            self.count(accepted)
            for _ in range(accepted + 1):
                context.append(self.next_token(context))
            seconds += self.step_s
        output = self._cut(prompt, context[start:])[:max_tokens]
        seconds *= 1.0 + self.noise * self._noise.uniform(-1, 1)
        if self.clock:
            self.clock.advance(seconds)
        reason = "length" if len(output) == max_tokens else "stop"
        return Generation(tuple(output), seconds, reason, start, send_s=self.send_s, receive_s=self.receive_s)

    def _ended(self, prompt: Prompt, output: list[int]) -> bool:
        return not prompt.ignore_eos and self.eos is not None and any(token % self.eos == 0 for token in output)

    def _cut(self, prompt: Prompt, output: list[int]) -> list[int]:
        if not self._ended(prompt, output):
            return output
        return output[: next(i for i, token in enumerate(output) if token % self.eos == 0) + 1]

    def count(self, accepted: int) -> None:
        if not self.k:
            return
        with self._lock:
            self.totals[0] += 1
            self.totals[1] += self.k
            self.totals[2] += accepted
            for position in range(accepted):
                self.positions[position] += 1

    def counters(self) -> Counters:
        if not self.k:
            raise EvidenceError("no metric named spec_decode_num_drafts")
        with self._lock:
            return Counters(*self.totals, tuple(self.positions), source="simulated counters", at=0.0)

    def witnesses(self) -> tuple[Witness, ...]:
        return ()

    def next_token_logits(self, prompt_token_ids: tuple[int, ...], top: int) -> list[TokenLogit]:
        return self.logits(list(prompt_token_ids))[:top]


class Fails(Engine):
    """Answers `answers` requests, and raises `error` at every later one."""

    def __init__(self, answers: int, error: BaseException, **settings: Any) -> None:
        super().__init__(**settings)
        self.answers, self.error = answers, error

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        with self._lock:
            self.answers -= 1
            if self.answers < 0:
                raise self.error
        return super().generate(prompt, max_tokens)


def beside_others() -> bool:
    """Whether this request is one of several at once: those have a thread of their own."""
    return threading.current_thread() is not threading.main_thread()


class AtOnce:
    """A server of `engine` that takes requests from several threads: those of the main thread are served alone.

    The others are served when `rows` have come, which is all that there are at a time; or, with one row, in turn.
    `spoil` changes the answers of a batch of several. `clock` tells each thread when its last request was answered, so
    that nothing depends on how threads are scheduled.
    """

    def __init__(self, engine: Engine, rows: int = 4, spoil: Callable[[list[Generation]], None] = lambda _: None):
        self.engine, self.spoil = engine, spoil
        self._together = threading.Barrier(rows, action=self._serve)
        self._local, self._lock = threading.local(), threading.Lock()
        self._batch: dict[int, Generation] = {}
        self._served: dict[int, Generation] = {}
        self._free = self._began = 0.0

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def clock(self) -> float:
        return getattr(self._local, "now", 0.0)

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        if not beside_others():
            return self.engine.generate(prompt, max_tokens)
        came, me = self.clock(), threading.get_ident()
        alone = self.engine.generate(prompt, max_tokens)
        if self._together.parties == 1:
            with self._lock:
                self._free = self._local.now = max(self._free, came) + alone.seconds
            return dataclasses.replace(alone, seconds=self._local.now - came)
        with self._lock:
            self._batch[me] = alone
        self._together.wait(60)
        answer = self._served[me]
        self._local.now = self._began + answer.seconds
        return dataclasses.replace(answer, seconds=self._local.now - came)

    def _serve(self) -> None:
        """Serve those that have come: all begin when the last batch has ended."""
        threads, answers = list(self._batch), list(self._batch.values())
        self._batch.clear()
        self.spoil(answers)
        self._served |= dict(zip(threads, answers, strict=True))
        self._began, self._free = self._free, self._free + max(each.seconds for each in answers)


def realistic_rates(n: int, seed: int, mean: float = 0.6, concentration: float = 6.0) -> dict[str, float]:
    """Return acceptance rates per prompt that vary as real ones do: Beta with the given mean."""
    rng = random.Random(seed)
    return {prompt.name: rng.betavariate(mean * concentration, (1 - mean) * concentration) for prompt in prompts(n)}

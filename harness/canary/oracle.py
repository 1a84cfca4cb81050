"""What a canary's target says and how many draft tokens it accepts, by integer arithmetic alone.

A token belongs to one of N classes. With x(t) the class of the token at position t, the target's greedy choice is

    x(t+1) = sigma[ (x(t) + x(max(t-2, 0)) mod CODES) mod N ]

written as the class's canonical token. sigma is a permutation of the classes. The drafter computes the same, except on
the pairs (x(t), code) listed in `wrong`, where it says the next class but one in sigma's numbering.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import TYPE_CHECKING, Any

from harness.canary.spec import CODES, CanarySpec
from harness.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Acceptance", "Oracle", "make_oracle"]


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts as the engines keep them. Adding two sums them.

    `drafts` verification steps, `draft_tokens` proposed tokens (K each), `accepted` proposed tokens that were right,
    `per_position` how often position 0 .. K-1 was.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    def __add__(self, other: Acceptance) -> Acceptance:
        if len(self.per_position) != len(other.per_position):
            raise UsageError(
                f"acceptance at K={len(self.per_position)} and K={len(other.per_position)} cannot be added"
            )
        return Acceptance(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(a + b for a, b in zip(self.per_position, other.per_position, strict=True)),
        )

    @property
    def accept_length(self) -> float:
        """Tokens per verification step, the one the target adds included; 1.0 means no draft token was accepted."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The arithmetic of one canary, as `oracle.json` holds it.

    `canonical[a]` is the token that class a is written as; any other token t belongs to class t mod N. `none_token` is
    the drafter's answer when it has none: the target never says it. `wrong` holds (class, code) pairs.
    """

    spec: CanarySpec
    sigma: tuple[int, ...]
    canonical: tuple[int, ...]
    none_token: int
    wrong: frozenset[tuple[int, int]]

    @classmethod
    def load(cls, path: Path) -> Oracle:
        """Read `oracle.json`, given as the file or as the canary's folder. Raises `CheckpointError`."""
        file = path / "oracle.json" if path.is_dir() else path
        try:
            found = json.loads(file.read_text())
            spec = CanarySpec.from_json(found["spec"])
            return cls(
                spec,
                tuple(found["sigma"]),
                tuple(found["canonical"]),
                found["none_token"],
                frozenset((a, c) for a, c in found["wrong"]),
            )
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            raise CheckpointError(
                f"{file}: not a canary's oracle ({error})", remedy="build the canary again"
            ) from error

    def as_json(self) -> dict[str, Any]:
        """Return what `load` reads."""
        return {
            "spec": self.spec.as_json(),
            "fingerprint": self.spec.fingerprint,
            "sigma": self.sigma,
            "canonical": self.canonical,
            "none_token": self.none_token,
            "wrong": sorted(self.wrong),
        }

    def class_of(self, token: int) -> int:
        """Return the class of a token. Raises `UsageError` outside the vocabulary."""
        if not 0 <= token < self.spec.vocab:
            raise UsageError(f"token {token} is outside the canary's vocabulary of {self.spec.vocab}")
        try:
            return self.canonical.index(token)
        except ValueError:
            return token % self.spec.classes

    def next_class(self, current: int, code: int) -> int:
        """Return the class that follows `current` when the token two before it has `code`."""
        return self.sigma[(current + code) % self.spec.classes]

    def drafted_class(self, current: int, code: int) -> int:
        """Return what the drafter says in the target's place: the same, or on a wrong pair another class."""
        return self.next_class(current, code + ((current, code) in self.wrong))

    def _classes(self, prompt_ids: Sequence[int], extra: int) -> list[int]:
        """Return the classes of the prompt and of the `extra` tokens that follow it."""
        if not prompt_ids:
            raise UsageError("an empty prompt has no continuation")
        classes = [self.class_of(token) for token in prompt_ids]
        for _ in range(extra):
            classes.append(self.next_class(classes[-1], classes[max(len(classes) - 3, 0)] % CODES))
        return classes

    def continuation(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """Return the n tokens the target says after the prompt, greedily and with EOS ignored."""
        return [self.canonical[a] for a in self._classes(prompt_ids, n)[len(prompt_ids) :]]

    def steps(self, prompt_ids: Sequence[int], max_tokens: int, k: int) -> tuple[int, ...]:
        """Return how many draft tokens each verify step of one greedy request accepts, with EOS ignored and K = k.

        Prefill yields the first token; each step then verifies k draft tokens and adds one. As in vLLM 0.32.0
        (`v1/core/sched/scheduler.py`) accepted tokens of the last step count even beyond `max_tokens`.
        """
        classes = self._classes(prompt_ids, max_tokens + k + 1)
        known = len(prompt_ids) + 1
        steps = []
        while known < len(prompt_ids) + max_tokens:
            accepted = 0
            while accepted < k:
                t = known - 1 + accepted
                if (classes[t], classes[max(t - 2, 0)] % CODES) in self.wrong:
                    break
                accepted += 1
            steps.append(accepted)
            known += accepted + 1
        return tuple(steps)

    def acceptance(self, prompt_ids: Sequence[int], max_tokens: int, k: int) -> Acceptance:
        """Return the engine's counters after one such request."""
        steps = self.steps(prompt_ids, max_tokens, k)
        per_position = tuple(sum(each > position for each in steps) for position in range(k))
        return Acceptance(len(steps), len(steps) * k, sum(steps), per_position)

    def total(self, prompts: Iterable[Sequence[int]], max_tokens: int, k: int) -> Acceptance:
        """Return the sum of `acceptance` over several requests."""
        return sum((self.acceptance(prompt, max_tokens, k) for prompt in prompts), start=Acceptance(0, 0, 0, (0,) * k))

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return `count` prompts of `length` token ids, the same for the same seed."""
        rng = random.Random(seed)  # noqa: S311 -- reproducible, not secret
        return [[rng.randrange(self.spec.vocab) for _ in range(length)] for _ in range(count)]


def make_oracle(spec: CanarySpec) -> Oracle:
    """Return the arithmetic that a spec implies, a pure function of it.

    Because `next_class` depends on (class + code) mod N and codes differ by less than N, two codes never give the same
    class: a drafter that has the code wrong is wrong, not lucky. On (class, class one back mod CODES, class two back
    mod CODES) the step is a bijection, so every prompt lies on a cycle; sigma is the first of the seed's permutations
    whose shortest cycle is long, so that no prompt is a degenerate one.
    """
    rng = random.Random(spec.seed)  # noqa: S311 -- reproducible, not secret
    sigma = list(range(spec.classes))
    while True:
        rng.shuffle(sigma)
        if _shortest_cycle(sigma) >= 2 * spec.classes:
            break
    stride = spec.vocab // spec.classes
    pairs = [(a, c) for a in range(spec.classes) for c in range(CODES)]
    wrong = rng.sample(pairs, round(spec.wrong_fraction * len(pairs)))
    return Oracle(
        spec,
        tuple(sigma),
        # Rising, at least 2 above the class's draft id minus one: every entry of d2t is non-zero.
        tuple(a * stride + 2 + 5 * a % (stride - 2) for a in range(spec.classes)),
        1,
        frozenset(wrong),
    )


def _shortest_cycle(sigma: Sequence[int]) -> int:
    """Return the length of the shortest cycle of (current, code one back, code two back)."""
    n = len(sigma)
    seen: set[tuple[int, int, int]] = set()
    shortest = n * CODES * CODES
    for start in ((a, i, j) for a in range(n) for i in range(CODES) for j in range(CODES)):
        state, length = start, 0
        while state not in seen:
            seen.add(state)
            current, back1, back2 = state
            state = (sigma[(current + back2) % n], current % CODES, back1)
            length += 1
        if length:
            shortest = min(shortest, length)
    return shortest

"""The facts that define a pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

__all__ = ["EngineLaunch", "Expectations", "Pair", "Workload"]


@dataclasses.dataclass(frozen=True)
class Expectations:
    """What a pair promises. An absent promise is reported as *not asked*, never as kept.

    aux_hidden_dim: width of the concatenated auxiliary hidden states that reach the drafter, n_aux x target hidden
        (21504 for Kimi-K2.5).
    aux_layers: the target layers whose *inputs* the drafter was trained on, in order; (2, 30, 58) means the residual
        stream that enters layers 2, 30 and 58. One convention for all engines; adapters translate.
    accept_length: the accept length (1 + accepted / drafts) that must be cleared; canaries are judged by equality.
    throughput_ratio: by concurrency, output tokens/s with speculation over without.
    startup_s: seconds until a generation has gone through the draft-and-verify loop.
    """

    aux_hidden_dim: int | None = None
    aux_layers: tuple[int, ...] | None = None
    accept_length: float | None = None
    throughput_ratio: Mapping[int, float] = dataclasses.field(default_factory=dict)
    startup_s: float = 600.0

    def misfit(self, hidden: object) -> tuple[str, str] | None:
        """Return how `aux_hidden_dim` is wrong for this hidden size of the target, with the remedy, if it is."""
        if self.aux_hidden_dim is None or not isinstance(hidden, int) or self.aux_hidden_dim % hidden == 0:
            return None
        return (
            f"is {self.aux_hidden_dim}, not a multiple of the target's hidden size {hidden}",
            f"3 auxiliary layers make {3 * hidden}",
        )


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked of the servers.

    prompts_file: JSON lines with `prompt` (text for the chat template); None = the canary's own token prompts.
    count, length: how many prompts, and their length in tokens where they are made here.
    max_tokens: output tokens per prompt.
    throughput_count, throughput_tokens: the first so many prompts, and output tokens of each, of a throughput round.
    rounds: pairs of rounds at each concurrency, interleaved A B B A, so an even number. seed: of everything drawn.
    """

    prompts_file: Path | None = None
    count: int = 16
    length: int = 24
    max_tokens: int = 64
    throughput_count: int = 4
    throughput_tokens: int = 64
    rounds: int = 4
    seed: int = 20261130


@dataclasses.dataclass(frozen=True)
class EngineLaunch:
    """How one engine is launched for a pair: extra arguments, environment, and the model runners to cover.

    No runners: the one that the engine takes by itself on the device, as its adapter knows.
    """

    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    runners: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a drafter, ready to be judged. `source` is the file (or command line) that defines it.

    Exactly one of `canary`, `rebuild` and `target` + `drafter` says where the checkpoints come from: a canary that is
    built here, a shipped drafter whose target is rebuilt from a package, or two folders. A canary may come with a
    `drafter` of its own in place of the built one (another dialect, say); the oracle still judges it. `unset` names the
    environment variables in its paths that are not set: such a pair is listed, not chosen. `side_by_side` False
    runs the servers with and without speculation one after the other, for a target that fills the machine.
    """

    name: str
    source: str
    method: str
    k: int
    dtype: str
    target: Path | None = None
    drafter: Path | None = None
    canary: str | None = None
    rebuild: Path | None = None
    expect: Expectations = dataclasses.field(default_factory=Expectations)
    workload: Workload = dataclasses.field(default_factory=Workload)
    engines: Mapping[str, EngineLaunch] = dataclasses.field(default_factory=dict)
    accept: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    side_by_side: bool = True

    def launch(self, engine: str) -> EngineLaunch:
        """Return how `engine` is launched for this pair; the engine's defaults where the pair says nothing."""
        return self.engines.get(engine, EngineLaunch())

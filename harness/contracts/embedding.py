"""Whose embedding a drafter computes with: its own, or the target's, which SGLang puts in its place after the load.

SGLang calls `set_embed` for every EAGLE-3 drafter (speculative/eagle_worker.py of 0.4.6.post5 to 0.5.12,
eagle_worker_v2.py of 0.5.5.post3 to 0.5.23), and that leaves the drafter's alone only where `target_hidden_size` is
another width than its own (models/llama.py). vLLM shares the target's with a drafter that has none. This was read in
eleven releases, and seen in 0.5.23 while it served; no contract says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from harness.checkpoint.read import Checkpoint

__all__ = ["EMBEDDING", "differs", "embeddings", "gives_way"]

EMBEDDING = "embed_tokens.weight"
"""How the names of embeddings end, in drafters and in targets."""

_READ = SpecifierSet(">=0.4.6.post5,<=0.5.23", prereleases=True)


def gives_way(engine: str, version: str, config: Mapping[str, Any]) -> bool | None:
    """Whether the release gives a drafter of this config the target's embedding, whatever it brings.

    None for a release of which that was not read.
    """
    width = config.get("hidden_size")
    if engine != "sglang" or config.get("target_hidden_size", width) != width:
        return False
    return True if version in _READ else None


def embeddings(checkpoint: Checkpoint | None) -> list[str]:
    """Return the names of its embeddings: none if there is no checkpoint, or no tensors of it."""
    return [name for name in (() if checkpoint is None else checkpoint.tensors) if name.endswith(EMBEDDING)]


def differs(drafter: Checkpoint, target: Checkpoint | None) -> bool | None:
    """Whether the drafter has an embedding of other values than the target's; None if the target's is not at hand.

    Reads both tensors, up to the first difference. Raises CheckpointError if a file cannot be read.
    """
    ours, theirs = embeddings(drafter), embeddings(target)
    if not ours:
        return False
    if target is None or not theirs:
        return None
    from harness.checkpoint.data import alike  # noqa: PLC0415 -- imports numpy

    return not any(
        alike(drafter.shard_of(mine), mine, target.shard_of(other), other) for mine in ours for other in theirs
    )

"""Whose embedding and head a drafter computes with: its own, or the target's.

SGLang calls `set_embed` for every EAGLE-3 drafter (speculative/eagle_worker.py of 0.4.6.post5 to 0.5.12,
eagle_worker_v2.py of 0.5.5.post3 to 0.5.23), and that leaves the drafter's alone only where `target_hidden_size` is
another width than its own (models/llama.py). vLLM shares the target's with a drafter that has none. This was read in
eleven releases, and seen in 0.5.23 while it served; no contract says it.

The head, likewise: a drafter without an `lm_head` gets the target's from vLLM (`has_own_lm_head` in v1/spec_decode/
eagle.py, later llm_base_proposer.py; 0.11.2 to 0.32.0), and from SGLang where `draft_vocab_size` is null
(`load_lm_head_from_target` in models/llama_eagle3.py; 0.5.3 to 0.5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from harness.checkpoint.read import Checkpoint

__all__ = ["EMBEDDING", "HEAD", "differs", "embeddings", "gives_way", "lends_head"]

EMBEDDING = "embed_tokens.weight"
"""How the names of embeddings end, in drafters and in targets."""
HEAD = "lm_head.weight"

_READ = SpecifierSet(">=0.4.6.post5,<=0.5.23", prereleases=True)
_HEAD_READ = {
    "sglang": SpecifierSet(">=0.5.3,<=0.5.23", prereleases=True),
    "vllm": SpecifierSet(">=0.11.2,<=0.32.0", prereleases=True),
}


def gives_way(engine: str, version: str, config: Mapping[str, Any]) -> bool | None:
    """Whether the release gives a drafter of this config the target's embedding, whatever it brings.

    None for a release of which that was not read.
    """
    width = config.get("hidden_size")
    if engine != "sglang" or config.get("target_hidden_size", width) != width:
        return False
    return True if version in _READ else None


def lends_head(engine: str, version: str, config: Mapping[str, Any]) -> bool | None:
    """Whether the release gives a drafter of this config that has no `lm_head` the target's, of the same vocabulary.

    None for a release of which that was not read.
    """
    draft = config.get("draft_vocab_size")
    if engine == "sglang":
        fits = draft is None and not config.get("tie_word_embeddings")
    else:
        fits = draft in (None, config.get("vocab_size"))
    if not fits:
        return False
    return True if version in _HEAD_READ[engine] else None


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

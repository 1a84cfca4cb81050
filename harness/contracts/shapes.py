"""A drafter's tensors against the sizes in its config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from harness.checkpoint.read import Checkpoint
from harness.contracts.model import NAMELESS, split
from harness.contracts.trials import LAYER_NAMES, TOP_NAMES, Sizes

__all__ = ["Mismatch", "body", "compare"]

_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A tensor whose shape is not what the config says."""

    key: str
    shape: tuple[int, ...]
    wanted: tuple[int, ...]


def body(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a target's config that describes its decoder; vision models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def compare(
    drafter: Checkpoint, config: Mapping[str, Any], hidden_states: int, loaded: Iterable[str]
) -> tuple[tuple[str, ...], list[Mismatch]]:
    """Compare tensors with the shapes that the release builds. `loaded`: the keys that it loads; others do no harm.

    hidden_states: how many `fc` takes in the drafter that is built. Returns the config's keys that are lacking, and
    where there are none, every tensor of another shape.
    """
    lacking = tuple(key for key in _NEEDED if not _positive(config.get(key)))
    if lacking:
        return lacking, []
    sizes = _sizes(config, hidden_states)
    wrong = []
    for key in loaded:
        kind, prefix, name = split(key)
        formula = (LAYER_NAMES if kind == "layer" else TOP_NAMES).get(name)
        if formula is None or name == NAMELESS:
            continue
        later = prefix.listed.endswith("layers.1.")
        here = dataclasses.replace(sizes, attention_input=sizes.hidden) if later else sizes
        shape = tuple(drafter.tensors[key].shape)
        if shape != formula(here):
            wrong.append(Mismatch(key, shape, formula(here)))
    return (), wrong


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _size(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = config.get(key)
    return int(value) if _positive(value) else otherwise  # type: ignore[arg-type]  # _positive says that it is a number


def _sizes(config: Mapping[str, Any], hidden_states: int) -> Sizes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = _size(config, "head_dim", hidden // heads)
    return Sizes(
        hidden=hidden,
        # Both engines take the drafter's own width where the config does not say the target's, whatever that has.
        target_hidden=_size(config, "target_hidden_size", hidden),
        q=heads * head_dim,
        kv=_size(config, "num_key_value_heads", heads) * head_dim,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        draft_vocab=_size(config, "draft_vocab_size", config["vocab_size"]),
        aux=hidden_states,
        attention_input=2 * hidden,
    )

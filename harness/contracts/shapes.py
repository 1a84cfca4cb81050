"""A drafter's tensors against the sizes in its config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.checkpoint.read import Checkpoint
from harness.contracts.model import split
from harness.contracts.trials import LAYER_NAMES, TOP_NAMES, Sizes

__all__ = ["Found", "Mismatch", "body", "compare"]

_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A tensor whose shape is not what the config says."""

    key: str
    shape: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """What could be compared. `lacking`: keys of the config that the sizes need. `aux`: hidden states that fc takes."""

    lacking: tuple[str, ...]
    aux: int | None

    @property
    def complete(self) -> bool:
        """Whether every size was there."""
        return not self.lacking


def body(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a target's config that describes its decoder; vision models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def compare(drafter: Checkpoint, config: Mapping[str, Any], target: Checkpoint | None) -> tuple[Found, list[Mismatch]]:
    """Compare every tensor that has a known name with the shape that the config gives it."""
    lacking = tuple(key for key in _NEEDED if not _positive(config.get(key)))
    if lacking:
        return Found(lacking, None), []
    sizes = _sizes(drafter, config, target)
    wrong = []
    for key, tensor in drafter.tensors.items():
        kind, prefix, name = split(key)
        formula = (LAYER_NAMES if kind == "layer" else TOP_NAMES).get(name)
        if formula is None or name == "unknown_tensor.weight":
            continue
        later = prefix.listed.endswith("layers.1.")
        here = dataclasses.replace(sizes, attention_input=sizes.hidden) if later else sizes
        if tuple(tensor.shape) != formula(here):
            wrong.append(Mismatch(key, tuple(tensor.shape), formula(here)))
    return Found((), sizes.aux), wrong


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _size(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = config.get(key)
    return int(value) if _positive(value) else otherwise  # type: ignore[arg-type]  # _positive says that it is a number


def _sizes(drafter: Checkpoint, config: Mapping[str, Any], target: Checkpoint | None) -> Sizes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = _size(config, "head_dim", hidden // heads)
    theirs = _size(body(target.config), "hidden_size", hidden) if target else hidden
    wide = _size(config, "target_hidden_size", theirs)
    ids = _ids(config)
    fc = next((tensor.shape for key, tensor in drafter.tensors.items() if split(key)[2] == "fc.weight"), ())
    fitting = fc[1] // wide if len(fc) == 2 and fc[1] % wide == 0 else None
    return Sizes(
        hidden=hidden,
        target_hidden=wide,
        q=heads * head_dim,
        kv=_size(config, "num_key_value_heads", heads) * head_dim,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        draft_vocab=_size(config, "draft_vocab_size", config["vocab_size"]),
        aux=ids or fitting or Sizes.aux,
        attention_input=2 * hidden,
    )


def _ids(config: Mapping[str, Any]) -> int | None:
    """Return how many layers the config names, wherever it does."""
    nested = config.get("eagle_config")
    for where in (config, nested if isinstance(nested, dict) else {}):
        value = where.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(value, list) and value:
            return len(value)
    count = config.get("num_aux_hidden_states")
    return count if _positive(count) else None

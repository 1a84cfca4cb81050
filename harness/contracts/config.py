"""A drafter's config as engines see it, and the settings in it that change what the drafter computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["IDS", "Setting", "effective", "settings"]

IDS = "eagle_aux_hidden_state_layer_ids"

_BODY = "transformer_layer_config"

_MEANINGS: Mapping[str, str] = {
    "attention_bias": "whether q, k, v and o have biases",
    "bias": "whether fc has a bias",
    "eagle_config.fc_norm": "whether each auxiliary chunk is normalised before fc",
    "eagle_config.norm_before_fc": "whether the auxiliary hidden states are normalised before fc",
    "eagle_config.norm_output": "whether the drafter feeds back its normalised output",
    "fc_norm": "whether each auxiliary chunk is normalised before fc",
    "mlp_bias": "whether the MLP has biases",
    "norm_before_fc": "whether the auxiliary hidden states are normalised before fc",
    "norm_before_residual": "whether the residual branches off after hidden_norm",
    "norm_output": "whether the drafter feeds back its normalised output",
    "target_hidden_size": "the width of the target, where it is not the drafter's",
    "truncated_vocab_size": "the draft vocabulary, by another name",
    "use_aux_norm": "whether each auxiliary chunk is normalised before fc, by its old name",
}
"""Settings that change the drafter when they are on, and what they mean. Off is what a release does that has none."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting that is on."""

    key: str
    value: Any
    meaning: str


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the decoder's part at the top, where speculators nests it."""
    body = config.get(_BODY)
    outer = {key: value for key, value in config.items() if key != _BODY and value is not None}
    return {**(body if isinstance(body, dict) else {}), **(outer if isinstance(body, dict) else config)}


def settings(config: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the settings that change what the drafter computes, with their values."""
    flat = effective(config)
    if config.get("speculators_model_type") == "eagle3":
        # Absent means true there (vLLM 0.32.0, transformers_utils/configs/speculators/algos.py, update_eagle3).
        flat.setdefault("norm_before_residual", True)
    for key, meaning in _MEANINGS.items():
        value: Any = flat
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        same = key == "target_hidden_size" and value == flat.get("hidden_size")
        if value and not same:
            yield Setting(key, value, meaning)

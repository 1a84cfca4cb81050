"""A drafter's config as engines see it, and the settings in it that change what the drafter computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

__all__ = ["BODY", "IDS", "STAMP", "AuxIdsAre", "Setting", "aux_ids_are", "effective", "settings", "unspelled_rope"]

IDS = "eagle_aux_hidden_state_layer_ids"
BODY = "transformer_layer_config"
STAMP = "draftgate"
"""The config key under which a conversion keeps what the new dialect has no place for, and what layer ids count."""

AuxIdsAre = Literal["inputs", "outputs"]
"""What a layer id counts: the layer whose input is captured, or the layer whose output is (one less)."""

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
    body = config.get(BODY)
    outer = {key: value for key, value in config.items() if key != BODY and value is not None}
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


def aux_ids_are(config: Mapping[str, Any]) -> AuxIdsAre | None:
    """Return what an earlier conversion says that the layer ids count."""
    stamp = config.get(STAMP)
    said = stamp.get("aux_ids_are") if isinstance(stamp, Mapping) else None
    return said if said in ("inputs", "outputs") else None


def unspelled_rope(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `rope_parameters` if they say what `rope_theta` and `rope_scaling`, the older keys, do not say.

    transformers 5 reads them (modeling_rope_utils.py); its Llama before that takes theta 10000 where `rope_theta` is
    absent.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return None
    theta = rope.get("rope_theta") not in (None, 10000) and config.get("rope_theta") is None
    scaling = rope.get("rope_type", "default") != "default" and config.get("rope_scaling") is None
    return rope if theta or scaling else None

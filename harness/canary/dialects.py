"""How each trainer writes an EAGLE-3 drafter: key names, config layout, where the layer ids stand.

`target_config` and `drafter_config` return what goes into `config.json`; `rename` what a tensor is called;
`read_drafter_config` is the inverse, by the rules of vLLM 0.32.0 (`model_executor/models/llama_eagle3.py`,
`transformers_utils/configs/speculators/`, `v1/worker/gpu_model_runner.py`), for `reference` and the tests.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from harness.canary.layout import EPS, ROPE_THETA
from harness.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from harness.canary.spec import CanarySpec

__all__ = [
    "DIALECTS",
    "DialectRules",
    "DrafterConfig",
    "drafter_config",
    "read_drafter_config",
    "rename",
    "target_config",
]


@dataclasses.dataclass(frozen=True)
class DialectRules:
    """What sets a dialect apart. `layer_prefix` replaces `layers.0.`; `nested` options stand in `eagle_config`."""

    architecture: str
    layer_prefix: str
    t2d: bool = True
    nested: tuple[str, ...] = ()


DIALECTS: dict[str, DialectRules] = {
    "yuhuili": DialectRules("LlamaForCausalLM", "midlayer."),
    "specforge": DialectRules("LlamaForCausalLMEagle3", "midlayer."),
    "modelopt": DialectRules("LlamaForCausalLMEagle3", "layers.0.", t2d=False, nested=("norm_before_fc",)),
    "angelslim": DialectRules("Eagle3LlamaForCausalLM", "midlayer."),
    "speculators": DialectRules("Eagle3DraftModel", "layers.0."),
}

_OPTIONS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
_IDS = "eagle_aux_hidden_state_layer_ids"


def rename(name: str, dialect: str) -> str | None:
    """Return what a dialect calls the tensor that `drafter.drafter_tensors` calls `name`; None if it leaves it out."""
    rules = DIALECTS[dialect]
    if name == "t2d" and not rules.t2d:
        return None
    return name.replace("layers.0.", rules.layer_prefix, 1)


def _body(spec: CanarySpec, *, layers: int, intermediate: int, attention_bias: bool) -> dict[str, Any]:
    """Return the keys that a Llama config has in every dialect."""
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": intermediate,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": spec.vocab - 2,
        "eos_token_id": spec.vocab - 1,
        "torch_dtype": spec.dtype,
    }


def target_config(spec: CanarySpec, intermediate: int) -> dict[str, Any]:
    """Return the target's `config.json`."""
    body = _body(spec, layers=spec.layers, intermediate=intermediate, attention_bias=False)
    return {"architectures": ["LlamaForCausalLM"], **body}


def drafter_config(spec: CanarySpec, intermediate: int, draft_vocab: int) -> dict[str, Any]:
    """Return the drafter's `config.json` in the spec's dialect."""
    rules = DIALECTS[spec.dialect]
    body = _body(spec, layers=1, intermediate=intermediate, attention_bias=spec.attention_bias)
    ids = [layer - (spec.aux_ids_are == "outputs") for layer in spec.aux]
    eagle_config: dict[str, Any] = {}
    if spec.aux_ids == "nested":
        eagle_config |= {"use_aux_hidden_state": True, _IDS: ids}
    eagle_config |= {name: getattr(spec, name) for name in rules.nested}
    outer: dict[str, Any] = {"draft_vocab_size": draft_vocab}
    outer |= {_IDS: ids} if spec.aux_ids == "top-level" else {}
    outer |= {"eagle_config": eagle_config} if eagle_config else {}
    # speculators means True where norm_before_residual is absent, the others False: there it is always written.
    always = ("norm_before_residual",) if spec.dialect == "speculators" else ()
    outer |= {
        name: getattr(spec, name)
        for name in _OPTIONS
        if name not in rules.nested and (getattr(spec, name) or name in always)
    }
    if spec.dialect != "speculators":
        return {"architectures": [rules.architecture], **body, **outer}
    return {
        "architectures": [rules.architecture],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "../target", "architectures": ["LlamaForCausalLM"]},
        },
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
        "transformer_layer_config": body,
        **outer,
    }


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """What a drafter's `config.json` says, whatever its dialect. `aux_layers` None means the engine's default."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    vocab: int
    draft_vocab: int
    aux_layers: tuple[int, ...] | None
    fc_norm: bool
    norm_before_fc: bool
    norm_before_residual: bool
    norm_output: bool


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read a drafter's config in any dialect. Raises `CheckpointError` naming the file and the key."""
    file = folder / "config.json"
    try:
        outer = json.loads(file.read_text())
        speculators = "speculators_model_type" in outer
        body = outer["transformer_layer_config"] if speculators else outer
        nested = outer.get("eagle_config") or {}
        ids = outer.get(_IDS) or nested.get(_IDS)
        return DrafterConfig(
            heads=body["num_attention_heads"],
            kv_heads=body["num_key_value_heads"],
            head_dim=body["head_dim"],
            eps=body["rms_norm_eps"],
            rope_theta=body["rope_theta"],
            vocab=body["vocab_size"],
            draft_vocab=outer.get("draft_vocab_size") or body["vocab_size"],
            aux_layers=tuple(ids) if ids else None,
            fc_norm=outer.get("fc_norm", False),
            norm_before_fc=nested.get("norm_before_fc", outer.get("norm_before_fc", False)),
            norm_before_residual=outer.get("norm_before_residual", speculators),
            norm_output=outer.get("norm_output", False),
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})", remedy="give a drafter's folder") from error
    except KeyError as error:
        raise CheckpointError(f"{file}: has no key {error}", remedy="give a drafter that a canary wrote") from error

"""The synthetic checkpoints by which a release is questioned: every known name, under every known prefix and option.

All sizes differ, so that the shape of a parameter tells what it is made of.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.canary.dialects import DIALECTS, drafter_config, rename, target_config
from harness.canary.faults import NOT_LOADED
from harness.canary.spec import CanarySpec

__all__ = [
    "ABSENT", "AUX_ASKED", "CONDITIONS", "CONFIG_KEYS", "DECOY", "DIALECT_TRIALS", "LAYER_NAMES", "LAYER_PREFIXES",
    "NATIVE", "NEEDED", "TOP_NAMES", "TOP_PREFIXES", "UNKNOWN", "Condition", "Sizes", "Trial", "all_trials",
    "ids_trials", "write",
]  # fmt: skip

NATIVE = "midlayer."
"""The decoder layer's prefix that every release knows; a release is accepted by a drafter written in it."""

LAYER_PREFIXES = (
    NATIVE, "layers.0.", "layers.1.", "layers.61.", "model.midlayer.", "model.layers.0.", "model.layers.1.",
    "draft_model.midlayer.", "draft_model.layers.0.", "decoder.", "unknown.", "",
)  # fmt: skip
TOP_PREFIXES = ("", "model.", "draft_model.", "encoder.", "unknown.")

DECOY = "draftgate_decoy"
"""A config key that nobody honours: a module that reads it is copying or printing the config."""

UNKNOWN = {"layer": ("decoder.", "unknown."), "top": ("draft_model.", "encoder.", "unknown.")}
"""Prefixes that stand for every one that is not listed. They must fare alike, or nothing is said of others."""

AUX_ASKED = {"default": None, "1,3,6": [1, 3, 6]}
"""Layer ids that a target of eight layers is asked to capture."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Every size of the synthetic drafter, each sum and product that matters different from the others."""

    hidden: int = 160
    target_hidden: int = 160
    q: int = 256
    kv: int = 128
    head_dim: int = 64
    """Releases have kernels for 64, 128 and so on, and go other ways for other sizes."""
    intermediate: int = 224
    vocab: int = 1024
    draft_vocab: int = 192
    aux: int = 3
    attention_input: int = 320
    """Width of what q, k and v read: twice `hidden` in the first layer, `hidden` in any other."""

    def formulas(self) -> dict[int, str]:
        """Return size -> what it is made of, as data files write it."""
        return {
            3 * self.hidden: "3*hidden",
            self.target_hidden: "target_hidden",
            self.aux * self.target_hidden: "n_aux*target_hidden",
            self.hidden: "hidden",
            2 * self.hidden: "2*hidden",
            self.q: "q",
            self.kv: "kv",
            self.q + 2 * self.kv: "q+2*kv",
            self.head_dim: "head_dim",
            self.intermediate: "intermediate",
            2 * self.intermediate: "2*intermediate",
            self.vocab: "vocab",
            self.draft_vocab: "draft_vocab",
        }


_Shape = Callable[[Sizes], tuple[int, ...]]

LAYER_NAMES: Mapping[str, _Shape] = {
    "hidden_norm.weight": lambda s: (s.hidden,),
    "input_layernorm.weight": lambda s: (s.hidden,),
    "mlp.down_proj.bias": lambda s: (s.hidden,),
    "mlp.down_proj.weight": lambda s: (s.hidden, s.intermediate),
    "mlp.gate_proj.bias": lambda s: (s.intermediate,),
    "mlp.gate_proj.weight": lambda s: (s.intermediate, s.hidden),
    "mlp.up_proj.bias": lambda s: (s.intermediate,),
    "mlp.up_proj.weight": lambda s: (s.intermediate, s.hidden),
    "post_attention_layernorm.weight": lambda s: (s.hidden,),
    "self_attn.k_norm.weight": lambda s: (s.head_dim,),
    "self_attn.k_proj.bias": lambda s: (s.kv,),
    "self_attn.k_proj.weight": lambda s: (s.kv, s.attention_input),
    "self_attn.o_proj.bias": lambda s: (s.hidden,),
    "self_attn.o_proj.weight": lambda s: (s.hidden, s.q),
    "self_attn.q_norm.weight": lambda s: (s.head_dim,),
    "self_attn.q_proj.bias": lambda s: (s.q,),
    "self_attn.q_proj.weight": lambda s: (s.q, s.attention_input),
    "self_attn.rotary_emb.inv_freq": lambda s: (s.head_dim // 2,),
    "self_attn.v_proj.bias": lambda s: (s.kv,),
    "self_attn.v_proj.weight": lambda s: (s.kv, s.attention_input),
    "unknown_tensor.weight": lambda s: (s.hidden,),
}
"""Names inside the decoder layer, with their shapes in the first layer."""

TOP_NAMES: Mapping[str, _Shape] = {
    "aux_norm_high.weight": lambda s: (s.target_hidden,),
    "aux_norm_low.weight": lambda s: (s.target_hidden,),
    "aux_norm_mid.weight": lambda s: (s.target_hidden,),
    "d2t": lambda s: (s.draft_vocab,),
    "embed_tokens.weight": lambda s: (s.vocab, s.hidden),
    "fc.bias": lambda s: (s.hidden,),
    "fc.weight": lambda s: (s.hidden, s.aux * s.target_hidden),
    "fc_norm.0.weight": lambda s: (s.target_hidden,),
    "fc_norm.1.weight": lambda s: (s.target_hidden,),
    "fc_norm.2.weight": lambda s: (s.target_hidden,),
    "input_norm.weight": lambda s: (s.aux * s.target_hidden,),
    "lm_head.weight": lambda s: (s.draft_vocab, s.hidden),
    "mask_hidden": lambda s: (1, s.aux * s.target_hidden),
    "norm.weight": lambda s: (s.hidden,),
    "t2d": lambda s: (s.vocab,),
    "unknown_tensor.weight": lambda s: (s.hidden,),
}
"""Names outside the decoder layer."""

_LEGACY = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
"""Old names of `fc_norm.0` to `.2`: in a trial of their own, for both would write to the same place."""

NEEDED = {
    "": ("d2t", "fc.weight", "lm_head.weight", "norm.weight", "t2d"),
    NATIVE: tuple(
        name
        for name in LAYER_NAMES
        if name.endswith(".weight") and not name.startswith(("self_attn.k_norm", "self_attn.q_norm", "unknown"))
    ),
}
"""Prefix -> names of what every EAGLE-3 drafter has; `embed_tokens` is the target's unless the drafter brings it."""

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Condition:
    """A setting of the drafter's config, written `path=value`, and the sizes that follow from it."""

    path: str
    value: Any
    sizes: Sizes = dataclasses.field(default_factory=Sizes)

    @property
    def when(self) -> str:
        """How data files name it."""
        return f"{self.path}={json.dumps(self.value, separators=(',', ':'))}"

    def apply(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with the setting in it."""
        first, _, rest = self.path.partition(".")
        if self.value == ABSENT:
            return {key: value for key, value in config.items() if key != first}
        return config | {first: config.get(first, {}) | {rest: self.value} if rest else self.value}


ABSENT = "absent"
"""The value of a key that is not there."""

_FOUR = [1, 3, 5, 6]

CONDITIONS: tuple[Condition, ...] = (
    Condition("attention_bias", value=True),
    Condition("bias", value=True),
    Condition("draft_vocab_size", ABSENT, Sizes(draft_vocab=1024)),
    Condition("draft_vocab_size", None, Sizes(draft_vocab=1024)),
    Condition("draft_vocab_size", 1024, Sizes(draft_vocab=1024)),
    Condition(f"eagle_config.{_IDS}", _FOUR, Sizes(aux=4)),
    Condition("eagle_config.fc_norm", value=True),
    Condition("eagle_config.norm_before_fc", value=True),
    Condition("eagle_config.norm_output", value=True),
    Condition("eagle_config.use_aux_hidden_state", value=False),
    Condition(_IDS, _FOUR, Sizes(aux=4)),
    Condition("fc_norm", value=True),
    Condition("mlp_bias", value=True),
    Condition("norm_before_fc", value=True),
    Condition("norm_before_residual", value=True),
    Condition("norm_output", value=True),
    Condition("num_aux_hidden_states", 4, Sizes(aux=4)),
    Condition("num_hidden_layers", 2),
    Condition("target_hidden_size", 144, Sizes(target_hidden=144)),
    Condition("tie_word_embeddings", value=True),
    Condition("truncated_vocab_size", 192),
    Condition("use_aux_norm", value=True),
)
"""Settings that may change which parameters there are or which names are loaded, one trial for each."""

CONFIG_KEYS = tuple(
    sorted(
        {condition.path for condition in CONDITIONS}
        | {"hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_scaling", "rope_theta"}
        | {"transformer_layer_config"}
    )
)
"""Config keys of which a contract says who reads them."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One question: a config and the tensors that come with it."""

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    target_hidden: int = Sizes.target_hidden


def _spec(dialect: str = "specforge") -> CanarySpec:
    size = Sizes()
    return CanarySpec(
        "contract", hidden=size.hidden, heads=size.q // size.head_dim, kv_heads=size.kv // size.head_dim,
        head_dim=size.head_dim, classes=16, vocab=size.vocab, dialect=dialect,  # type: ignore[arg-type]  # a DIALECTS key
    )  # fmt: skip


def _config(dialect: str = "specforge") -> dict[str, Any]:
    return drafter_config(_spec(dialect), Sizes.intermediate, Sizes.draft_vocab) | {DECOY: 1}


_Shapes = dict[str, tuple[int, ...]]


def _tensors(prefix: str, names: Iterable[str], sizes: Sizes, known: Mapping[str, _Shape]) -> _Shapes:
    return {prefix + name: known[name](sizes) for name in names}


def _needed(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return _tensors("", NEEDED[""], sizes, TOP_NAMES) | _tensors(NATIVE, NEEDED[NATIVE], sizes, LAYER_NAMES)


DIALECT_TRIALS = {f"dialect {name}": name for name in DIALECTS}


def ids_trials() -> dict[str, Trial]:
    """Return, by where the layer ids stand in its config, a drafter that names the layers of `AUX_ASKED`."""
    ids, needed = AUX_ASKED["1,3,6"], _needed(Sizes())
    return {
        "nested": Trial("ids", _config() | {"eagle_config": {_IDS: ids}}, needed),
        "top-level": Trial("ids", _config() | {_IDS: ids}, needed),
    }


def all_trials() -> list[Trial]:
    """Return every trial, the one that decides whether a release is accepted first."""
    base, sizes = _config(), Sizes()
    needed = _needed(sizes)
    control = {key: shape for key, shape in needed.items() if key not in (f"{NATIVE}hidden_norm.weight", "norm.weight")}
    new_names = [name for name in TOP_NAMES if name not in _LEGACY]
    trials = [Trial("native", base, needed), Trial("control", base, control)]
    bare = [name for name in LAYER_NAMES if name not in TOP_NAMES]
    trials += [
        Trial(f"layer {p}", base, _tensors(p, LAYER_NAMES if p else bare, sizes, LAYER_NAMES)) for p in LAYER_PREFIXES
    ]
    trials += [Trial(f"top {p}", base, _tensors(p, new_names, sizes, TOP_NAMES)) for p in TOP_PREFIXES]
    trials += [Trial(f"legacy {p}", base, _tensors(p, _LEGACY, sizes, TOP_NAMES)) for p in TOP_PREFIXES]
    for condition in CONDITIONS:
        size, config = condition.sizes, condition.apply(base)
        keys = _tensors("", new_names, size, TOP_NAMES) | _tensors(NATIVE, LAYER_NAMES, size, LAYER_NAMES)
        if condition.path == "num_hidden_layers":
            later = dataclasses.replace(size, attention_input=size.hidden)
            keys |= _tensors("layers.1.", LAYER_NAMES, later, LAYER_NAMES)
        trials.append(Trial(f"when {condition.when}", config, keys, size.target_hidden))
        other = _tensors("layers.0.", LAYER_NAMES, size, LAYER_NAMES)
        trials.append(Trial(f"layers.0. when {condition.when}", config, other, size.target_hidden))
        if "fc_norm" in condition.path or "aux_norm" in condition.path:
            legacy = _tensors("", _LEGACY, size, TOP_NAMES)
            trials.append(Trial(f"legacy when {condition.when}", config, legacy, size.target_hidden))
    for name, dialect in DIALECT_TRIALS.items():
        originals = {key.replace(NATIVE, "layers.0."): shape for key, shape in needed.items()}
        named = {new: shape for key, shape in originals.items() if (new := rename(key, dialect)) is not None}
        trials.append(Trial(name, _config(dialect), named))
    return trials


def write(trials: Iterable[Trial], folder: Path) -> list[dict[str, str]]:
    """Write each trial's checkpoint and its target's config; return them as the request to an engine lists them."""
    import numpy as np  # noqa: PLC0415 -- only when deriving
    from safetensors.numpy import save_file  # noqa: PLC0415 -- as above

    rows = []
    for number, trial in enumerate(trials):
        place = folder / f"trial-{number:02}"
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(trial.config, indent=1))
        tensors = {key: _values(np, key, shape) for key, shape in trial.shapes.items()}
        save_file(tensors, str(place / "model.safetensors"), metadata={"format": "pt"})
        target = target_folder(folder, trial.target_hidden)
        rows.append({"name": trial.name, "folder": str(place), "target": str(target)})
    return rows


def target_folder(folder: Path, hidden: int) -> Path:
    """Return the folder of a target of this width, made on first use. It has a config and no weights."""
    place = folder / f"target-{hidden}"
    if not place.exists():
        place.mkdir(parents=True)
        config = target_config(_spec(), Sizes.intermediate) | {"hidden_size": hidden}
        (place / "config.json").write_text(json.dumps(config, indent=1))
    return place


def _values(np: Any, key: str, shape: tuple[int, ...]) -> Any:
    import ml_dtypes  # noqa: PLC0415 -- only when deriving

    last = key.rpartition(".")[2]
    if last == "d2t":
        return np.arange(shape[0], dtype=np.int64) if shape[0] < Sizes.vocab else np.zeros(shape, np.int64)
    if last in NOT_LOADED:
        return np.arange(shape[0]) % 2 == 0
    return np.ones(shape, np.float32 if last == "inv_freq" else ml_dtypes.bfloat16)

"""What a canary pair looks like: the choices from which every weight follows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, Literal

from harness.errors import UsageError

__all__ = ["CODES", "SHIPPED", "CanarySpec", "default_aux_layers"]

CODES = 8
"""How many codes the history is folded into: `code(token) = class(token) mod CODES`."""

BUILDER = 2
"""Version of the arithmetic in `target` and `drafter`. Raise it when the same spec gives other bytes."""

Dialect = Literal["yuhuili", "specforge", "modelopt", "angelslim", "speculators"]


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs both engines capture when a checkpoint names none: 2, L//2, L-3."""
    return (2, layers // 2, layers - 3)


@dataclasses.dataclass(frozen=True)
class CanarySpec:
    """A canary pair. Raises `UsageError` when the numbers cannot make one.

    `aux_layers` are three target layers in one convention: *k* is the residual stream that enters layer *k*. How they
    are written into the drafter's config is `aux_ids`, and `aux_ids_are` says whether the file numbers layer inputs
    (vLLM 0.32.0, `v1/worker/gpu_model_runner.py`) or layer outputs, one less (SGLang 0.5.23, `models/llama.py`, which
    adds one).
    """

    name: str
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int | None = None
    """The target's MLP width; None is the smallest that fits. The drafter's is always the smallest that fits."""
    classes: int = 32
    vocab: int = 512
    aux_layers: tuple[int, int, int] | None = None
    """None is `default_aux_layers(layers)`; after construction it is never None."""
    wrong_fraction: float = 0.0
    """Share of the drafter's table that is wrong on purpose."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 7
    max_positions: int = 4096
    dialect: Dialect = "specforge"
    """Both engines load this one; SGLang 0.5.23 takes yuhuili's `LlamaForCausalLM` for a whole target."""
    aux_ids: Literal["none", "top-level", "nested"] = "none"
    aux_ids_are: Literal["inputs", "outputs"] = "inputs"
    own_embed_tokens: bool = False
    full_draft_vocab: bool = False
    """A row of the drafter's `lm_head` for every token of the target, and therefore no `d2t`."""
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    attention_bias: bool = False

    # The width that the classes need is checked where the channels are handed out, in `layout`.
    def __post_init__(self) -> None:
        aux = self.aux_layers or default_aux_layers(self.layers)
        object.__setattr__(self, "aux_layers", tuple(aux))
        for broken, why in self._rules():
            if broken:
                raise UsageError(f"canary {self.name!r}: {why}", remedy="change the spec's numbers")

    def _rules(self) -> list[tuple[bool, str]]:
        """Return every rule a spec can break, as (broken, why)."""
        aux = self.aux
        return [
            (
                self.classes % CODES != 0 or self.classes < 2 * CODES,
                f"classes must be a multiple of {CODES} from 16 up",
            ),
            (self.head_dim < self.classes, f"head_dim {self.head_dim} must be at least classes {self.classes}"),
            (self.head_dim % 2 != 0, "head_dim must be even, for the rotary embedding"),
            (self.kv_heads < 2, "kv_heads must be at least 2: the drafter's two heads need one each"),
            (self.heads % self.kv_heads != 0, "heads must be a multiple of kv_heads"),
            (self.vocab < 4 * self.classes, f"vocab must be at least {4 * self.classes}"),
            (len(aux) != 3 or len(set(aux)) != 3 or list(aux) != sorted(aux), "aux_layers must be three rising layers"),
            (min(aux) < 1 or max(aux) >= self.layers, f"aux_layers {aux} must lie in 1 .. {self.layers - 1}"),
            (not 0.0 <= self.wrong_fraction <= 1.0, "wrong_fraction must lie in 0 .. 1"),
            (
                self.aux_ids == "none" and aux != default_aux_layers(self.layers),
                f"aux_layers {aux} are not the engines' default, so aux_ids must say where to write them",
            ),
            (self.fc_norm and self.norm_before_fc, "fc_norm and norm_before_fc exclude each other"),
        ]

    @property
    def aux(self) -> tuple[int, int, int]:
        """`aux_layers`, which construction has made definite."""
        if self.aux_layers is None:
            raise AssertionError("unreachable: __post_init__ sets aux_layers")
        return self.aux_layers

    def as_json(self) -> dict[str, Any]:
        """Return the spec as JSON-ready values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CanarySpec:
        """Return the spec that `as_json` wrote. Raises `TypeError` for fields this version does not know."""
        return cls(**{**values, "aux_layers": tuple(values["aux_layers"])})

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the builder's version and every field: equal fingerprints mean equal bytes."""
        text = json.dumps({"builder": BUILDER, **self.as_json()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


SHIPPED: dict[str, CanarySpec] = {
    spec.name: spec
    for spec in (
        CanarySpec("small"),
        CanarySpec("small-wrong", wrong_fraction=0.25),
        CanarySpec("aux-layers", aux_layers=(1, 3, 6), aux_ids="nested"),
        CanarySpec("aux-layers-outputs", aux_layers=(1, 3, 6), aux_ids="nested", aux_ids_are="outputs"),
        CanarySpec("wide-1024", hidden=1024, layers=24),
        CanarySpec("wide-2048", hidden=2048, layers=12),
        CanarySpec("kimi-shape", hidden=7168, heads=2),
        # float32: without bfloat16 arithmetic a CPU is bound by computing, not by memory, and speculation gains little.
        CanarySpec("heavy", hidden=1536, layers=12, intermediate=8192, dtype="float32"),
    )
}
"""The pairs that ship, by name."""

"""The weights of a canary's target, a Llama.

Layer 0's attention looks two tokens back and writes that token's code. The MLP before auxiliary layer k writes the
current token's code into that layer's stamp, the MLP of layer k removes it again, so only the input of layer k bears
it. Every MLP advances the depth tag. The last one holds the table: one neuron for each (class, code) writes the next
class, which `lm_head` turns into its canonical token. Everything else is zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.canary.layout import (
    Mlp,
    Reader,
    TargetLayout,
    ballast,
    depth_tag,
    free_norm,
    head_phase,
    weight_dtype,
)
from harness.canary.spec import CODES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.canary.oracle import Oracle
    from harness.canary.spec import CanarySpec

__all__ = ["embedding", "target_intermediate", "target_tensors"]

LOGIT = 32.0
"""Logit of the right token; every other one is 0."""


def target_intermediate(spec: CanarySpec) -> int:
    """Return the MLP width: the spec's, or the smallest multiple of 64 that holds the last layer's neurons."""
    return spec.intermediate or -(-(spec.classes * CODES + CODES + 1) // 64) * 64


def embedding(spec: CanarySpec, oracle: Oracle) -> NDArray[Any]:
    """Return the target's embedding [vocab, hidden]: the constant, the class, everything else at rest."""
    at = TargetLayout.of(spec)
    row = np.zeros(spec.hidden)
    for channel in (at.one, at.code[-1], *(stamp[-1] for stamp in at.stamps), at.out[-1]):
        row[channel] = 1.0
    row[list(at.depth)] = depth_tag(spec, 0)
    row[list(at.ballast)] = ballast(float(row @ row) + 1, spec.hidden)
    table = np.tile(row.astype(weight_dtype(spec)), (spec.vocab, 1))
    for token in range(spec.vocab):
        table[token, at.token[oracle.class_of(token)]] = 1.0
    return table


def target_tensors(spec: CanarySpec, oracle: Oracle) -> dict[str, NDArray[Any]]:
    """Return every tensor of the target by its Hugging Face name."""
    at = TargetLayout.of(spec)
    rng = np.random.default_rng(spec.seed)
    dtype = weight_dtype(spec)
    marks = [*at.token, *at.code, *at.out, *(channel for stamp in at.stamps for channel in stamp)]
    tensors = {"model.embed_tokens.weight": embedding(spec, oracle)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = free_norm(rng, spec.hidden, marks=marks, one=[at.one], dtype=dtype)
        attention = _attention(spec, at, tensors[f"{prefix}input_layernorm.weight"], looks_back=layer == 0)
        tensors |= {f"{prefix}self_attn.{name}_proj.weight": tensor for name, tensor in attention.items()}
        mlp = _mlp(spec, at, oracle, layer, tensors[f"{prefix}post_attention_layernorm.weight"])
        tensors |= {f"{prefix}mlp.{name}_proj.weight": getattr(mlp, name) for name in ("gate", "up", "down")}
    norm = free_norm(rng, spec.hidden, marks=marks, one=[at.one], dtype=dtype)
    head = np.zeros((spec.vocab, spec.hidden), dtype)
    for a, token in enumerate(oracle.canonical):
        Reader(head, norm).read(token, at.out[a], LOGIT)
    return tensors | {"model.norm.weight": norm, "lm_head.weight": head}


def _attention(spec: CanarySpec, at: TargetLayout, norm: NDArray[Any], *, looks_back: bool) -> dict[str, NDArray[Any]]:
    """Return q, k, v, o: head 0 fetches the code of the token two back, or nothing at all."""
    dtype = norm.dtype
    q = np.zeros((spec.heads * spec.head_dim, spec.hidden), dtype)
    k = np.zeros((spec.kv_heads * spec.head_dim, spec.hidden), dtype)
    v = np.zeros_like(k)
    o = np.zeros((spec.hidden, spec.heads * spec.head_dim), dtype)
    if looks_back:
        for row, (query, key) in enumerate(
            zip(head_phase(2, spec.head_dim), head_phase(0, spec.head_dim), strict=True)
        ):
            Reader(q, norm).read(row, at.one, query)
            Reader(k, norm).read(row, at.one, key)
        for a in range(spec.classes):
            Reader(v, norm).read(a % CODES, at.token[a], 1.0)
        for code in range(CODES):
            o[at.code[code], code] = 1.0
            o[at.code[-1], code] = -1.0  # exactly one code is 1, so the rest channel goes from 1 to 0
    return {"q": q, "k": k, "v": v, "o": o}


def _mlp(spec: CanarySpec, at: TargetLayout, oracle: Oracle, layer: int, norm: NDArray[Any]) -> Mlp:
    """Return the MLP of one layer: the depth tag's step, stamps that come or go, and in the last the table."""
    mlp = Mlp(spec.hidden, target_intermediate(spec), norm, at.one)
    step = depth_tag(spec, layer + 1) - depth_tag(spec, layer)
    mlp.neuron({channel: float(change) for channel, change in zip(at.depth, step, strict=True) if change})
    for stamp, aux in zip(at.stamps, spec.aux, strict=True):
        sign = float(layer == aux - 1) - float(layer == aux)
        for code in range(CODES) if sign else ():
            mlp.neuron(
                {stamp[code]: sign, stamp[-1]: -sign},
                value={at.token[a]: 1.0 for a in range(code, spec.classes, CODES)},
            )
    if layer == spec.layers - 1:
        for a in range(spec.classes):
            for code in range(CODES):
                # 2 + 2 - 3 = 1 when both are there, -1 or less otherwise
                mlp.neuron(
                    {at.out[oracle.next_class(a, code)]: 1.0, at.out[-1]: -1.0},
                    when={at.token[a]: 2.0, at.code[code]: 2.0, at.one: -3.0},
                )
    return mlp

"""The weights of a canary's EAGLE-3 drafter, in the names every dialect starts from.

The drafter's state is the vector it is handed: `fc`'s output at first, then its own output fed back. Both look alike:
`prev` holds three times the code of the token at this position, `out` a class that was drafted (or none), constants
the rest. One step does this:

- `fc` adds the three stamps, one from each chunk. Three make 3, two make 2, and the table fires at 2.5: a chunk that is
  missing, swapped or captured one layer off stops everything.
- Head 0 looks at its own position and brings the class of the current token from the *embedding* half; the last head
  looks one position back and brings `prev` from the *hidden* half, which is the code of the token two before the
  current one. Queries are made of the hidden half, keys of the embedding half.
- The MLP holds the table, empties `token` and `code`, rewrites `prev` as the code of the current token and empties the
  old `out`. Those neurons are linear with gain one, so what was not quite right in the state it was handed is gone from
  the state it hands on: errors die instead of adding up.
- `lm_head` has a row for "none", which reads the constant and wins at 3/4 of a full `out`. A drafter that is broken
  anywhere therefore drafts a token that the target never says, and acceptance is exactly zero.

Norm weights are at least 2 on every channel where a one-hot is read, against 1 on the constant: with the engine's
default (ones) one-hots are read too low and the thresholds are not met.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.canary.layout import (
    DrafterLayout,
    Mlp,
    Reader,
    TargetLayout,
    ballast,
    fixed_norm,
    free_norm,
    head_phase,
    weight_dtype,
)
from harness.canary.spec import CODES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.canary.oracle import Oracle
    from harness.canary.spec import CanarySpec

__all__ = ["drafter_intermediate", "drafter_tensors"]

LOGIT = 32.0
"""Logit of the drafted class. "None" has three quarters of it, every other one 0."""
BIAS = 4.0
"""With `attention_bias`: what `v_proj` and `o_proj` take off and their biases add back."""


@dataclasses.dataclass(frozen=True)
class _State:
    """The constants of the drafter's state: `*_handed` as a step finds them, `*_kept` before the final norm.

    The two differ under `norm_output` only, where the final norm turns what is kept into what is handed. `prev_gain` is
    what `hidden_norm` makes of the residual's `prev` under `norm_before_residual`, else 1. `room` and `ballast` are the
    values on the channels of those names.
    """

    out_handed: float
    trade_handed: float
    trade_kept: float
    prev_gain: float
    room: tuple[float, ...]
    ballast: tuple[float, ...]

    @classmethod
    def of(cls, spec: CanarySpec) -> _State:
        out_handed, trade_handed, trade_kept = (2.0, 1.0, 2.0) if spec.norm_output else (1.0, 1.0, 1.0)
        prev_gain = 2.0 if spec.norm_before_residual else 1.0
        # Inside the layer `token` (1) and `code` (3) come in and `prev` grows to 3 * prev_gain; `room` makes way.
        room = _squares(round(1 + 9 + 9 * (prev_gain**2 - 1)))
        energy = 1 + 9 + out_handed**2 + trade_handed**2 + sum(value * value for value in room)
        return cls(out_handed, trade_handed, trade_kept, prev_gain, room, tuple(ballast(energy, spec.hidden)))


def _squares(energy: int) -> tuple[float, ...]:
    """Return up to four whole numbers whose squares add up to `energy`, the largest first (10 = 9 + 1)."""
    values = []
    while energy:
        values.append(int(energy**0.5))
        energy -= values[-1] ** 2
    return tuple(float(value) for value in values)


def drafter_intermediate(spec: CanarySpec) -> int:
    """Return the MLP width: the table, one neuron for each channel to empty or rewrite, one for the constants."""
    return -(-(spec.classes * CODES + 2 * spec.classes + 2 * CODES + 2) // 64) * 64


def drafter_tensors(spec: CanarySpec, oracle: Oracle) -> dict[str, NDArray[Any]]:
    """Return every tensor of the drafter. The decoder layer's names start with `layers.0.`; dialects rename."""
    at = DrafterLayout.of(spec)
    state = _State.of(spec)
    rng = np.random.default_rng(spec.seed + 1)
    dtype = weight_dtype(spec)
    tensors = _fc(spec, at, state, rng)
    if spec.own_embed_tokens:
        tensors["embed_tokens.weight"] = _embedding(spec, oracle, at)
    embedded: DrafterLayout | TargetLayout = at if spec.own_embed_tokens else TargetLayout.of(spec)
    token, one = embedded.token, embedded.one
    input_norm = free_norm(rng, spec.hidden, marks=token, one=[one], dtype=dtype)
    # Under norm_before_residual this norm's output is the residual, so what is carried on must have weight 1.
    carried = [*at.out, *at.ballast, *at.room, at.trade, at.one]
    hidden_norm = fixed_norm(rng, spec.hidden, dict.fromkeys(carried, 1.0) | dict.fromkeys(at.prev, 2.0), dtype)
    post_norm = free_norm(rng, spec.hidden, marks=[*at.token, *at.code, *at.prev, *at.out], one=[at.one], dtype=dtype)
    # Under norm_output this norm's output is the next state: it doubles `out` and halves `trade`, so energy is kept.
    norm = fixed_norm(
        rng,
        spec.hidden,
        dict.fromkeys([*carried, *at.prev], 1.0) | dict.fromkeys(at.out, 2.0) | {at.trade: 0.5},
        dtype,
    )
    tensors |= {
        "layers.0.input_layernorm.weight": input_norm,
        "layers.0.hidden_norm.weight": hidden_norm,
        "layers.0.post_attention_layernorm.weight": post_norm,
        "norm.weight": norm,
    }
    attention = _attention(spec, at, state, (token, one), (input_norm, hidden_norm))
    tensors |= {f"layers.0.self_attn.{name}": tensor for name, tensor in attention.items()}
    mlp = _mlp(spec, at, state, oracle, post_norm)
    tensors |= {f"layers.0.mlp.{name}_proj.weight": getattr(mlp, name) for name in ("gate", "up", "down")}
    return tensors | _head(spec, oracle, at, norm)


def _fc(spec: CanarySpec, at: DrafterLayout, state: _State, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return `fc` [hidden, 3 * hidden] and the norms before it, if any: stamps add up, constants come from chunk 0."""
    target = TargetLayout.of(spec)
    dtype = weight_dtype(spec)
    fc = np.zeros((spec.hidden, 3 * spec.hidden), dtype)
    norms = [np.ones(spec.hidden, dtype)] * 3
    tensors = {"fc.weight": fc}
    if spec.fc_norm or spec.norm_before_fc:
        marks = [channel for stamp in target.stamps for channel in stamp]
        norms = [free_norm(rng, spec.hidden, marks=marks, one=[target.one], dtype=dtype) for _ in range(3)]
    if spec.fc_norm:
        tensors |= {f"fc_norm.{chunk}.weight": norms[chunk] for chunk in range(3)}
    if spec.norm_before_fc:
        tensors["input_norm.weight"] = np.concatenate(norms)
    for chunk, stamp in enumerate(target.stamps):
        reader = Reader(fc, norms[chunk], chunk * spec.hidden)
        for code in range(CODES):
            reader.read(at.prev[code], stamp[code], 1.0)
    constants = {at.one: 1.0, at.out[-1]: state.out_handed, at.trade: state.trade_handed}
    constants |= dict(zip(at.room, state.room, strict=False)) | dict(zip(at.ballast, state.ballast, strict=True))
    for channel, value in constants.items():
        Reader(fc, norms[0]).read(channel, target.one, value)
    return tensors


def _embedding(spec: CanarySpec, oracle: Oracle, at: DrafterLayout) -> NDArray[Any]:
    """Return the drafter's own embedding [vocab, hidden]: the constant and the class, in its own channels."""
    row = np.zeros(spec.hidden)
    row[at.one] = 1.0
    row[list(at.ballast)] = ballast(2, spec.hidden)
    table = np.tile(row.astype(weight_dtype(spec)), (spec.vocab, 1))
    for token in range(spec.vocab):
        table[token, at.token[oracle.class_of(token)]] = 1.0
    return table


def _attention(
    spec: CanarySpec,
    at: DrafterLayout,
    state: _State,
    embedding: tuple[range, int],
    norms: tuple[NDArray[Any], NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    """Return q, k, v, o over [embedding half, hidden half].

    Head 0 with the first key-value head brings `token` from here, the last head with the last one `code` from one
    position back.
    """
    token, one = embedding
    dim = spec.head_dim
    q = np.zeros((spec.heads * dim, 2 * spec.hidden), norms[0].dtype)
    k = np.zeros((spec.kv_heads * dim, 2 * spec.hidden), q.dtype)
    v = np.zeros_like(k)
    o = np.zeros((spec.hidden, spec.heads * dim), q.dtype)
    back, kv_back = _back(spec)
    for row in range(dim):
        for head, kv_head, distance in ((0, 0, 0), (back, kv_back, 1)):
            Reader(q, norms[1], spec.hidden).read(head + row, at.one, head_phase(distance, dim)[row])
            Reader(k, norms[0]).read(kv_head + row, one, head_phase(0, dim)[row])
    for a in range(spec.classes):
        Reader(v, norms[0]).read(a, token[a], 1.0)
        o[at.token[a], a] = 1.0
    for code in range(CODES):
        Reader(v, norms[1], spec.hidden).read(kv_back + code, at.prev[code], 1.0)
        o[at.code[code], back + code] = 1.0
    Reader(v, norms[1], spec.hidden).read(kv_back + CODES, at.one, 1.0)
    for channel, value in zip(at.room, state.room, strict=False):
        o[channel, back + CODES] = -value
    tensors = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "o_proj.weight": o}
    if spec.attention_bias:
        tensors |= _biases(spec, at, Reader(v, norms[0]), one, tensors)
    return tensors


def _back(spec: CanarySpec) -> tuple[int, int]:
    """Return the first row of the last query head and of the last key-value head."""
    return (spec.heads - 1) * spec.head_dim, (spec.kv_heads - 1) * spec.head_dim


def _biases(
    spec: CanarySpec, at: DrafterLayout, value: Reader, one: int, weights: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the biases, and take out of the weights what they now carry, so that neither works alone.

    The last head's query and key become all bias. `token` and `code` pass with BIAS taken off by `v_proj` and `o_proj`
    and added back by their biases.
    """
    q, k, v, o = weights.values()
    back, kv_back = _back(spec)
    dim = spec.head_dim
    bias = {name: np.zeros(len(weight), weight.dtype) for name, weight in zip("qkvo", (q, k, v, o), strict=True)}
    for weight, values, rows, distance in ((q, bias["q"], back, 1), (k, bias["k"], kv_back, 0)):
        weight[rows : rows + dim] = 0
        values[rows : rows + dim] = head_phase(distance, dim)
    for a in range(spec.classes):
        value.read(a, one, -BIAS)
        bias["v"][a] = BIAS
    for code in range(CODES):
        o[at.code[code], back + CODES] = -BIAS
        bias["o"][at.code[code]] = BIAS
    return {f"{name}_proj.bias": values for name, values in bias.items()}


def _mlp(spec: CanarySpec, at: DrafterLayout, state: _State, oracle: Oracle, norm: NDArray[Any]) -> Mlp:
    """Return the MLP: the table, and the neurons that turn the layer's stream into the next state."""
    mlp = Mlp(spec.hidden, drafter_intermediate(spec), norm, at.one)
    for a in range(spec.classes):
        for code in range(CODES):
            # 4 + 2 * 3 - 9 = 1 when the token and all three stamps are there, -1 with two stamps, less otherwise
            mlp.neuron(
                {at.out[oracle.drafted_class(a, code)]: 1.0},
                when={at.token[a]: 4.0, at.code[code]: 2.0, at.one: -9.0},
            )
    for channel in (*at.token, *at.code, *at.out):
        mlp.neuron({channel: -1.0}, value={channel: 1.0})
    for code in range(CODES):
        current = {at.token[a]: 3.0 for a in range(code, spec.classes, CODES)}
        mlp.neuron({at.prev[code]: 1.0}, value={**current, at.prev[code]: -1.0})
    constants = dict(zip(at.room, state.room, strict=False)) | {at.trade: state.trade_kept - state.trade_handed}
    mlp.neuron(constants)
    return mlp


def _head(spec: CanarySpec, oracle: Oracle, at: DrafterLayout, norm: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return `lm_head`, and `d2t` and `t2d` unless the draft vocabulary is the target's.

    Draft id 0 is "none", draft id a + 1 class a; in a full vocabulary they stand at their tokens.
    """
    tokens = np.array([oracle.none_token, *oracle.canonical])
    rows = tokens if spec.full_draft_vocab else np.arange(len(tokens))
    head = np.zeros((spec.vocab if spec.full_draft_vocab else len(tokens), spec.hidden), norm.dtype)
    reader = Reader(head, norm)
    reader.read(rows[0], at.one, 0.75 * LOGIT)
    for a in range(spec.classes):
        reader.read(rows[a + 1], at.out[a], LOGIT)
    if spec.full_draft_vocab:
        return {"lm_head.weight": head}
    t2d = np.zeros(spec.vocab, np.bool_)
    t2d[tokens] = True
    return {"lm_head.weight": head, "d2t": (tokens - rows).astype(np.int64), "t2d": t2d}

"""A short PyTorch forward of a canary's target and drafter, to score a mutated drafter without an engine.

It computes in the checkpoint's dtype and loads as vLLM 0.32.0 does (`model_executor/models/llama_eagle3.py`,
`v1/spec_decode/llm_base_proposer.py`): what a checkpoint lacks stays as constructed (norms ones, matrices zeros here,
`d2t` zeros) except `embed_tokens` and `lm_head`, which are the target's. Needs torch (extra `reference`); it is the one
module of this package that imports it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from harness.canary.dialects import DrafterConfig, read_drafter_config
from harness.canary.oracle import Acceptance
from harness.canary.spec import default_aux_layers
from harness.errors import CheckpointError, EvidenceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from harness.canary.build import Canary

__all__ = ["Drafter", "Scorer", "Target"]


@dataclasses.dataclass(frozen=True)
class _Heads:
    """The shape of an attention block, and its rotary base."""

    query: int
    key: int
    dim: int
    theta: float

    def split(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return [n, heads * dim] as [n, heads, dim], turned by position where positions are given."""
        x = x.view(len(x), -1, self.dim)
        if positions is None:
            return x
        speed = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angle = positions[:, None, None].float() * speed
        low, high = x.float().chunk(2, -1)
        turned = torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)
        return turned.to(x.dtype)

    def widen(self, x: Tensor) -> Tensor:
        """Repeat key-value heads [n, key, dim] for the query heads that share them."""
        return x.repeat_interleave(self.query // self.key, 1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _attend(scores: Tensor, dim: int) -> Tensor:
    """Return softmax weights of raw scores [heads, n, m]; minus infinity masks."""
    return torch.softmax(scores / math.sqrt(dim), -1)


def _causal(n: int) -> Tensor:
    """Return the mask [n, n]: 0, or minus infinity where a row may not look."""
    return torch.full((n, n), -math.inf).triu(1)


class Target:
    """A Llama checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.layers: int = config["num_hidden_layers"]
        self.eps: float = config["rms_norm_eps"]
        self._heads = _Heads(
            config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["rope_theta"]
        )

    def forward(self, tokens: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return logits [n, vocab] and the input of every layer, last the output: layers + 1 tensors [n, hidden]."""
        with torch.inference_mode():
            return self._forward(tokens)

    def _forward(self, tokens: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        w = self.weights
        positions = torch.arange(len(tokens))
        mask = _causal(len(tokens))
        h = w["model.embed_tokens.weight"][torch.tensor(tokens)]
        inputs = [h]
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            x = _norm(h, w[p + "input_layernorm.weight"], self.eps)
            q = self._heads.split(x @ w[p + "self_attn.q_proj.weight"].T, positions).float()
            k = self._heads.widen(self._heads.split(x @ w[p + "self_attn.k_proj.weight"].T, positions)).float()
            v = self._heads.widen(self._heads.split(x @ w[p + "self_attn.v_proj.weight"].T)).float()
            weights = _attend(torch.einsum("nhd,mhd->hnm", q, k) + mask, self._heads.dim)
            seen = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1).to(h.dtype)
            h = h + seen @ w[p + "self_attn.o_proj.weight"].T
            x = _norm(h, w[p + "post_attention_layernorm.weight"], self.eps)
            x = silu(x @ w[p + "mlp.gate_proj.weight"].T) * (x @ w[p + "mlp.up_proj.weight"].T)
            h = h + x @ w[p + "mlp.down_proj.weight"].T
            inputs.append(h)
        return _norm(h, w["model.norm.weight"], self.eps) @ w["lm_head.weight"].T, inputs


_OUTER = ("embed_tokens.", "norm.", "input_norm.", "lm_head.", "d2t", "t2d")


class Drafter:
    """An EAGLE-3 Llama drafter, of any dialect, beside its target.

    `layers` overrules which target layers it is fed (inputs of those layers, lowest first, as the engine sorts them).
    """

    def __init__(self, folder: Path, target: Target, layers: Sequence[int] | None = None) -> None:
        self.config: DrafterConfig = read_drafter_config(folder)
        self._target = target
        found = load_file(folder / "model.safetensors")
        self._weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in found.items()}
        unknown = [name for name in self._weights if not name.startswith(("layers.0.", "fc", *_OUTER))]
        if unknown:
            raise CheckpointError(f"{folder}: vLLM refuses tensors it has no parameter for: {unknown}")
        self.layers = tuple(layers or self.config.aux_layers or default_aux_layers(target.layers))
        self._heads = _Heads(self.config.heads, self.config.kv_heads, self.config.head_dim, self.config.rope_theta)
        self._embed = self._weights.get("embed_tokens.weight", target.weights["model.embed_tokens.weight"])
        head = self._weights.get("lm_head.weight", target.weights["lm_head.weight"])
        self._head = head[: self.config.draft_vocab]
        self._d2t = self._weights.get("d2t", torch.zeros(self.config.draft_vocab, dtype=torch.int64))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights.get(f"{name}.weight")
        return _norm(x, torch.ones(x.shape[-1]) if weight is None else weight, self.config.eps)

    def _linear(self, x: Tensor, name: str, width: int) -> Tensor:
        weight = self._weights.get(f"{name}.weight")
        bias = self._weights.get(f"{name}.bias")
        y = x.new_zeros(len(x), width) if weight is None else x @ weight.T
        return y if bias is None else y + bias

    def _combine(self, aux: list[Tensor]) -> Tensor:
        """Return fc of the auxiliary states, each [n, hidden]."""
        hidden = aux[0].shape[-1]
        if self.config.fc_norm:
            aux = [self._norm(chunk, f"fc_norm.{index}") for index, chunk in enumerate(aux)]
        x = torch.cat(aux, -1)
        if self.config.norm_before_fc:
            x = self._norm(x, "input_norm")
        return self._linear(x, "fc", hidden)

    def _step(
        self, tokens: Tensor, state: Tensor, positions: Tensor, mask: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Run the drafter once at every row. Returns drafted target ids [n] and the next state [n, hidden].

        `past[0]` are keys and values of the true prefix, seen through `mask` [n, prefix], `past[1:]` those each row
        made itself. This step's own are appended.
        """
        heads, hidden = self._heads, state.shape[-1]
        embedded = self._norm(self._embed[tokens], "layers.0.input_layernorm")
        normed = self._norm(state, "layers.0.hidden_norm")
        residual = normed if self.config.norm_before_residual else state
        x = torch.cat([embedded, normed], -1)
        q = heads.split(self._linear(x, "layers.0.self_attn.q_proj", heads.query * heads.dim), positions).float()
        k = heads.split(self._linear(x, "layers.0.self_attn.k_proj", heads.key * heads.dim), positions)
        v = heads.split(self._linear(x, "layers.0.self_attn.v_proj", heads.key * heads.dim))
        past.append((heads.widen(k).float(), heads.widen(v).float()))
        (prefix_k, prefix_v), own = past[0], past[1:]
        prefix = len(prefix_k)
        scores = torch.einsum("nhd,mhd->hnm", q, prefix_k) + mask
        own_scores = [torch.einsum("nhd,nhd->hn", q, own_k)[..., None] for own_k, _ in own]
        weights = _attend(torch.cat([scores, *own_scores], -1), heads.dim)
        seen = torch.einsum("hnm,mhd->nhd", weights[..., :prefix], prefix_v)
        for index, (_, own_v) in enumerate(own):
            seen = seen + weights[..., prefix + index].T[..., None] * own_v
        h = residual + self._linear(seen.flatten(1).to(state.dtype), "layers.0.self_attn.o_proj", hidden)
        x = self._norm(h, "layers.0.post_attention_layernorm")
        h = h + self._mlp(x, hidden)
        out = self._norm(h, "norm")
        draft = (out @ self._head.T).argmax(-1)
        return draft + self._d2t[draft], out if self.config.norm_output else h

    def _mlp(self, x: Tensor, hidden: int) -> Tensor:
        """Return the SwiGLU block of x [n, hidden]; a missing matrix is zeros, and then so is the whole."""
        names = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        if any(name not in self._weights for name in names):
            return x.new_zeros(len(x), hidden)
        gate, up, down = (self._weights[name] for name in names)
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def drafts(self, tokens: Sequence[int], inputs: list[Tensor], k: int, first: int = 0) -> Tensor:
        """Return the k tokens drafted at each position p of a true sequence from `first` on: [n - first, k].

        `inputs` is every layer's input at positions 0 .. n-1; `tokens` are at least n + 1 true tokens, of which p + 1
        is known when p drafts. Each row is what an engine does there: the prefix's keys and values come from true
        tokens and the target's states; from the second draft token on the drafter is fed its own token and state.
        """
        with torch.inference_mode():
            return self._drafts(tokens, inputs, k, first)

    def _drafts(self, tokens: Sequence[int], inputs: list[Tensor], k: int, first: int) -> Tensor:
        n = len(inputs[0])
        state = self._combine([inputs[layer] for layer in sorted(set(self.layers))])
        now = torch.tensor(tokens[1 : n + 1])
        positions, mask = torch.arange(n), _causal(n)
        past: list[tuple[Tensor, Tensor]] = []
        drafted = []
        for step in range(k):
            now, state = self._step(now, state, positions + step, mask, past)
            if step == 0:
                now, state, positions, mask = now[first:], state[first:], positions[first:], mask[first:]
            drafted.append(now)
            now = now.clamp(0, len(self._embed) - 1)
        return torch.stack(drafted, 1)


class Scorer:
    """Greedy draft-and-verify over fixed prompts. The target runs once; each drafter is then scored in milliseconds."""

    def __init__(self, canary: Canary, prompts: Sequence[Sequence[int]], max_tokens: int, k: int) -> None:
        """Run the target over the oracle's continuations, all positions in one pass.

        Raises `EvidenceError` where the target's own choice is another: by induction its greedy output is then the
        oracle's, token for token.
        """
        self.target = Target(canary.target)
        self._max_tokens = max_tokens
        self._k = k
        self._runs: list[tuple[int, list[int], list[Tensor]]] = []
        for prompt in prompts:
            # A step that starts below max_tokens runs up to K tokens past it.
            tokens = [*prompt, *canary.oracle.continuation(prompt, max_tokens + k)]
            logits, inputs = self.target.forward(tokens[:-1])
            said = logits.argmax(-1)[len(prompt) - 1 :].tolist()
            if said != tokens[len(prompt) :]:
                raise EvidenceError(
                    f"{canary.target}: after {list(prompt)} the target says {said}, not the oracle's tokens"
                )
            self._runs.append((len(prompt), tokens, inputs))

    def score(self, drafter: Path, layers: Sequence[int] | None = None) -> Acceptance:
        """Return the engine's counts for a drafter's folder, summed over the prompts.

        `layers` overrules which layers' inputs it is fed.
        """
        k = self._k
        model = Drafter(drafter, self.target, layers)
        total = Acceptance(0, 0, 0, (0,) * k)
        for length, tokens, inputs in self._runs:
            drafted = model.drafts(tokens, inputs, k, first=length - 1).tolist()
            known = length + 1
            while known < length + self._max_tokens:
                pairs = zip(drafted[known - length - 1], tokens[known : known + k], strict=True)
                accepted = next((i for i, (draft, true) in enumerate(pairs) if draft != true), k)
                total += Acceptance(1, k, accepted, tuple(int(i < accepted) for i in range(k)))
                known += accepted + 1
        return total

"""A drafter's class that loads `midlayer.*` and drops everything else in silence, as SGLang 0.5.1 to 0.5.10 do."""

import sgl_kernel  # noqa: F401  # compiled: there is only a stand-in
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)


class Linear(nn.Module):
    def __init__(self, inner, outer, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outer, inner), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(outer), requires_grad=False)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, q, kv = config.hidden_size, config.num_attention_heads * config.head_dim, 2 * config.head_dim
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Linear(2 * hidden, q + 2 * kv, config.attention_bias)
        self.self_attn.o_proj = Linear(q, hidden)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = Linear(hidden, 2 * config.intermediate_size)
        self.mlp.down_proj = Linear(config.intermediate_size, hidden)
        self.hidden_norm, self.input_layernorm = Norm(hidden), Norm(hidden)
        self.post_attention_layernorm = Norm(hidden)


class LlamaForCausalLMEagle3(nn.Module):
    def __init__(self, config, quant_config=None):
        super().__init__()
        self.sizes = {"q": (0, 256), "k": (256, 128), "v": (384, 128), "gate": (0, 224), "up": (224, 224)}
        self.model = nn.Module()
        self.model.embed_tokens = Linear(config.hidden_size, config.vocab_size)
        self.model.fc = Linear(3 * config.hidden_size, config.hidden_size)
        self.model.midlayer = Layer(config)
        self.model.norm = Norm(config.hidden_size)
        if getattr(config, "fc_norm", False):
            self.model.fc_norm = nn.ModuleList(Norm(config.hidden_size) for _ in range(3))
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size)
        self.hot_token_id = None

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if "d2t" in name:
                self.hot_token_id = tensor + torch.arange(len(tensor))
                continue
            part = next((p for p in ("q", "k", "v", "gate", "up") if f".{p}_proj." in name), None)
            fused = "qkv_proj" if part in ("q", "k", "v") else "gate_up_proj"
            known = name.replace(f"{part}_proj", fused) if part else name
            parameter = parameters.get(known, parameters.get(f"model.{known}"))
            if parameter is None:
                continue
            place = parameter.data.narrow(0, *self.sizes[part]) if part else parameter.data
            assert place.shape == tensor.shape
            place.copy_(tensor)


EntryClass = LlamaForCausalLMEagle3

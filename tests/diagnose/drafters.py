"""Drafters with the founding incident's shapes: sparse files, of which only the header and d2t are real."""

import json
import math

import numpy as np

from tests.checkpoint.files import blob

HIDDEN, INTERMEDIATE, VOCAB, DRAFT_VOCAB, HEADS, HEAD_DIM, LAYERS = 7168, 18432, 163_840, 32_000, 64, 128, 61

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}

OFFSETS = np.arange(DRAFT_VOCAB, dtype="<i8") // 100 * 400
"""A sound d2t: runs of 100 tokens, 400 further on each time."""


def tensors(layer):
    """Return name -> (dtype, shape); `layer` is what stands before the decoder layer's names."""
    found = {
        "d2t": ("I64", [DRAFT_VOCAB]),
        "embed_tokens.weight": ("BF16", [VOCAB, HIDDEN]),
        "fc.weight": ("BF16", [HIDDEN, 3 * HIDDEN]),
        "norm.weight": ("BF16", [HIDDEN]),
        "lm_head.weight": ("BF16", [DRAFT_VOCAB, HIDDEN]),
    }
    within = {f"{name}.weight": [HIDDEN] for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    within |= {f"self_attn.{name}_proj.weight": [HEADS * HEAD_DIM, 2 * HIDDEN] for name in "qkv"}
    within |= {"self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD_DIM], "mlp.down_proj.weight": [HIDDEN, INTERMEDIATE]}
    within |= {f"mlp.{name}_proj.weight": [INTERMEDIATE, HIDDEN] for name in ("gate", "up")}
    return found | {layer + name: ("BF16", shape) for name, shape in within.items()}


def write(folder, found, config, d2t=OFFSETS):
    """Write a checkpoint whose data are a hole, but for d2t; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    header, position, places = {}, 0, {}
    for name, (dtype, shape) in found.items():
        size = math.prod(shape) * {"BF16": 2, "I64": 8}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        places[name] = position
        position += size
    start = blob(header)
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(start)
        handle.truncate(len(start) + position)
        if "d2t" in places:
            handle.seek(len(start) + places["d2t"])
            handle.write(d2t.astype("<i8").tobytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drafter(folder, layer="midlayer.", *, without=(), d2t=OFFSETS, **config):
    """Write a drafter, without the tensors named; keywords go into its config."""
    found = {name: value for name, value in tensors(layer).items() if name not in without}
    return write(folder, found, CONFIG | config, d2t)


def mla(folder, layer="layers.0.", **config):
    """Write a drafter with DeepSeek's attention, as Kimi-K2.5's published ones are."""
    found = {name: value for name, value in tensors(layer).items() if not name.endswith(("q_proj.weight", *_KV))}
    rows = {"q_a_proj": 1536, "q_b_proj": 12_288, "kv_a_proj_with_mqa": 576, "kv_b_proj": 16_384}
    found |= {f"{layer}self_attn.{name}.weight": ("BF16", [count, 512]) for name, count in rows.items()}
    return write(folder, found, CONFIG | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]} | config)


_KV = ("k_proj.weight", "v_proj.weight")


def target(folder, *, embedding=False, **config):
    """Write a target of which only the config matters, and its embedding if it is asked for: the drafter's, zeros."""
    found = {"lm_head.weight": ("BF16", [VOCAB, HIDDEN])}
    found |= {"model.embed_tokens.weight": ("BF16", [VOCAB, HIDDEN])} if embedding else {}
    found |= {f"model.layers.{n}.input_layernorm.weight": ("BF16", [HIDDEN]) for n in range(2)}
    return write(folder, found, TARGET_CONFIG | config)

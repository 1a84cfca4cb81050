"""A checkpoint of the trillion-parameter class as sparse files: real headers and an index, and no data on the disk."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from common import tell

__all__ = ["SHARDS", "make"]

SHARDS = 64
_LAYERS = 62
_EXPERTS = 384
_HIDDEN = 7168
_EXPERT = 2048
_SIZES = {"BF16": 2, "I32": 4, "I64": 8}


def _tensors(experts: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape: a dense layer and 61 of Kimi-K2's, 4-bit experts as compressed-tensors has them."""
    yield "language_model.model.embed_tokens.weight", "BF16", (163840, _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"language_model.model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", "BF16", (_HIDDEN,)
        yield f"{prefix}post_attention_layernorm.weight", "BF16", (_HIDDEN,)
        yield f"{prefix}self_attn.q_a_proj.weight", "BF16", (1536, _HIDDEN)
        yield f"{prefix}self_attn.q_a_layernorm.weight", "BF16", (1536,)
        yield f"{prefix}self_attn.q_b_proj.weight", "BF16", (12288, 1536)
        yield f"{prefix}self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, _HIDDEN)
        yield f"{prefix}self_attn.kv_a_layernorm.weight", "BF16", (512,)
        yield f"{prefix}self_attn.kv_b_proj.weight", "BF16", (16384, 512)
        yield f"{prefix}self_attn.o_proj.weight", "BF16", (_HIDDEN, 8192)
        if layer == 0:
            yield from ((f"{prefix}mlp.{name}_proj.weight", "BF16", (18432, _HIDDEN)) for name in ("gate", "up"))
            yield f"{prefix}mlp.down_proj.weight", "BF16", (_HIDDEN, 18432)
            continue
        yield f"{prefix}mlp.gate.weight", "BF16", (_EXPERTS, _HIDDEN)
        for expert in range(experts):
            for name, rows, columns in (
                ("gate", _EXPERT, _HIDDEN),
                ("up", _EXPERT, _HIDDEN),
                ("down", _HIDDEN, _EXPERT),
            ):
                parameter = f"{prefix}mlp.experts.{expert}.{name}_proj.weight"
                yield f"{parameter}_packed", "I32", (rows, columns // 8)
                yield f"{parameter}_scale", "BF16", (rows, columns // 32)
                yield f"{parameter}_shape", "I64", (2,)
    yield "language_model.model.norm.weight", "BF16", (_HIDDEN,)
    yield "language_model.lm_head.weight", "BF16", (163840, _HIDDEN)


def make(folder: Path, scale: float = 1.0) -> tuple[int, int]:
    """Write the checkpoint into a new folder. `scale` multiplies its experts. Return tensors, bytes of headers."""
    folder.mkdir(parents=True)
    tensors = list(_tensors(round(_EXPERTS * scale)))
    each = -(-len(tensors) // SHARDS)
    weight_map: dict[str, str] = {}
    total = headers = 0
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for tensor, dtype, shape in tensors[number * each : (number + 1) * each]:
            size = _SIZES[dtype]
            for extent in shape:
                size *= extent
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": (position, position + size)}
            position += size
            weight_map[tensor] = name
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / name).open("wb") as handle:
            handle.write(struct.pack("<Q", len(raw)) + raw)
            handle.truncate(8 + len(raw) + position)
        total += position
        headers += len(raw)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"hidden_size": _HIDDEN, "num_hidden_layers": _LAYERS, "vocab_size": 163840},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return len(tensors), headers


def main() -> int:
    """Make one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the experts (default: 1)")
    arguments = parser.parse_args()
    tensors, headers = make(arguments.folder, arguments.scale)
    print(tensors)
    tell(f"{tensors} tensors in {SHARDS} files, {headers / 1e6:.1f} MB of headers")
    return 0


if __name__ == "__main__":
    sys.exit(main())

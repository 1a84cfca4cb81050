"""Runs in the engine's environment: one vLLM, one pair, prompts from stdin; outputs and counters to a file.

Not a test module. Arguments: TARGET DRAFTER K MAX_TOKENS TP OUTPUT.
"""

import json
import sys
from pathlib import Path


def main():
    from vllm import LLM, SamplingParams

    target, drafter, k, max_tokens, tp, output = sys.argv[1:]
    prompts = json.load(sys.stdin)
    engine = LLM(
        model=target,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        tensor_parallel_size=int(tp),
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": int(k)},
    )
    sampling = SamplingParams(temperature=0, max_tokens=int(max_tokens), ignore_eos=True, detokenize=False)
    # One request at a time: see docs/canary.md on what vLLM counts when requests share a step.
    outputs = [
        list(engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in prompts
    ]
    counters = {
        metric.name.removeprefix("vllm:spec_decode_"): metric.values if hasattr(metric, "values") else metric.value
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    Path(output).write_text(json.dumps({"outputs": outputs, "counters": counters}))


if __name__ == "__main__":
    main()

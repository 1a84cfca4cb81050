"""Run by an engine's Python: serve a pair once, offline, and print its tokens. Arguments: target drafter tokens tp."""

import json
import sys

from vllm import LLM, SamplingParams

PROMPTS = [[1, 5, 7, 9, 20], [33, 2, 300, 41]]


def main() -> None:
    target, drafter, tokens, tp = sys.argv[1:]
    engine = LLM(
        model=target,
        skip_tokenizer_init=True,
        max_model_len=512,
        enforce_eager=True,
        enable_prefix_caching=False,
        tensor_parallel_size=int(tp),
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": 4},
    )
    sampling = SamplingParams(temperature=0, max_tokens=int(tokens), ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [engine.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    print("TOKENS", json.dumps([list(output) for output in outputs]))


if __name__ == "__main__":
    main()

"""Which layers of the target an engine captures for the ids in a drafter's config, by the target's class.

A contract says it of a Llama target (`captures 1,3,6`). The other classes were read: vLLM takes ids as they are for all
of them (0.32.0, model_executor/models/interfaces.py). In SGLang `set_eagle3_layers_to_capture` of every file in models/
was read in eleven releases, 0.4.6.post5 to 0.5.23. All add 1 to each id, but for two, and those only lately:
deepseek_v2.py with its subclasses and glm4_moe_lite.py, and gpt_oss.py. Between the releases that were read, and after
the last, both ways are possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packaging.version import Version

__all__ = ["Rule", "rules"]

_DEEPSEEK = frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM", "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM",
})  # fmt: skip
"""SGLang's DeepSeek class, what is derived from it (glm4_moe.py, mistral_large_3.py), what wraps it (kimi_k25.py), and
glm4_moe_lite.py, which has the same code."""
_GPT_OSS = "GptOssForCausalLM"

_LAST_READ = Version("0.5.23")


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a target's class counts. `layers`: ids -> the layers whose inputs are captured. `says`: the rule in words."""

    says: str
    source: str
    layers: Callable[[Sequence[int]], list[int]]

    def ids(self, inputs: Sequence[int]) -> list[int] | None:
        """Return the ids by which the inputs of these layers are captured; None if there are none."""
        for ids in ([layer - 1 for layer in inputs], list(inputs)):
            if ids and min(ids) >= 0 and self.layers(ids) == list(inputs):
                return ids
        return None


def _adding(number: int) -> Rule:
    says = f"adds {number} to each id" if number else "takes ids as they are"
    return Rule(says, "the target's own set-up of the capture, run", lambda ids: [i + number for i in ids])


_FIRST = Rule(
    "adds 1 to each id if the first is 1, else takes them as they are",
    "models/deepseek_v2.py, glm4_moe_lite.py, set_eagle3_layers_to_capture, read",
    lambda ids: [i + 1 for i in ids] if ids[:1] == [1] else list(ids),
)


def _last(layers: int) -> Rule:
    return Rule(
        f"adds 1 to each id unless one is {layers}, the number of layers",
        "models/gpt_oss.py, set_eagle3_layers_to_capture, read",
        lambda ids: list(ids) if ids and max(ids) == layers else [i + 1 for i in ids],
    )


def rules(engine: str, version: str, target: Mapping[str, Any] | None, added: int) -> tuple[Rule, ...]:
    """Return every rule that may hold, the likeliest first: one, where it is known.

    target: the target's config, None where there is none at hand. added: what the engine adds for a Llama target.
    """
    plain = _adding(added)
    if engine != "sglang":
        return (plain,)
    release = Version(version)
    if target is None:
        return (plain, _FIRST) if release > Version("0.5.12") else (plain,)
    names = target.get("architectures")
    names = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    layers = target.get("num_hidden_layers")
    if names & _DEEPSEEK:
        return _since(release, plain, _FIRST, "0.5.12", "0.5.15")
    if _GPT_OSS in names and isinstance(layers, int):
        return _since(release, plain, _last(layers), "0.5.15", "0.5.20")
    return (plain,)


def _since(release: Version, old: Rule, new: Rule, without: str, having: str) -> tuple[Rule, ...]:
    """Return the rule of a release, both if it lies between the last one `without` and the first one `having` it."""
    if release <= Version(without):
        return (old,)
    return (new,) if Version(having) <= release <= _LAST_READ else (new, old)

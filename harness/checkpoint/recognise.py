"""What kind of model a checkpoint holds: the method of drafting, whose dialect it is written in, what it reads.

Tensors decide; the config is asked for the rest, and where it says another method there is a finding. The table of
dialects is in docs/inspect.md. Names of architectures and of config keys are those of vLLM 0.32.0
(`model_executor/models/registry.py`, `transformers_utils/configs/speculators/algos.py`) and of the exporters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from harness.checkpoint.findings import Finding, Severity
from harness.checkpoint.read import Checkpoint

__all__ = ["METHODS", "AuxLayers", "Recognition", "recognise"]

METHODS: Mapping[str, str] = {
    "eagle": "EAGLE-1 or EAGLE-2 (the same weights, another tree)",
    "eagle3": "EAGLE-3",
    "p-eagle": "P-EAGLE (EAGLE-3 that drafts in parallel)",
    "mtp": "MTP / NextN",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "model": "language model (a target, or a plain draft model)",
    "unknown": "not recognised",
}

# The first row of which every pattern matches a tensor's family decides.
_TENSORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("p-eagle", (r"(?:^|\.)mask_hidden$", r"\*\.hidden_norm\.weight$")),
    ("eagle3", (r"(?:^|\.)(?:midlayer|layers\.\*)\.hidden_norm\.weight$",)),
    # Under whatever name the layer was written.
    ("eagle3", (r"(?:^|\.)fc\.weight$", r"\.hidden_norm\.weight$", r"\.self_attn\.")),
    # FasterDecoding's names, and vLLM's (`models/medusa.py`).
    ("medusa", (r"^(?:medusa_heads?\.)?\*\.\*\.linear\.(?:weight|bias)$",)),
    ("medusa", (r"^blocks\.\*\.layers\.\*\.weight$", r"^lm_heads?\.")),
    # DeepSeek and most others; Ernie; Qwen3-Next and MiMo (`models/*_mtp.py`).
    ("mtp", (r"(?:^|\.)eh_proj\.", r"(?:^|\.)hnorm\.")),
    ("mtp", (r"(?:^|\.)mtp_linear_proj\.",)),
    ("mtp", (r"(?:^|\.)mtp(?:_layers)?\.",)),
    # A DFlash drafter norms once, outside of its layers; `encoder.` is another exporter's (`models/qwen3_dflash.py`).
    ("dflash", (r"^(?:model\.)?hidden_norm\.weight$", r"^(?:model\.)?fc\.weight$")),
    ("dflash", (r"^encoder\.fc\.weight$", r"^encoder\.output_norm_enc\.weight$")),
    # speculators' own EAGLE-1 calls `fc` `fusion_fc`.
    ("eagle", (r"(?:^|\.)(?:fusion_)?fc\.weight$", r"(?:^|\.)(?:layers\.\*|transformer)\.self_attn\.q_proj\.weight$")),
    ("model", (r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings)\.", r"(?:^|\.)(?:layers|h|blocks)\.\*\.")),
)

_NO_DRAFTER = ("model", "unknown")

_SPECULATORS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle": "p-eagle",
    "dflash": "dflash",
    "dflash2": "dflash",
    "mtp": "mtp",
}
_ARCHITECTURES: tuple[tuple[str, str], ...] = (
    (r"(?i)P-?Eagle", "p-eagle"),
    (r"(?i)Eagle-?3", "eagle3"),
    (r"(?i)DFlash", "dflash"),
    (r"(?i)Medusa", "medusa"),
    (r"MTP|NextN", "mtp"),
    (r"(?i)Eagle", "eagle"),
)

_MTP_IN_A_LAYER = r"(?:^|\.)(?:eh_proj|mtp_linear_proj|mtp(?:_layers)?\.)"
_LAYER_NORM = r"(?:^|\.)layers\.\*\.input_layernorm\.weight$"


@dataclasses.dataclass(frozen=True)
class _Dialect:
    """A row of the table of dialects. What is None may be anything."""

    name: str
    architectures: tuple[str, ...]
    layer: str | None = None
    key: str | None = None


_DIALECTS = (
    _Dialect("speculators", (), key="speculators_model_type"),
    _Dialect("speculators", ("Eagle3Speculator", "Eagle3DraftModel", "PEagleDraftModel", "EagleSpeculator")),
    _Dialect("z-lab", ("DFlashDraftModel",), key="dflash_config"),
    _Dialect("nebius", ("LlamaForCausalLM",), layer="midlayer.", key="truncated_vocab_size"),
    _Dialect("yuhuili", ("LlamaForCausalLM",), layer="midlayer."),
    _Dialect("specforge", ("LlamaForCausalLMEagle3",), layer="midlayer."),
    _Dialect("modelopt", ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"), layer="layers.0."),
    _Dialect("angelslim", ("Eagle3LlamaForCausalLM",), layer="midlayer."),
)

_AUX_KEYS: tuple[tuple[str, ...], ...] = (
    ("eagle_aux_hidden_state_layer_ids",),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
    ("aux_hidden_state_layer_ids",),
    ("dflash_config", "target_layer_ids"),
    ("target_layer_ids",),
)
"""Where exporters write which target layers the drafter reads."""


@dataclasses.dataclass(frozen=True)
class AuxLayers:
    """Which target layers the drafter reads, as the file says: what a number means is for the engine to decide."""

    key: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Recognition:
    """What a checkpoint is.

    `method` is a key of `METHODS`, `method_source` what it rests on. `dialect` is empty where none fits. Of an EAGLE
    drafter, `wrapper` is what stands before every name ("", "model.", ...) and `layer` what follows it in the names of
    the first decoder layer ("midlayer.", "layers.0."). `contains_mtp`: a whole model that has MTP layers too.
    `aux_count` is how many hidden states `fc` takes, by its width; None where that cannot be said. Sizes are None where
    the checkpoint does not say them; `draft_vocab` also where it is no drafter.
    """

    method: str
    method_source: str
    dialect: str
    architectures: tuple[str, ...]
    wrapper: str
    layer: str
    contains_mtp: bool
    aux_layers: tuple[AuxLayers, ...]
    aux_count: int | None
    hidden: int | None
    target_hidden: int | None
    vocab: int | None
    draft_vocab: int | None


def recognise(checkpoint: Checkpoint) -> tuple[Recognition, tuple[Finding, ...]]:
    """Say what a checkpoint is. Codes: INS101 to INS106, see docs/inspect.md."""
    config = checkpoint.config
    body = _body(config)
    patterns = {family.pattern for family in checkpoint.families}
    architectures = tuple(name for name in _list(config.get("architectures")) if isinstance(name, str))
    method, source = _by_tensors(patterns)
    contains_mtp = method == "mtp" and _is_whole_model(checkpoint)
    if contains_mtp:
        method, source = "model", "more decoder layers than MTP layers"
    claim, claim_source = _by_config(config, architectures)
    if method == "unknown" and claim:
        method, source = claim, claim_source
    wrapper, layer = _prefixes(checkpoint) if method in ("eagle", "eagle3", "p-eagle") else ("", "")
    hidden = _int(body.get("hidden_size"))
    target_hidden = _int(config.get("target_hidden_size")) or hidden
    found = Recognition(
        method=method,
        method_source=source,
        dialect=_dialect(config, architectures, layer, method),
        architectures=architectures,
        wrapper=wrapper,
        layer=layer,
        contains_mtp=contains_mtp,
        aux_layers=tuple(_aux_layers(config)),
        aux_count=_aux_count(checkpoint, method, wrapper, target_hidden),
        hidden=hidden,
        target_hidden=target_hidden,
        vocab=_int(body.get("vocab_size")) or _int(config.get("vocab_size")),
        draft_vocab=_draft_vocab(checkpoint, config, body, wrapper) if method not in _NO_DRAFTER else None,
    )
    return found, tuple(_judge(checkpoint, found, claim, claim_source))


def _body(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes decoder layers; speculators and vision models nest it."""
    for key in ("transformer_layer_config", "text_config"):
        if isinstance(config.get(key), dict):
            nested: Mapping[str, Any] = config[key]
            return nested
    return config


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _by_tensors(patterns: set[str]) -> tuple[str, str]:
    for method, wanted in _TENSORS:
        found = [next((name for name in sorted(patterns) if re.search(pattern, name)), None) for pattern in wanted]
        if all(found):
            return method, f"tensors {', '.join(filter(None, found))}"
    return "unknown", "no tensor that is known"


def _by_config(config: Mapping[str, Any], architectures: tuple[str, ...]) -> tuple[str, str]:
    """Return the method that the config names, if any, and the key that names it."""
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and kind in _SPECULATORS:
        return _SPECULATORS[kind], f"speculators_model_type {kind!r}"
    for pattern, method in _ARCHITECTURES:
        for name in architectures:
            if re.search(pattern, name):
                return method, f"architectures {name!r}"
    for key, method in (("dflash_config", "dflash"), ("medusa_num_heads", "medusa")):
        if key in config:
            return method, key
    return "", ""


def _is_whole_model(checkpoint: Checkpoint) -> bool:
    def count(pattern: str) -> int:
        return sum(family.count for family in checkpoint.families if re.search(pattern, family.pattern))

    return count(_LAYER_NORM) > max(1, min(count(_MTP_IN_A_LAYER), count(r"(?:^|\.)(?:hnorm|pre_fc_norm_hidden)\.")))


def _prefixes(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return what stands before all names and before those of the first decoder layer."""
    for name in checkpoint.tensors:
        before, attention, _ = name.partition(".self_attn.")
        parts = before.split(".")
        if attention and parts[-1]:
            first = -2 if parts[-1].isdecimal() and len(parts) > 1 else -1
            return "".join(f"{part}." for part in parts[:first]), "".join(f"{part}." for part in parts[first:])
    return "", ""


def _dialect(config: Mapping[str, Any], architectures: tuple[str, ...], layer: str, method: str) -> str:
    if method in _NO_DRAFTER:
        return ""
    for row in _DIALECTS:
        named = not row.architectures or set(row.architectures) & set(architectures)
        if named and row.layer in (None, layer) and (row.key is None or row.key in config):
            return row.name
    return ""


def _aux_layers(config: Mapping[str, Any]) -> Iterator[AuxLayers]:
    for path in _AUX_KEYS:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            yield AuxLayers(".".join(path), tuple(value))


def _aux_count(checkpoint: Checkpoint, method: str, wrapper: str, target_hidden: int | None) -> int | None:
    fc = checkpoint.find(f"{wrapper}fc.weight")
    if method not in ("eagle3", "p-eagle", "dflash") or fc is None or len(fc.shape) != 2 or not target_hidden:
        return None
    return fc.shape[1] // target_hidden if fc.shape[1] % target_hidden == 0 else None


def _draft_vocab(
    checkpoint: Checkpoint, config: Mapping[str, Any], body: Mapping[str, Any], wrapper: str
) -> int | None:
    for value in (config.get("draft_vocab_size"), config.get("truncated_vocab_size"), body.get("draft_vocab_size")):
        if (size := _int(value)) is not None:
            return size
    head = checkpoint.find(f"{wrapper}lm_head.weight") or checkpoint.find("lm_head.weight")
    return head.shape[0] if head is not None and head.shape else None


def _judge(checkpoint: Checkpoint, found: Recognition, claim: str, claim_source: str) -> Iterator[Finding]:
    where = str(checkpoint.files.config or checkpoint.folder)
    if found.method == "unknown":
        yield Finding("INS101", Severity.WARNING, where, "neither tensors nor config say what kind of model this is")
    elif claim and claim != found.method and not (claim == "mtp" and found.contains_mtp):
        yield Finding(
            "INS102",
            Severity.ERROR,
            where,
            f"the config says {METHODS[claim]} ({claim_source}), the tensors say {METHODS[found.method]} "
            f"({found.method_source})",
            "put the config beside the weights that it was written with, or export again",
        )
    if found.method in ("eagle3", "p-eagle") and not found.dialect and checkpoint.files.config:
        yield Finding(
            "INS103",
            Severity.WARNING,
            where,
            f"no known exporter writes architectures {list(found.architectures)} with layers named {found.layer!r}: "
            "config and keys may be of two dialects, and engines look for the keys that belong to the config",
            "compare with the table of dialects in docs/inspect.md",
        )
    yield from _judge_aux(checkpoint, found, where)


def _judge_aux(checkpoint: Checkpoint, found: Recognition, where: str) -> Iterator[Finding]:
    fc = checkpoint.find(f"{found.wrapper}fc.weight")
    if found.method in ("eagle3", "p-eagle") and fc is not None and found.target_hidden and found.aux_count is None:
        yield Finding(
            "INS104",
            Severity.ERROR,
            f"{found.wrapper}fc.weight",
            f"its shape {list(fc.shape)} takes no multiple of the target's hidden size {found.target_hidden}",
            "if the target's hidden size is not the drafter's, write it as target_hidden_size into the config",
        )
    counts = {aux.key: len(aux.ids) for aux in found.aux_layers}
    if found.aux_count is not None and any(count != found.aux_count for count in counts.values()):
        yield Finding(
            "INS105",
            Severity.ERROR,
            where,
            f"fc takes {found.aux_count} hidden states, the config names "
            + ", ".join(f"{count} layers ({key})" for key, count in counts.items()),
            "name as many layers as fc was trained on",
        )
    ids = {aux.ids for aux in found.aux_layers if aux.key.endswith("eagle_aux_hidden_state_layer_ids")}
    if len(ids) > 1:
        yield Finding(
            "INS106",
            Severity.ERROR,
            where,
            "two places name different layers: " + "; ".join(f"{aux.key} {list(aux.ids)}" for aux in found.aux_layers),
            "leave one of them: engines differ in which one they read",
        )

"""A drafter whatever its dialect: one name for every tensor, one place for every setting, layers numbered one way.

Names are those of `harness.canary.drafter`: `layers.0.*`, `fc_norm.0.weight` and so on. `aux` numbers layers by their
input: *k* is the residual stream that enters layer *k* of the target.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from harness.checkpoint.read import Checkpoint
from harness.checkpoint.recognise import METHODS, Recognition, recognise
from harness.checkpoint.strict_json import shorten
from harness.contracts.config import BODY, IDS, STAMP, AuxIdsAre
from harness.contracts.config import aux_ids_are as stamped_ids
from harness.errors import CheckpointError, UsageError

__all__ = ["BODY", "EAGLE", "IDS", "OPTIONS", "STAMP", "TENSORS_OF", "AuxIdsAre", "Drafter", "understand"]

EAGLE = "eagle_config"

OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings that change the forward pass. Absent means off, but for the first one in speculators' dialect."""

_RENAMED = {
    # SGLang 0.5.12 to 0.5.23, models/llama_eagle3.py, legacy_name_map.
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
_PREFIX = re.compile(r"(?:draft_model\.|model\.)*")
_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)")
# Beside weights and biases, quantised checkpoints have scales and zero points of each projection.
_IN_LAYER = re.compile(
    r"(?:hidden_norm|input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight"
    r"|(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.[a-z_0-9]+"
    r"|self_attn\.rotary_emb\.inv_freq"
)
_AT_TOP = re.compile(
    r"fc\.[a-z_0-9]+|fc_norm\.\d+\.weight|input_norm\.weight|norm\.weight|lm_head\.[a-z_0-9]+"
    r"|embed_tokens\.[a-z_0-9]+|d2t|t2d"
)


@dataclasses.dataclass(frozen=True)
class Drafter:
    """An EAGLE-3 drafter, understood.

    `names`: the checkpoint's name of a tensor -> the common one; `unknown` are the checkpoint's tensors that have none.
    `body`: the config of the decoder and all that has no meaning here, without the keys of the other fields. `options`:
    every one of `OPTIONS`. `eagle`: what else stood in `eagle_config`. `aux`: None where the engine's default is meant.
    `aux_source`: how the ids were read. `kept`: what an earlier conversion, or this one, keeps of speculators'
    own keys. `notes`: what was decided and is not plain from the config.
    """

    checkpoint: Checkpoint
    about: Recognition
    names: Mapping[str, str]
    unknown: tuple[str, ...]
    layers: int
    kind: Literal["llama", "qwen3"]
    body: Mapping[str, Any]
    options: Mapping[str, bool]
    draft_vocab: int | None
    eagle: Mapping[str, Any]
    aux: tuple[int, ...] | None
    aux_source: str
    kept: Mapping[str, Any]
    notes: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Say whether there is a tensor of this common name."""
        return name in self.names.values()

    def matching(self, pattern: str) -> list[str]:
        """Return the common names that match a regular expression whole."""
        return [name for name in self.names.values() if re.fullmatch(pattern, name)]


def understand(checkpoint: Checkpoint, aux_ids_are: AuxIdsAre | None = None) -> Drafter:
    """Read a drafter. `aux_ids_are` says what its layer ids count, over whatever its dialect says.

    Raises:
        CheckpointError: it is no EAGLE-3 drafter of the Llama kind, or it contradicts itself.
        UsageError: it names layer ids, and neither it nor `aux_ids_are` says what they count.

    """
    about, _ = recognise(checkpoint)
    where = str(checkpoint.files.config or checkpoint.folder)
    if about.method != "eagle3":
        raise CheckpointError(
            f"{checkpoint.folder}: is {METHODS[about.method]}, by {about.method_source}",
            remedy="convert knows EAGLE-3 drafters only",
        )
    names, unknown = _names(checkpoint)
    _require_llama(checkpoint)
    known = set(names.values())
    layers = len({name.split(".")[1] for name in known if name.startswith("layers.")})
    speculators = isinstance(checkpoint.config.get(BODY), dict)
    body, kept = _flatten(checkpoint.config, where) if speculators else _flat(checkpoint.config)
    notes: list[str] = []
    eagle = _object(body.pop(EAGLE, None), EAGLE, where)
    aux, aux_source = _aux(checkpoint.config, body, eagle, aux_ids_are, where, speculators=speculators)
    options = _options(body, eagle, known, where, notes, default_residual=speculators)
    draft_vocab = _draft_vocab(checkpoint, body, names)
    _require_same_quantisation(body, names, where)
    kind: Literal["llama", "qwen3"] = "qwen3" if any(".self_attn.q_norm." in name for name in known) else "llama"
    return Drafter(
        checkpoint, about, names, unknown, layers, kind, body, options, draft_vocab, eagle, aux, aux_source, kept,
        tuple(notes),
    )  # fmt: skip


def _names(checkpoint: Checkpoint) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the common names, and the tensors that have none. Raises `CheckpointError` for two of one name."""
    first = _first_layer(checkpoint)
    names: dict[str, str] = {}
    unknown: list[str] = []
    owners: dict[str, str] = {}
    for written in checkpoint.tensors:
        common = _common(written, first)
        if common is None:
            unknown.append(written)
            continue
        if common in owners:
            raise CheckpointError(
                f"{checkpoint.folder}: {shorten(owners[common])} and {shorten(written)} are both {common}",
                remedy="remove one of them: engines load the one that they meet last",
            )
        names[written] = common
        owners[common] = written
    return names, tuple(unknown)


def _first_layer(checkpoint: Checkpoint) -> int:
    """Return the number of the first decoder layer: some exporters go on counting after the target's last."""
    numbers = [
        int(match[1])
        for name in checkpoint.tensors
        if (match := re.fullmatch(rf"{_PREFIX.pattern}layers\.(\d+)\.hidden_norm\.weight", name))
    ]
    return min(numbers, default=0)


def _common(written: str, first: int) -> str | None:
    name = _PREFIX.sub("", written, count=1)
    for old, new in _RENAMED.items():
        if name.startswith(f"{old}."):
            name = name.replace(old, new, 1)
    match = _LAYER.fullmatch(name)
    if match:
        number = int(match[1]) - first if match[1] else 0
        return f"layers.{number}.{match[2]}" if number >= 0 and _IN_LAYER.fullmatch(match[2]) else None
    return name if _AT_TOP.fullmatch(name) else None


def _require_llama(checkpoint: Checkpoint) -> None:
    if mla := next((name for name in checkpoint.tensors if re.search(r"\.(?:kv_a_proj|q_a_proj|kv_b_proj)", name)), ""):
        raise CheckpointError(
            f"{checkpoint.folder}: has {shorten(mla)}: its attention is MLA, DeepSeek's, with classes of its own",
            remedy="convert knows drafters of the Llama kind only",
        )


def _object(value: object, key: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} is {shorten(value)}, not an object", remedy=f"repair {key}")
    return dict(value)


def _flat(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    body = copy.deepcopy(dict(config))
    stamp = body.pop(STAMP, None)
    kept = stamp.get("speculators") if isinstance(stamp, dict) else None
    body.pop("architectures", None)
    return body, kept if isinstance(kept, dict) else {}


_TAKEN = (*OPTIONS, IDS, EAGLE, BODY, STAMP, "draft_vocab_size", "architectures")
"""Outer keys of speculators that have a place in every dialect."""


def _flatten(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return speculators' config with the decoder's keys at the top, and the outer keys that have no place there.

    The decoder's own value stands where both have a key: that is the one vLLM reads (vLLM 0.32.0,
    transformers_utils/configs/speculators/base.py, extract_transformers_pre_trained_config). Of the options and ids it
    reads the outer one (algos.py, update_eagle3).
    """
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise CheckpointError(f"{where}: speculators_model_type is {shorten(kind)}", remedy="convert knows eagle3 only")
    body = copy.deepcopy(dict(config[BODY]))
    body.pop("architectures", None)
    outer = {key: copy.deepcopy(value) for key, value in config.items()}
    for key in (*OPTIONS, "draft_vocab_size"):
        body.pop(key, None)
        if outer.get(key) is not None:
            body[key] = outer[key]
    for key in (IDS, EAGLE):
        if outer.get(key):
            body[key] = outer[key]
    if outer.get("target_hidden_size") is not None:
        body["target_hidden_size"] = outer.pop("target_hidden_size")
    kept = {key: value for key, value in outer.items() if key not in _TAKEN and (key not in body or body[key] != value)}
    return body, kept


def _aux(
    config: Mapping[str, Any],
    body: dict[str, Any],
    eagle: dict[str, Any],
    aux_ids_are: AuxIdsAre | None,
    where: str,
    *,
    speculators: bool,
) -> tuple[tuple[int, ...] | None, str]:
    """Take the layer ids out of the config. Returns the layers whose inputs are meant, and what that rests on."""
    found = {IDS: body.pop(IDS, None), f"{EAGLE}.{IDS}": eagle.pop(IDS, None)}
    # What vLLM's model runner V2 reads (0.32.0, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py).
    found[f"{EAGLE}.layer_ids"] = eagle.pop("layer_ids", None)
    named = {key: value for key, value in found.items() if value}
    for key, value in named.items():
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise CheckpointError(f"{where}: {key} is {shorten(value)}, not a list of layers", remedy=f"repair {key}")
    if not named:
        return None, "the config names no layers: every engine takes its default, the inputs of 2, L//2 and L-3"
    if len({tuple(value) for value in named.values()}) > 1:
        listed = "; ".join(f"{key} {value}" for key, value in named.items())
        raise CheckpointError(
            f"{where}: two places name different layers: {listed}",
            remedy="leave the one that the drafter was trained with",
        )
    key, ids = next(iter(named.items()))
    stamped = stamped_ids(config)
    if aux_ids_are is not None:
        meaning, why = aux_ids_are, "--aux-ids-are"
    elif stamped is not None:
        meaning, why = stamped, f"{STAMP}.aux_ids_are in the config, written by an earlier conversion"
    elif speculators and key == IDS:
        meaning, why = "inputs", "speculators counts hidden states, which are layers' inputs"
    else:
        raise UsageError(
            f"{where}: {key} is {ids}, and nothing says whether these count layers' inputs or outputs: exporters and "
            "engines differ by one",
            remedy="ask whoever trained the drafter, then give --aux-ids-are inputs (as vLLM reads them) or "
            "--aux-ids-are outputs (as SGLang's Llama reads them: it adds 1)",
        )
    inputs = tuple(number + (meaning == "outputs") for number in ids)
    return inputs, f"{key} {ids} counts layers' {meaning} ({why}): the inputs of layers {list(inputs)}"


TENSORS_OF = {"fc_norm": r"fc_norm\.\d+\.weight", "norm_before_fc": r"input_norm\.weight"}
"""Options that have tensors of their own."""


def _options(
    body: dict[str, Any],
    eagle: dict[str, Any],
    known: set[str],
    where: str,
    notes: list[str],
    *,
    default_residual: bool,
) -> dict[str, bool]:
    """Take the options out of the config, hold them against the tensors."""
    found: dict[str, bool] = {}
    legacy = body.pop("use_aux_norm", None)
    for option in OPTIONS:
        # Nested first, as both engines read norm_before_fc.
        written = [place.pop(option, None) for place in (eagle, body)]
        value = next((value for value in written if value is not None), None)
        if option == "fc_norm" and value is None and legacy is not None:
            value = legacy
            notes.append("use_aux_norm is the old name of fc_norm")
        if option in TENSORS_OF:
            there = any(re.fullmatch(TENSORS_OF[option], name) for name in known)
            if value is None and there:
                value = True
                notes.append(f"{option} is on: its tensors are there, the config does not say")
            if bool(value) is not there:
                raise CheckpointError(
                    f"{where}: {option} is {value}, but its tensors are {'' if there else 'not '}in the checkpoint",
                    remedy="put the config beside the weights that it was written with",
                )
        if option == "norm_before_residual" and value is None:
            value = default_residual
        found[option] = bool(value)
    biased = any(re.fullmatch(r"layers\.\d+\.self_attn\.[qkv]_proj\.bias", name) for name in known)
    if biased and not body.get("attention_bias"):
        if body.get("attention_bias") is False:
            raise CheckpointError(
                f"{where}: attention_bias is False, but the checkpoint has biases of q, k or v",
                remedy="put the config beside the weights that it was written with",
            )
        body["attention_bias"] = True
        notes.append("attention_bias is on: its tensors are there, the config does not say")
    return found


def _draft_vocab(checkpoint: Checkpoint, body: dict[str, Any], names: Mapping[str, str]) -> int | None:
    """Take the draft vocabulary's size out of the config; without one, lm_head has it. None: the target's lm_head."""
    other = body.pop("truncated_vocab_size", None)
    stated = body.pop("draft_vocab_size", None)
    for value in (stated, other):
        if type(value) is int:
            return value
    head = next((checkpoint.tensors[name] for name, common in names.items() if common == "lm_head.weight"), None)
    return head.shape[0] if head is not None and head.shape else None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _require_same_quantisation(body: Mapping[str, Any], names: Mapping[str, str], where: str) -> None:
    """Raise `CheckpointError` if the quantisation's config names modules, which would have to be renamed, too."""
    renamed = any(written != common for written, common in names.items())
    for text in _strings(body.get("quantization_config")):
        if renamed and re.search(r"midlayer|layers\.\d|draft_model\.|model\.", text):
            raise CheckpointError(
                f"{where}: quantization_config names modules ({shorten(text)}), which convert does not rename",
                remedy="convert the drafter before it is quantised",
            )

"""What a conversion will do: names, config, and what the new dialect or the engine's release has no place for."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from packaging.version import InvalidVersion, Version

from harness.checkpoint.families import Families
from harness.checkpoint.header import Dtype, Shard, Tensor
from harness.checkpoint.read import Checkpoint
from harness.checkpoint.strict_json import shorten
from harness.contracts import capture, check, model
from harness.contracts.embedding import EMBEDDING, differs, embeddings, gives_way
from harness.contracts.model import Contract
from harness.convert.drafter import BODY, EAGLE, IDS, OPTIONS, STAMP, TENSORS_OF, AuxIdsAre, Drafter, understand
from harness.engines.releases import tested_release
from harness.errors import CheckpointError, UsageError

__all__ = ["ENGINES", "TARGETS", "Edit", "Loss", "Plan", "Request", "make"]


@dataclasses.dataclass(frozen=True)
class _Target:
    """How a dialect is written. `ids`: where layer ids stand, and what they count. `t2d`: whether it has one."""

    architectures: Mapping[str, str]
    layer: str
    ids: tuple[Literal["nested", "top-level"], AuxIdsAre]
    t2d: Literal["kept", "needed", "dropped"] = "kept"


TARGETS: Mapping[str, _Target] = {
    # SGLang 0.5.1 to 0.5.10.post1 know `midlayer.` only, later releases both names (seen by running their loaders).
    # models/llama.py, set_eagle3_layers_to_capture: adds 1 to each id.
    "sglang": _Target({"llama": "LlamaForCausalLMEagle3"}, "midlayer.", ("nested", "outputs")),
    # vLLM 0.32.0, models/registry.py. The top level is the one place that both of its model runners read.
    "vllm": _Target(
        {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}, "layers.0.", ("top-level", "inputs")
    ),
    "speculators": _Target(
        {"llama": "Eagle3DraftModel", "qwen3": "Eagle3DraftModel"}, "layers.0.", ("top-level", "inputs"), "needed"
    ),
    "specforge": _Target({"llama": "LlamaForCausalLMEagle3"}, "midlayer.", ("nested", "outputs"), "needed"),
    "modelopt": _Target({"llama": "LlamaForCausalLMEagle3"}, "layers.0.", ("nested", "outputs"), "dropped"),
}
ENGINES = ("sglang", "vllm")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for. `lossy`: the losses that the person accepts, by key. `target`: the drafter's target.

    `contract`: that of the release; None takes the one that ships.
    """

    to: str
    engine_version: str | None = None
    lossy: Collection[str] = ()
    aux_ids_are: AuxIdsAre | None = None
    target: Checkpoint | None = None
    contract: Contract | None = None


@dataclasses.dataclass(frozen=True)
class Edit:
    """One value of the config: its key and JSON text, old and new. Both are empty where there was, or will be, none."""

    key: str
    old: str
    new_key: str
    new: str

    def __str__(self) -> str:
        if not self.key:
            return f"{self.new_key}: absent -> {self.new}"
        if not self.new_key:
            return f"{self.key}: {self.old} -> absent"
        moved = "" if self.key == self.new_key else f"{self.new_key} "
        return f"{self.key}: {self.old} -> {moved}{self.new}"


@dataclasses.dataclass(frozen=True)
class Loss:
    """What cannot be said in the new dialect, or is not done by the release. `tensors`: common names that go."""

    key: str
    why: str
    tensors: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion, decided. `names`: the checkpoint's tensor -> its new name; what is not in it goes.

    `added`: new tensors, name -> (dtype, shape, bytes). `release`: the engine's release, "" where none is meant,
    `contract` what is known of it.
    """

    drafter: Drafter
    to: str
    release: str
    contract: Contract | None
    names: Mapping[str, str]
    added: Mapping[str, tuple[str, tuple[int, ...], bytes]]
    config: Mapping[str, Any]
    edits: tuple[Edit, ...]
    lost: tuple[Loss, ...]
    notes: tuple[str, ...]

    @property
    def renames(self) -> dict[str, str]:
        """Return the tensors that get another name."""
        return {old: new for old, new in self.names.items() if old != new}

    @property
    def preview(self) -> Checkpoint:
        """The checkpoint that will be written, as far as names, shapes and config go. There are no files."""
        source = self.drafter.checkpoint
        tensors = {new: source.tensors[old] for old, new in self.names.items()}
        tensors |= {
            name: Tensor(cast(Dtype, dtype), shape, (0, len(data))) for name, (dtype, shape, data) in self.added.items()
        }
        families = Families()
        families.add(tensors)
        return Checkpoint(source.files, self.config, (Shard(source.folder, tensors, {}, 0, 0),), families.all())


def make(checkpoint: Checkpoint, request: Request) -> Plan:
    """Decide on a conversion; nothing is written.

    Raises:
        CheckpointError: the drafter is of no kind that the dialect has, or contradicts itself.
        UsageError: something would be lost and `request.lossy` does not name it, or what is asked for means nothing.

    """
    if request.to not in TARGETS:
        raise UsageError(f"--to: no dialect {request.to!r}", remedy=f"choose from {', '.join(TARGETS)}")
    release, contract = _release(request)
    drafter = understand(checkpoint, request.aux_ids_are)
    if drafter.kind not in TARGETS[request.to].architectures:
        raise CheckpointError(
            f"{checkpoint.folder}: has q_norm and k_norm, as Qwen3 has them, and {request.to} no class with them",
            remedy="convert it --to vllm or speculators",
        )
    if request.to == "sglang" and drafter.layers > 1:
        raise CheckpointError(
            f"{checkpoint.folder}: has {drafter.layers} decoder layers: SGLang (0.5.23, models/llama_eagle3.py) norms "
            "what enters the second one with hidden_norm, exporters and vLLM with input_layernorm",
            remedy="serve it with vLLM",
        )
    lost = [*_dialect_losses(drafter, request.to), *_replaced(drafter, request, release)]
    if contract is not None:
        lost += _release_losses(_assemble(drafter, request, release, contract, lost), request.target)
    _require_named(lost, request)
    return _assemble(drafter, request, release, contract, lost)


def _assemble(
    drafter: Drafter, request: Request, release: str, contract: Contract | None, lost: Sequence[Loss]
) -> Plan:
    """Return the plan that accepts these losses."""
    target = TARGETS[request.to]
    gone = {loss.key for loss in lost}
    dropped = {name for loss in lost for name in loss.tensors}
    names = {
        written: _rename(common, target.layer, drafter.layers)
        for written, common in drafter.names.items()
        if common not in dropped
    }
    added = _t2d(drafter) if target.t2d == "needed" and drafter.has("d2t") and not drafter.has("t2d") else {}
    options = {option: value and option not in gone for option, value in drafter.options.items()}
    notes = [*drafter.notes, f"auxiliary layers: {drafter.aux_source}"]
    if _gives_way(drafter, release) and not embeddings(request.target):
        notes.append("SGLang serves with the target's embedding, not the drafter's: give --target to compare the two")
    where = str(drafter.checkpoint.files.config)
    config = _Writer(drafter, request, options, gone, notes, where, release).config()
    edits = tuple(_edits(drafter.checkpoint.config, config))
    return Plan(drafter, request.to, release, contract, names, added, config, edits, tuple(lost), tuple(notes))


def _release(request: Request) -> tuple[str, Contract | None]:
    """Return the engine's release, "" where no engine is meant, and its contract, if it is known."""
    given = request.contract
    if request.to not in ENGINES:
        if request.engine_version or given:
            raise UsageError(f"{request.to} is no engine", remedy=f"give releases with --to {' or '.join(ENGINES)}")
        return "", None
    if given is not None:
        if given.engine != request.to or request.engine_version not in (None, given.version):
            raise UsageError(f"--contract: is that of {given.release}", remedy="give the contract of --to")
        return given.release, given
    text = request.engine_version or tested_release(request.to, "cpu").version
    try:
        version = str(Version(text))
    except InvalidVersion as error:
        raise UsageError(f"--engine-version: {text!r} is no version", remedy="give one such as 0.5.23") from error
    return f"{request.to}=={version}", model.shipped(request.to, version)


def _dialect_losses(drafter: Drafter, to: str) -> Iterator[Loss]:
    """Yield what the dialect has no place for, whoever reads it."""
    for name in drafter.unknown:
        yield Loss(name, "no dialect has a tensor of this name")
    if TARGETS[to].t2d == "dropped" and drafter.has("t2d"):
        yield Loss("t2d", f"{to} writes none; no engine reads it, and d2t says the same", ("t2d",))
    model_type = drafter.body.get("model_type")
    if to == "speculators" and model_type != drafter.kind:
        yield Loss(
            "model_type",
            f"it is {shorten(model_type)}, and vLLM takes a speculators drafter of this kind as {drafter.kind} only "
            "(0.32.0, transformers_utils/configs/speculators/algos.py): other defaults stand in for absent keys",
        )


def _gives_way(drafter: Drafter, release: str) -> bool:
    """Whether an embedding of the drafter's own is replaced by the target's, as far as is known."""
    engine, _, version = release.partition("==")
    return drafter.has(EMBEDDING) and gives_way(engine, version, drafter.body) is not False


def _replaced(drafter: Drafter, request: Request, release: str) -> Iterator[Loss]:
    """Yield the embedding that SGLang replaces by the target's after the load, if the two are known to differ."""
    if not _gives_way(drafter, release):
        return
    if differs(drafter.checkpoint, request.target):
        yield Loss(
            EMBEDDING,
            "SGLang gives every EAGLE-3 drafter the target's embedding after the load (0.5.23, speculative/"
            "eagle_worker_v2.py), and the target's holds other values: the drafter would accept next to nothing",
            (EMBEDDING,),
        )


_OWNED = {
    "attention_bias": r"layers\.\d+\.self_attn\.[qkv]_proj\.bias",
    "bias": r"fc\.bias",
    **TENSORS_OF,
}
"""Setting -> the tensors that go with it."""


def _release_losses(plan: Plan, target: Checkpoint | None) -> Iterator[Loss]:
    """Yield what the release drops or ignores, by its contract."""
    assert plan.contract is not None  # noqa: S101 -- asked only where there is one
    common = {new: plan.drafter.names[old] for old, new in plan.names.items()}
    why: dict[str, str] = {}
    tensors: dict[str, list[str]] = {}
    findings = check.check(plan.preview, target, plan.contract).findings
    if any(finding.code == "CHK002" for finding in findings):
        return  # it speaks of another class than this drafter reaches
    for finding in findings:
        keys: Iterable[str] = ()
        if finding.code in ("CHK201", "CHK202", "CHK203"):
            names = [common[name] for name in finding.names]
            owner = {name: _owner(name) for name in names}
            for name in names:
                tensors.setdefault(owner[name], []).append(name)
            keys = dict.fromkeys(owner.values())
        elif finding.code == "CHK401":
            keys = [finding.where.rpartition(": ")[2].rpartition(".")[2]]
        elif finding.code == "CHK402":
            keys = [IDS]
        for key in keys:
            why.setdefault(key, f"{finding.summary} [{finding.source}]")
    for key, text in why.items():
        owned = plan.drafter.matching(_OWNED.get(key, ""))
        yield Loss(key, text, tuple(dict.fromkeys((*tensors.get(key, ()), *owned))))


def _owner(name: str) -> str:
    return next((key for key, pattern in _OWNED.items() if re.fullmatch(pattern, name)), name)


def _require_named(lost: Sequence[Loss], request: Request) -> None:
    keys = {loss.key for loss in lost}
    if stray := sorted(set(request.lossy) - keys):
        raise UsageError(
            f"--lossy {stray[0]}: nothing of that name would be lost",
            remedy=f"what would be lost: {', '.join(sorted(keys)) or 'nothing'}",
        )
    if missing := [loss for loss in lost if loss.key not in request.lossy]:
        listed = "; ".join(f"{ascii(loss.key)[1:-1]}: {loss.why}" for loss in missing)
        accept = " ".join(f"--lossy {shlex.quote(ascii(loss.key)[1:-1])}" for loss in missing)
        raise UsageError(f"--to {request.to} would lose {listed}", remedy=f"if that is acceptable, give {accept}")


def _rename(common: str, layer: str, layers: int) -> str:
    """Return what a dialect calls a tensor. With several layers there is no `midlayer`."""
    return common.replace("layers.0.", layer, 1) if layers == 1 else common


def _t2d(drafter: Drafter) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the `t2d` that `d2t` implies: which target tokens the draft vocabulary has. Trainers ask for it."""
    import numpy as np  # noqa: PLC0415 -- numpy, only where there is a mapping

    from harness.checkpoint.data import whole  # noqa: PLC0415 -- as above

    written = next(old for old, common in drafter.names.items() if common == "d2t")
    offsets = whole(drafter.checkpoint.shard_of(written), written).astype(np.int64)
    vocab = drafter.body.get("vocab_size")
    tokens = offsets + np.arange(len(offsets))
    if type(vocab) is not int or len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocab:
        raise CheckpointError(
            f"{written}: its target tokens do not fit a vocabulary of {vocab}: no t2d can be made of it",
            remedy="run `draftgate inspect` on it; export d2t and vocab_size again",
        )
    marks = np.zeros(vocab, np.bool_)
    marks[tokens] = True
    return {"t2d": ("BOOL", (vocab,), marks.tobytes())}


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Puts a drafter's config together in a dialect; adds to `notes` what is not plain from it."""

    drafter: Drafter
    request: Request
    options: Mapping[str, bool]
    gone: set[str]
    notes: list[str]
    where: str
    release: str

    def config(self) -> dict[str, Any]:
        body = self._body()
        eagle = dict(self.drafter.eagle)
        if eagle.get("use_aux_hidden_state") is True:
            del eagle["use_aux_hidden_state"]  # what every engine does that finds none
        stamp: dict[str, Any] = {}
        outer: dict[str, Any] = {"draft_vocab_size": self.drafter.draft_vocab}
        if self.drafter.aux and IDS not in self.gone:
            stamp |= self._ids(outer, eagle, body)
        if self.request.to == "modelopt":
            eagle["norm_before_fc"] = self.options["norm_before_fc"]
        nested = ("norm_before_fc",) if self.request.to == "modelopt" else ()
        speculators = self.request.to == "speculators"
        # Absent means on in speculators, off everywhere else.
        outer |= {
            option: self.options[option]
            for option in OPTIONS
            if option not in nested and (self.options[option] or (speculators and option == "norm_before_residual"))
        }
        architecture = TARGETS[self.request.to].architectures[self.drafter.kind]
        head = {"architectures": [architecture]}
        if speculators:
            body |= {EAGLE: eagle} if eagle else {}
            return head | self._outer(body) | outer | {BODY: body}
        if self.drafter.kept:
            stamp["speculators"] = dict(self.drafter.kept)
        outer |= {EAGLE: eagle} if eagle else {}
        outer |= {STAMP: stamp} if stamp else {}
        return _ordered(head | body | outer, self.drafter.checkpoint.config)

    def _body(self) -> dict[str, Any]:
        """Return the decoder's keys, said so that old and new releases of transformers read the same."""
        drafter = self.drafter
        body = copy.deepcopy(dict(drafter.body))
        body["num_hidden_layers"] = drafter.layers
        if drafter.has("lm_head.weight") and body.get("tie_word_embeddings"):
            # Tied, SGLang loads lm_head over the embeddings (0.5.23, models/llama_eagle3.py).
            body["tie_word_embeddings"] = False
            self.notes.append("tie_word_embeddings is off: the drafter has an lm_head of its own")
        if "attention_bias" in self.gone:
            body["attention_bias"] = bool(drafter.matching(r"layers\.\d+\.self_attn\.o_proj\.bias"))
        for key in self.gone - {"attention_bias", "model_type"}:
            body.pop(key, None)
        if self.request.to == "speculators":
            body["model_type"] = drafter.kind
            return body
        if "dtype" in body:
            body.setdefault("torch_dtype", body["dtype"])
        _spread_rope(body, self.where)
        return body

    def _ids(self, outer: dict[str, Any], eagle: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        """Write the layer ids as the dialect has them; returns what the stamp says of them."""
        inputs = list(self.drafter.aux or ())
        place, count = TARGETS[self.request.to].ids
        if self.request.to == "sglang":
            ids, count = self._sglang_ids(inputs)
        else:
            ids = inputs if count == "inputs" else [layer - 1 for layer in inputs]
        if min(ids) < 0:
            raise CheckpointError(
                f"{self.where}: the drafter reads what enters layer {min(inputs)} of the target, which "
                f"{self.request.to} cannot say: it counts layers' outputs",
                remedy="serve it with vLLM, if --aux-ids-are is right",
            )
        self.notes.append(f"auxiliary layers are written as {ids}, layers' {count}")
        if place == "nested":
            eagle["use_aux_hidden_state"] = eagle.get("use_aux_hidden_state", True)
            eagle[IDS] = ids
            return {"aux_ids_are": count}
        outer[IDS] = ids
        if len(ids) != 3:
            # vLLM 0.32.0, models/llama_eagle3.py: 3, unless this key or ids in eagle_config say otherwise.
            body["num_aux_hidden_states"] = len(ids)
        return {} if self.request.to == "speculators" else {"aux_ids_are": count}

    def _sglang_ids(self, inputs: list[int]) -> tuple[list[int], AuxIdsAre]:
        """Return the ids with which SGLang captures these layers' inputs, and what they count."""
        target = self.request.target
        version = self.release.partition("==")[2]
        rules = capture.rules("sglang", version, target.config if target else None, 1)
        rule = rules[0]
        ids = rule.ids(inputs)
        if ids is None:
            raise CheckpointError(
                f"{self.where}: the drafter reads the inputs of layers {inputs}, which SGLang's class of this target "
                f"cannot be told: it {rule.says}",
                remedy="serve it with vLLM, if --aux-ids-are is right",
            )
        doubt = ""
        if len(rules) > 1:
            doubt = "; others do not: give --target" if target is None else f"; of {version} that was not read"
        self.notes.append(f"SGLang {rule.says} for {'this target' if target else 'most targets'}{doubt}")
        return ids, "inputs" if ids == inputs else "outputs"

    def _outer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return speculators' own keys: those that were kept, or new ones."""
        shared = {key: body[key] for key in ("tie_word_embeddings", "torch_dtype", "dtype") if key in body}
        kept = dict(self.drafter.kept)
        if "speculators_config" not in kept:
            kept["speculators_config"] = self._speculators_config()
        target_hidden = body.get("target_hidden_size")
        return {
            "speculators_model_type": "eagle3",
            **shared,
            **({} if target_hidden is None else {"target_hidden_size": target_hidden}),
            **kept,
        }

    def _speculators_config(self) -> dict[str, Any]:
        target = self.request.target
        if target is None:
            raise UsageError(
                "--to speculators: its config names the target, and the drafter's does not", remedy="give --target PATH"
            )
        self.notes.append("speculators_config is new: greedy proposals of 4 tokens unless the engine is told otherwise")
        return {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {
                "name_or_path": target.files.repository or str(target.folder),
                "architectures": target.config.get("architectures") or [],
            },
        }


def _spread_rope(body: dict[str, Any], where: str) -> None:
    """Say rope settings both ways: `rope_parameters` is transformers 5's, `rope_theta` and `rope_scaling` the older.

    A release that knows only the older ones takes theta 10000 without a word where they are absent.
    """
    rope = body.get("rope_parameters")
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise CheckpointError(f"{where}: rope_parameters is {shorten(rope)}, not an object", remedy="repair it")
    wanted: dict[str, Any] = {"rope_theta": rope.get("rope_theta")}
    if rope.get("rope_type", "default") != "default":
        wanted["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    for key, value in wanted.items():
        if value is None:
            continue
        if body.get(key) not in (None, value):
            raise CheckpointError(
                f"{where}: {key} is {shorten(body[key])}, rope_parameters say {shorten(value)}",
                remedy="leave the one that the drafter was trained with",
            )
        body[key] = value


def _ordered(config: dict[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in the order of another one, new keys last."""
    return {key: config[key] for key in (*like, *config) if key in config}


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _edits(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Edit]:
    before, after = dict(_leaves(old)), dict(_leaves(new))

    def same(left: Any, right: Any) -> bool:
        return type(left) is type(right) and bool(left == right)

    fresh = {key: value for key, value in after.items() if key not in before}
    for key, value in before.items():
        if key in after:
            if not same(value, after[key]):
                yield Edit(key, _shown(value), key, _shown(after[key]))
            continue
        last = key.rpartition(".")[2]
        moved = next((to for to in fresh if to.rpartition(".")[2] == last), None)
        if moved is None:
            yield Edit(key, _shown(value), "", "")
        else:
            yield Edit(key, _shown(value), moved, _shown(fresh.pop(moved)))
    for key, value in fresh.items():
        yield Edit("", "", key, _shown(value))


def _shown(value: Any) -> str:
    return json.dumps(value)

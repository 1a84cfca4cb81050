"""Judging weight coverage: every checkpoint key landed, and every parameter was filled, for target and drafter."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fnmatch
import functools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from harness.errors import UsageError
from harness.probe.extent import covered
from harness.probe.facts import After, ConfigKey, Evidence, Fate, Load, Parameter
from harness.verdict import Finding, Judgement, Verdict, some

__all__ = [
    "EXCEPTIONS",
    "ConfigRule",
    "Exceptions",
    "State",
    "borrowed",
    "fates_of",
    "judge",
    "judge_failed_start",
    "load_exceptions",
    "padding_of",
    "state_of",
]

EXCEPTIONS = Path(__file__).with_name("weight_exceptions.toml")
_HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")
_WHAT = ("key", "parameter", "padding", "repack")
_VOCABULARY_UNIT = 64
"""Rows to a multiple of which, or of this times the tensor parallel size, both engines pad a vocabulary
(`DEFAULT_VOCAB_PADDING_SIZE` in vLLM 0.32.0 and SGLang 0.5.23, layers/vocab_parallel_embedding.py)."""

_NAMED = 12
"""How many names a finding spells out; the record has all of them."""


@dataclasses.dataclass(frozen=True)
class _Exception:
    engine: str
    versions: SpecifierSet
    role: str
    what: str
    pattern: str
    reason: str
    source: str


@dataclasses.dataclass(frozen=True)
class ConfigRule:
    """A config key that changes what a drafter computes: unread, the drafter is not the one that was trained."""

    pattern: str
    harmless: str
    reason: str

    def covers(self, key: ConfigKey) -> bool:
        """Say whether `key` is such a key, at a value with which it matters."""
        return fnmatch.fnmatchcase(key.path, self.pattern) and repr(key.value) != self.harmless


@dataclasses.dataclass(frozen=True)
class Exceptions:
    """The reviewed data file, narrowed to one engine release."""

    rows: tuple[_Exception, ...]
    config: tuple[ConfigRule, ...]

    def reason(self, role: str, what: str, name: str) -> str:
        """Return why `name` needs no data ("" = it does)."""
        for row in self.rows:
            if row.role in (role, "any") and row.what == what and fnmatch.fnmatchcase(name, row.pattern):
                return row.reason
        return ""


@functools.cache
def load_exceptions(engine: str, version: str, path: Path = EXCEPTIONS) -> Exceptions:
    """Return the exceptions that hold for one release.

    Raises:
        UsageError: a row lacks a key or has one too many.

    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in dataclasses.fields(_Exception)}
    rows = []
    for number, row in enumerate(data.get("exception", []), start=1):
        if set(row) != names or row["what"] not in _WHAT:
            raise UsageError(f"{path}: exception {number} needs exactly: {', '.join(sorted(names))}")
        made = _Exception(**{**row, "versions": SpecifierSet(row["versions"])})
        if made.engine == engine and made.versions.contains(Version(version), prereleases=True):
            rows.append(made)
    return Exceptions(tuple(rows), tuple(ConfigRule(**row) for row in data.get("config", [])))


Alike = Callable[[str, str], bool]
"""Whether a key of the drafter's checkpoint and one of the target's hold the same values."""

Tied = Callable[[str, str], bool]
"""Whether the target's config ties its head to its embedding, and the two keys of its checkpoint hold the same."""


def judge(evidence: Evidence, exceptions: Exceptions, alike: Alike, tied: Tied) -> Judgement:
    """Judge both directions at 100 %, for target and drafter, on every rank.

    Codes: WGT001 no load seen, WGT002 the load raised, WGT003 keys that landed nowhere or in part, WGT004 parameters
    not filled, WGT005 config keys that matter and were never read, WGT006 something could not be followed, WGT007 a
    small draft vocabulary without a map of its ids, WGT008 keys that landed and whose tensors are the target's while
    serving, WGT009 tensors of the drafter that changed after the load.
    """
    findings: list[Finding] = []
    measured: dict[str, Any] = {}
    shared = {name for serving in evidence.servings for name, _ in serving.shared}
    lent = borrowed(evidence)
    for role in ("target", "drafter"):
        loads = evidence.of(role)
        source = f"probe: {role}'s load_weights on {len(loads)} rank(s)"
        usable = [load for load in loads if load.tapped and not load.error]
        findings += _unusable(role, loads, source)
        if not usable:
            continue
        fates = fates_of(evidence, role)
        copies = _tied_heads(usable, fates, tied) if role == "target" else {}
        unused = _unused(role, fates, exceptions, copies)
        partly = {
            name: share
            for name, share in _partly_used(usable, fates).items()
            if not exceptions.reason(role, "key", name)
        }
        states = _states(role, usable, exceptions, lent if role == "drafter" else set())
        findings += _partial(role, fates, partly, source)
        if not partly or any(not reason for _, reason in unused.values()):
            findings.append(_keys(role, usable, fates, unused, source))
        findings.append(_parameters(role, states, source))
        if role == "drafter":
            findings += _vocabulary(evidence.config, fates, source)
            findings += _replaced(evidence, alike)
            findings += _afterwards(evidence, usable, exceptions)
        measured[role] = {
            "ranks": len(usable),
            "model_class": usable[0].model_class,
            "keys": dict(collections.Counter(fate.value for fate in fates.values())),
            "unused_keys": {name: {"fate": fate, "exempt": reason} for name, (fate, reason) in unused.items()},
            "partly_used_keys": partly,
            "tensors": sum(len(load.parameters) for load in usable),
            "tensors_not_filled": _worst_states(states),
            "limits": sorted({limit for load in usable for limit in load.limits}),
        }
    findings.append(_config(evidence.config, exceptions.config))
    measured["shared"] = sorted(shared)
    measured["config_never_read"] = [key.path for key in evidence.config if not key.read]
    return Judgement("weights", tuple(findings), measured)


def judge_failed_start(loads: Sequence[Load]) -> Judgement | None:
    """Judge what a server that died had loaded; None if no load raised: then the weights did not kill it."""
    findings = [
        finding
        for role in ("target", "drafter")
        for finding in _unusable(role, [load for load in loads if load.role == role and load.error], "probe")
        if finding.code == "WGT002"
    ]
    return Judgement("weights", tuple(findings)) if findings else None


def _unusable(role: str, loads: Sequence[Load], source: str) -> list[Finding]:
    if not loads:
        return [
            Finding(
                "WGT001",
                Verdict.INVALID,
                f"no load of the {role} was seen",
                source=source,
                cause="the probe did not run in the process that loads weights",
                remedy="see the evidence folder's files for hooks that failed",
            )
        ]
    findings = []
    for load in loads:
        if load.error:
            cause = "the checkpoint does not fit the engine's model class"
            remedy = "compare the key that the message names with the checkpoint's own names"
            if role == "drafter" and "eagle" not in load.model_class.lower():
                cause = (
                    f"the engine took the drafter for a whole model, {load.model_class}: the name under "
                    "`architectures` in its config.json is none of this engine's for EAGLE-3"
                )
                remedy = (
                    'write "architectures": ["LlamaForCausalLMEagle3"], which both engines know for a Llama drafter'
                )
            findings.append(
                Finding(
                    "WGT002",
                    Verdict.FAIL,
                    f"loading the {role} raised on rank {load.place.rank}",
                    actual=load.error,
                    source=source,
                    cause=cause,
                    remedy=remedy,
                )
            )
        elif not load.tapped:
            findings.append(
                Finding(
                    "WGT006",
                    Verdict.INVALID,
                    f"the {role}'s keys could not be followed on rank {load.place.rank}",
                    actual="; ".join(load.limits) or load.loader,
                    source=source,
                    cause=f"loader {load.loader} does not go through the model's load_weights",
                    remedy="serve with the engine's default safetensors loader for this check",
                )
            )
    return findings


def fates_of(evidence: Evidence, role: str) -> dict[str, Fate]:
    """Return each key's fate over all ranks; reading its values is use only for a scalar, not for a matrix."""
    scalars = {key.name for load in evidence.of(role) for key in load.keys if math.prod(key.shape) == 1}
    return {
        name: Fate.DROPPED if fate is Fate.READ and name not in scalars else fate
        for name, fate in evidence.fates(role).items()
    }


def _tied_heads(loads: Sequence[Load], fates: Mapping[str, Fate], tied: Tied) -> dict[str, str]:
    """Return the target's stored heads that need not land, each with the reason: the engine has the embedding there.

    vLLM (AutoWeightsLoader, models/utils.py) and SGLang (models/llama.py) skip the head of a target that ties it, which
    is right if it is the embedding: some checkpoints (Qwen3-0.6B) store the same tensor under both names.
    """
    found: dict[str, str] = {}
    keys = _keys_of(loads)
    for name in (name for name, fate in fates.items() if fate is not Fate.USED and _HEAD.search(name)):
        embeddings = {filled[0] for tensor, filled in keys.items() if _HEAD.search(tensor) and len(filled) == 1}
        if any(tied(name, embedding) for embedding in embeddings):
            found[name] = "the target ties its head to its embedding, and this is a copy of the embedding"
    return found


def _unused(
    role: str, fates: Mapping[str, Fate], exceptions: Exceptions, copies: Mapping[str, str]
) -> dict[str, tuple[Fate, str]]:
    """Return the keys whose data is nowhere in the model: name -> its fate, and why that is right ("" = it is not)."""
    return {
        name: (fate, exceptions.reason(role, "key", name) or copies.get(name, ""))
        for name, fate in sorted(fates.items())
        if fate not in (Fate.USED, Fate.READ)
    }


def _partly_used(loads: Sequence[Load], fates: Mapping[str, Fate]) -> dict[str, float]:
    """Return the keys of which only a part is in the model, over all ranks, with its share (below 1)."""
    landed = collections.defaultdict(list)
    for load in loads:
        for key in load.keys:
            if key.landed and fates[key.name] is Fate.USED:
                landed[key.name].append(key)
    found = {}
    for name, keys in sorted(landed.items()):
        sizes, taken = {key.size for key in keys}, [key.taken for key in keys if key.taken is not None]
        if len(sizes) == 1 and len(taken) == len(keys):
            size = sizes.pop()
            used = covered(size, (piece for pieces in taken for piece in pieces))
            if used is not None and used < size:
                found[name] = used / size
    return found


def _partial(role: str, fates: Mapping[str, Fate], partly: Mapping[str, float], source: str) -> list[Finding]:
    if not partly:
        return []
    return [
        Finding(
            "WGT003",
            Verdict.FAIL,
            f"{len(partly)} of {len(fates)} keys of the {role} landed in part only",
            n=len(fates),
            expected="every byte of each key, on one rank or another",
            actual=some([f"{name}: {100 * share:.4g} % used" for name, share in partly.items()], _NAMED),
            source=source,
            cause="the loader took a slice, and no rank took the rest: a wrong offset, or a size that is too small",
            remedy="compare the key's shape with the sizes in config.json, and with what each rank should take",
        )
    ]


def _keys(
    role: str, loads: Sequence[Load], fates: Mapping[str, Fate], unused: Mapping[str, tuple[Fate, str]], source: str
) -> Finding:
    lost: dict[Fate, list[str]] = {}
    for name, (fate, reason) in unused.items():
        if not reason:
            lost.setdefault(fate, []).append(name)
    ignored = [name for name, (_, reason) in unused.items() if reason]
    in_files = sum(key.in_files for key in loads[0].keys)
    note = f" ({len(ignored)} ignored by design: {some(ignored, _NAMED)})" if ignored else ""
    if not in_files:
        return Finding(
            "WGT006",
            Verdict.INVALID,
            f"the {role}'s checkpoint headers could not be read",
            source=source,
            actual="; ".join(sorted({limit for load in loads for limit in load.limits})),
            cause="no list of keys to hold the load against",
            remedy="give a local safetensors checkpoint",
        )
    if not lost:
        return Finding(
            "WGT003",
            Verdict.PASS,
            f"every key of the {role} landed",
            n=len(fates),
            source=source,
            expected=f"{len(fates)} keys used",
            actual=f"{len(fates) - len(ignored)} used{note}",
        )
    names = [name for group in lost.values() for name in group]
    return Finding(
        "WGT003",
        Verdict.FAIL,
        f"{len(names)} of {len(fates)} keys of the {role} landed nowhere",
        n=len(fates),
        expected=f"{len(fates) - len(ignored)} keys used",
        source=source,
        actual="; ".join(f"{fate.value}: {some(group, _NAMED)}" for fate, group in lost.items()) + note,
        cause="the engine knows these tensors by other names, or not at all; it does not say so",
        remedy="rename the keys to the dialect that this engine version loads (see docs/suites.md#names)",
    )


class State(enum.Enum):
    """What is known of one parameter, from good to bad."""

    FILLED = "filled"
    EXCUSED = "exempt"
    UNSURE = "cannot be told"
    LACKING = "not filled"


def padding_of(role: str, loads: Sequence[Load], exceptions: Exceptions) -> dict[str, int]:
    """Return how many elements of a rank's part of a vocabulary tensor the engine may fill itself, by its name.

    Which tensors these are the exceptions say; how much is what the one key that fills it lacks of the next multiple of
    the padding. `loads` are those of all ranks.
    """
    shapes = {key.name: key.shape for load in loads for key in load.keys}
    sources = _keys_of(loads)
    found: dict[str, int] = {}
    for load in loads:
        for tensor in load.parameters:
            keys = sources[tensor.name]
            if len(keys) != 1 or not exceptions.reason(role, "padding", tensor.name):
                continue
            shape = shapes.get(keys[0], ())
            if not shape or not tensor.elements or shape[1:] != tensor.shape[1:]:
                continue
            split, whole = (tensor.shape[0] * ranks - shape[0] for ranks in (load.place.tp_size, 1))
            rows = next((n for n in (split, whole) if 0 <= n < _VOCABULARY_UNIT * load.place.tp_size), 0)
            found[tensor.name] = rows * (tensor.elements // tensor.shape[0])
    return found


def state_of(role: str, parameter: Parameter, exceptions: Exceptions, shared: set[str], padding: int) -> State:
    """Return what is known of one parameter.

    `shared` are the drafter's tensors that rightly are the target's, `padding` the elements of this one that the engine
    may fill with data of no key (`padding_of`).
    """
    if parameter.elements and not parameter.untouched and parameter.filled <= padding:
        return State.FILLED if parameter.exact else State.UNSURE
    is_shared = parameter.name in shared or shared.intersection(parameter.aliases)
    if is_shared or exceptions.reason(role, "parameter", parameter.name):
        return State.EXCUSED
    return State.UNSURE if parameter.unseen_change else State.LACKING


def _states(
    role: str, loads: Sequence[Load], exceptions: Exceptions, shared: set[str]
) -> list[tuple[State, Parameter]]:
    padding = padding_of(role, loads, exceptions)
    return [
        (state_of(role, parameter, exceptions, shared, padding.get(parameter.name, 0)), parameter)
        for load in loads
        for parameter in load.parameters
        if parameter.kind != "attribute" and parameter.elements
    ]


def _worst_states(states: Sequence[tuple[State, Parameter]]) -> dict[str, str]:
    """Return the tensors that are not filled on some rank, with the worst that is known of each."""
    order = list(State)
    ascending = sorted(states, key=lambda each: order.index(each[0]))
    return {parameter.name: state.value for state, parameter in ascending if state is not State.FILLED}


def _parameters(role: str, looked_at: Sequence[tuple[State, Parameter]], source: str) -> Finding:
    seen = len(looked_at)
    elements = sum(parameter.elements for _, parameter in looked_at)
    excused = sum(state is State.EXCUSED for state, _ in looked_at)
    unsure = {parameter.name for state, parameter in looked_at if state is State.UNSURE}
    lacking = {parameter.name: parameter for state, parameter in looked_at if state is State.LACKING}
    if not seen:
        return Finding(
            "WGT004",
            Verdict.INVALID,
            f"the {role} has no parameters",
            source=source,
            cause="the probe saw no module tree",
            remedy="see the evidence folder",
        )
    if unsure and not lacking:
        return Finding(
            "WGT006",
            Verdict.INVALID,
            f"whether {len(unsure)} tensors of the {role} were filled cannot be told",
            n=seen,
            actual=some(sorted(unsure), _NAMED),
            source=source,
            cause="they were written in ways that cannot be counted (scattered views, or without a visible write)",
            remedy="serve with the engine's default loader for this check; see the evidence for each tensor",
        )
    if not lacking:
        return Finding(
            "WGT004",
            Verdict.PASS,
            f"every parameter of the {role} was filled",
            n=seen,
            source=source,
            expected=f"{elements} elements in {seen} tensors",
            actual=f"all written; {excused} tensors shared with the target or exempt by design",
        )
    described = [
        f"{name} {list(parameter.shape)}: {parameter.written} of {parameter.elements} elements written"
        + (f", {parameter.filled} filled with data of no key" if parameter.filled else "")
        for name, parameter in sorted(lacking.items())
    ]
    return Finding(
        "WGT004",
        Verdict.FAIL,
        f"{len(lacking)} of {seen} tensors of the {role} were not filled",
        n=seen,
        expected="every element written from the checkpoint",
        actual="; ".join(described[:_NAMED]),
        source=source,
        cause="the checkpoint lacks them, or has them under names that the engine drops; they stay as constructed",
        remedy="look for them among the checkpoint's keys: rename them, or export the drafter again",
    )


def _vocabulary(config: Sequence[ConfigKey], fates: Mapping[str, Fate], source: str) -> list[Finding]:
    """Judge the map from draft ids to target ids where there must be one.

    An engine may hold it as a plain attribute (SGLang 0.5.23, `hot_token_id` in models/llama_eagle3.py), which is None
    without a word if there is no `d2t`; then it is no parameter that could be found unfilled.
    """
    sizes = {name: [key.value for key in config if key.path.split(".")[-1] == name and isinstance(key.value, int)]
             for name in ("draft_vocab_size", "vocab_size")}  # fmt: skip
    if not sizes["draft_vocab_size"] or not sizes["vocab_size"]:
        return []
    draft, whole = sizes["draft_vocab_size"][0], max(sizes["vocab_size"])
    if draft >= whole:
        return []
    maps = [name for name in fates if fnmatch.fnmatchcase(name, "*d2t")]
    landed = [name for name in maps if fates[name] is Fate.USED]
    return [
        Finding(
            "WGT007",
            Verdict.PASS if landed else Verdict.FAIL,
            f"the map of {draft} draft ids to the target's {whole} landed"
            if landed
            else f"no map of {draft} draft ids to the target's {whole} landed",
            expected="a key d2t, used",
            actual=", ".join(landed) or (f"{', '.join(maps)}: {fates[maps[0]].value}" if maps else "no key named d2t"),
            n=draft,
            source=source,
            cause="" if landed else "draft ids are taken for target ids, so nearly every draft is another word",
            remedy="" if landed else "export the drafter with d2t (offsets: target id minus draft id)",
        )
    ]


def _replaced(evidence: Evidence, alike: Alike) -> list[Finding]:
    """Judge the drafter's tensors that were filled from its own checkpoint, and are the target's while it serves.

    SGLang 0.5.23 gives every EAGLE-3 drafter the target's embedding after the load (speculative/eagle_worker_v2.py,
    `set_embed`), whether it brought one or not. That is right only where the two hold the same.
    """
    keys = {role: _keys_of(evidence.of(role)) for role in ("drafter", "target")}
    shared = sorted({pair for serving in evidence.servings for pair in serving.shared})
    own = [(mine, theirs) for mine, theirs in shared if keys["drafter"].get(mine)]
    other, unknown = [], []
    for mine, theirs in own:
        ours, targets = keys["drafter"][mine], keys["target"].get(theirs, ())
        if len(ours) != 1 or len(targets) != 1:
            unknown.append(mine)
        elif not alike(ours[0], targets[0]):
            other.append(f"{ours[0]}, replaced by the target's {targets[0]}")
    if not own:
        return []
    source = "probe: tensors that share memory while serving; values of both checkpoints"
    if other:
        return [
            Finding(
                "WGT008",
                Verdict.FAIL,
                f"{len(other)} tensors of the drafter's checkpoint landed, and are not those it serves with",
                n=len(own),
                expected="the drafter's own values, or the target's where they are the same",
                actual="; ".join(other),
                source=source,
                cause="the engine gives the drafter the target's tensor after the load, whatever its checkpoint holds",
                remedy="use a drafter trained on the target's own tensor, or an engine that keeps the drafter's",
            )
        ]
    if unknown:
        return [
            Finding(
                "WGT006",
                Verdict.INVALID,
                f"whether {len(unknown)} tensors of the drafter equal the target's in their place cannot be told",
                n=len(own),
                actual=some(unknown, _NAMED),
                source=source,
                cause="they are made of several keys",
                remedy="compare the two checkpoints' tensors by hand",
            )
        ]
    return [
        Finding(
            "WGT008",
            Verdict.PASS,
            f"{len(own)} tensors of the drafter were replaced by the target's, which hold the same",
            n=len(own),
            actual=some([mine for mine, _ in own], _NAMED),
            source=source,
        )
    ]


def _afterwards(evidence: Evidence, loads: Sequence[Load], exceptions: Exceptions) -> list[Finding]:
    """Judge that the drafter serves with what was loaded; those that became the target's are `_replaced`'s."""
    tensors = [(load.place, [each for each in load.parameters if each.keys and each.elements]) for load in loads]
    states = {place.pid: held for place, held in tensors if any(each.after != After.NOT_COMPARED for each in held)}
    source = "probe: sampled elements of each tensor when loaded, when the model was ready, and while serving"
    serving = {each.place.pid for each in evidence.servings}
    unwatched = sorted({place.rank for place, held in tensors if held and place.pid in serving - set(states)})
    if unwatched:
        return [
            Finding(
                "WGT006",
                Verdict.INVALID,
                f"what became of the drafter's tensors after the load was not looked at on ranks {unwatched}",
                source=source,
                cause="the probe did not compare them before it let go",
                remedy="see the evidence folder",
            )
        ]
    looked_at = [each for held in states.values() for each in held]
    if not looked_at:
        return []
    kept = (After.SAME, After.LENT)
    packed = [
        each for each in looked_at
        if each.after == After.REPACKED and exceptions.reason("drafter", "repack", f"{each.name} {each.after_detail}")
    ]  # fmt: skip
    changed = {each.name: each.after_detail for each in looked_at if each.after == After.CHANGED}
    others = [each for each in looked_at if each.after not in kept and each.name not in changed and each not in packed]
    unsure = {each.name: each.after_detail or each.after for each in others}
    if changed:
        return [
            Finding(
                "WGT009",
                Verdict.FAIL,
                f"{len(changed)} tensors of the drafter are not what was loaded",
                n=len(looked_at),
                expected="each serves as it was loaded",
                actual=some([f"{name}: {detail}" for name, detail in sorted(changed.items())], _NAMED),
                source=source,
                cause="the engine wrote to them, converted or exchanged them after load_weights had returned",
                remedy="look for what the engine does to the drafter between its load and its first draft",
            )
        ]
    if unsure:
        return [
            Finding(
                "WGT006",
                Verdict.INVALID,
                f"whether {len(unsure)} tensors of the drafter still hold what was loaded cannot be told",
                n=len(looked_at),
                actual=some([f"{name}: {detail}" for name, detail in sorted(unsure.items())], _NAMED),
                source=source,
                cause="their layers' own methods may repack them, and the packed form is not known",
                remedy="serve the drafter unquantised for this check, or review the method and write a row of "
                'weight_exceptions.toml (what = "repack")',
            )
        ]
    same, lent = (sum(each.after == state for each in looked_at) for state in kept)
    return [
        Finding(
            "WGT009",
            Verdict.PASS,
            "the drafter's tensors serve as they were loaded",
            n=same + lent,
            source=source,
            actual=f"{same} the same, {lent} the target's, {len(packed)} packed by their layers and not comparable",
        )
    ]


def _keys_of(loads: Sequence[Load]) -> dict[str, tuple[str, ...]]:
    """Return the checkpoint keys of each tensor, by all its names, over all ranks."""
    found: dict[str, tuple[str, ...]] = {}
    for load in loads:
        for parameter in load.parameters:
            for name in (parameter.name, *parameter.aliases):
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), *parameter.keys)))
    return found


def _config(keys: Sequence[ConfigKey], rules: Iterable[ConfigRule]) -> Finding:
    source = f"probe: reads of the drafter's config in every engine process ({len(keys)} keys)"
    if not keys or not any(key.read for key in keys):
        return Finding(
            "WGT005",
            Verdict.INVALID,
            "no read of the drafter's config was seen",
            source=source,
            cause="the probe's config hook saw nothing",
            remedy="see the evidence folder",
        )
    unread = [
        f"{key.path} = {key.value!r} ({rule.reason})"
        for key in keys
        for rule in rules
        if not key.read and rule.covers(key)
    ]
    if unread:
        return Finding(
            "WGT005",
            Verdict.FAIL,
            f"{len(unread)} config keys that change the drafter were never read",
            n=len(keys),
            expected="read by the engine",
            actual="; ".join(unread),
            source=source,
            cause="this engine version looks for the setting elsewhere, or does not have it",
            remedy="put the setting where the engine reads it, or use a version that does",
        )
    return Finding(
        "WGT005",
        Verdict.PASS,
        "every config key that changes the drafter was read",
        n=len(keys),
        source=source,
        actual=f"{sum(key.read for key in keys)} of {len(keys)} keys read",
    )


def borrowed(evidence: Evidence) -> set[str]:
    """Return the drafter's tensors that rightly are the target's: filled there, and of the shape the drafter has.

    A drafter without `lm_head` of its own is given the target's by vLLM 0.32.0 (v1/spec_decode/llm_base_proposer.py),
    whatever its draft vocabulary: another shape is no substitute.
    """
    filled = _filled_names(evidence.of("target"))
    ours, targets = (
        {tensor.name: tensor.shape for load in evidence.of(role) for tensor in load.parameters}
        for role in ("drafter", "target")
    )
    return {
        mine
        for serving in evidence.servings
        for mine, theirs in serving.shared
        if theirs in filled and ours.get(mine) == targets.get(theirs)
    }


def _filled_names(loads: Sequence[Load]) -> set[str]:
    """Return the tensors that every rank filled completely."""
    filled: set[str] = set()
    lacking: set[str] = set()
    for load in loads:
        for parameter in load.parameters:
            whole = parameter.written > 0 and not parameter.untouched
            (filled if whole else lacking).update((parameter.name, *parameter.aliases))
    return filled - lacking

"""The static contract: what one release will do with one drafter, from headers, configs and the release's contract."""

from __future__ import annotations

import collections
import dataclasses
import functools
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

from harness.canary.dialects import DIALECTS
from harness.canary.faults import NOT_LOADED
from harness.checkpoint.findings import Severity
from harness.checkpoint.read import Checkpoint
from harness.checkpoint.recognise import AuxLayers, Recognition, recognise
from harness.contracts import capture, shapes
from harness.contracts.config import BODY, IDS, aux_ids_are, effective, settings, unspelled_rope
from harness.contracts.embedding import EMBEDDING, HEAD, differs, embeddings, gives_way, lends_head
from harness.contracts.model import NAMELESS, Condition, Contract, Fate, Parameter, numbered, split
from harness.contracts.trials import NATIVE
from harness.verdict import Verdict, some, worst

__all__ = ["CODES", "Finding", "Report", "check", "other_embedding", "unknown_release"]

_NAMED = 8
"""How many names a finding spells out; `--format json` has all of them."""

CODES: Mapping[str, str] = {
    "CHK001": "no contract of this release ships",
    "CHK002": "the checkpoint is of a kind that the contract does not speak of",
    "CHK003": "keys unlike any that the release was tried with",
    "CHK101": "the release cannot read the config",
    "CHK102": "the architecture reaches another class",
    "CHK103": "a setting with which the release does not build the drafter",
    "CHK201": "keys dropped in silence",
    "CHK202": "keys dropped with a log record",
    "CHK203": "keys at which the load raises",
    "CHK204": "keys ignored by design",
    "CHK301": "parameters that nothing fills",
    "CHK302": "no d2t for a smaller draft vocabulary",
    "CHK303": "parameters that the target fills",
    "CHK304": "an embedding that the target's replaces",
    "CHK401": "a setting that the release ignores",
    "CHK402": "layer ids that the release does not read",
    "CHK403": "layer ids that engines read differently",
    "CHK404": "fewer positions than the target",
    "CHK501": "tensors of another shape than the config says",
    "CHK502": "fc does not take hidden states of this target",
    "CHK503": "another vocabulary than the target's",
    "CHK504": "shapes that could not be compared",
}
"""Every code, and what it means. Stable: a code is never given another meaning."""

_INVALID = ("CHK001", "CHK002", "CHK003", "CHK504")
"""Codes that say that something is not known. Not to know is never a pass."""

_TRIED = "llama"
"""The `model_type` of every drafter that releases were tried with."""
_QUANTISED = "hf_quant_config.json"
"""Where ModelOpt says how it quantised, if not in the config; both engines look for it."""

_PLACES = {IDS: "top-level", f"eagle_config.{IDS}": "nested"}
"""Config key -> how contracts call the place."""

_IGNORED = {**NOT_LOADED, "self_attn.rotary_emb.inv_freq": "computed from the config; old exports store it"}
"""Names that need not be loaded, with the reason."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that the release will do. `names` are the keys or parameters meant, `source` what it rests on."""

    code: str
    severity: Severity
    where: str
    summary: str
    source: str = ""
    remedy: str = ""
    names: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """What it makes of the release's verdict."""
        if self.code in _INVALID:
            return Verdict.INVALID
        return Verdict.FAIL if self.severity is Severity.ERROR else Verdict.PASS


@dataclasses.dataclass(frozen=True)
class Report:
    """One release's verdict on one drafter. `fates` by key, `filled` parameter -> whether the checkpoint fills it."""

    release: str
    findings: tuple[Finding, ...]
    fates: Mapping[str, Fate] = dataclasses.field(default_factory=dict)
    filled: Mapping[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst of the findings; nothing looked at is INVALID."""
        looked = [Verdict.PASS] if self.fates else []
        return worst([*looked, *(finding.verdict for finding in self.findings)])


def unknown_release(release: str, known: Sequence[str]) -> Report:
    """Return the report on a release that there is no contract of."""
    engine = release.partition("==")[0]
    listed = ", ".join(known) or "none"
    return Report(
        release,
        (
            Finding(
                "CHK001",
                Severity.ERROR,
                release,
                f"nothing is known of {release}; contracts ship of {engine} {listed}",
                remedy=f"derive it: draftgate contract derive {release} --output FILE, then give --contract FILE",
            ),
        ),
    )


def check(
    drafter: Checkpoint, target: Checkpoint | None, contract: Contract, *, other_embedding: bool | None = False
) -> Report:
    """Judge a drafter against one release. `target` None leaves out what only the target tells.

    `other_embedding` is what `embedding.differs` says of the two, for that takes their data; False does not ask.
    """
    about, _ = recognise(drafter)
    where = str(drafter.files.config or drafter.folder)
    case = _Case(drafter, target, contract, about, where, effective(drafter.config))
    if foreign := [*case.foreign()]:
        # Of such a drafter nothing else that the contract says is known to hold.
        return Report(contract.release, tuple(foreign))
    fates = case.fates
    filled = case.filled
    findings = [
        *case.route(),
        *case.keys(),
        *case.parameters(),
        *(() if other_embedding is False else case.embedding(other=other_embedding)),
        *case.settings(),
        *case.layer_ids(),
        *case.sizes(),
    ]
    order = {severity: rank for rank, severity in enumerate(Severity)}
    return Report(contract.release, tuple(sorted(findings, key=lambda f: (order[f.severity], f.code))), fates, filled)


def other_embedding(
    drafter: Checkpoint, target: Checkpoint | None, contracts: Iterable[Contract | None]
) -> bool | None:
    """Return `embedding.differs` if one of the releases makes it matter, else False: the tensors are large.

    Raises CheckpointError if they cannot be read.
    """
    config = effective(drafter.config)
    matters = any(gives_way(each.engine, each.version, config) is not False for each in contracts if each)
    return differs(drafter, target) if matters else False


@dataclasses.dataclass(frozen=True)
class _Case:
    """One drafter on one release."""

    drafter: Checkpoint
    target: Checkpoint | None
    contract: Contract
    about: Recognition
    where: str
    config: Mapping[str, Any]

    @functools.cached_property
    def conditions(self) -> list[Condition]:
        """The settings of the config that the release was tried with."""
        return self.contract.holding(self.config)

    @property
    def source(self) -> str:
        """What statements about names rest on: the class whose `load_weights` was run."""
        module, _, name = self.contract.model_class.rpartition(".")
        return f"{self.contract.release} {module.replace('.', '/')}.py, {name}.load_weights, run"

    @property
    def convert(self) -> str:
        """The command that writes the drafter as this release wants it."""
        path = shlex.quote(str(self.drafter.folder))
        engine, version = self.contract.engine, self.contract.version
        return f"draftgate convert {path} {path}-{engine} --to {engine} --engine-version {version}"

    def foreign(self) -> Iterator[Finding]:
        """Yield what makes the drafter one that the contract does not speak of."""
        config, names = self.drafter.config, self.about.architectures
        kind = config.get("speculators_model_type", "eagle3")
        parallel = self.about.method == "p-eagle" or any("peagle" in name.lower() for name in names)
        parallel |= any(split(key)[2] == "mask_hidden" for key in self.drafter.tensors)
        quantised = [key for key in ("quantization_config", "compression_config") if self.config.get(key)]
        if (self.drafter.folder / _QUANTISED).is_file():
            quantised.append(_QUANTISED)
        reached = self.reached
        if self.about.method not in ("eagle3", "p-eagle"):
            why = f"this is no EAGLE-3 drafter but {self.about.method}; contracts speak of EAGLE-3 drafters only"
        elif parallel or kind == "peagle":
            why = "it is a P-EAGLE drafter, and no release was tried with parallel drafting"
        elif kind != "eagle3":
            why = f"speculators_model_type is {kind!r}; contracts speak of eagle3 only"
        elif reached != self.contract.model_class and "eagle" in reached.lower() and not reached.startswith("raises "):
            listed = ", ".join(names) or "none"
            why = f"architectures {listed} reaches {reached}; the contract speaks of {self.contract.model_class}"
        elif quantised:
            why = f"its weights are quantised ({quantised[0]}), and no release was tried with that"
        elif self._model_type() is None and self.old_transformers:
            why = "model_type is absent, and transformers before 5 guesses one from the folder's name"
        elif self._model_type() not in (None, _TRIED) and not reached.startswith("raises "):
            why = f"model_type is {self._model_type()!r}, and releases were tried with {_TRIED!r} alone"
        else:
            return
        yield Finding(
            "CHK002", Severity.ERROR, self.where, why,
            remedy="serve the pair and read the weights suite: draftgate run --pair NAME",
        )  # fmt: skip

    @property
    def old_transformers(self) -> bool:
        """Whether the release asks for transformers before 5."""
        return Version(self.contract.made_with.get("transformers", "0")) < Version("5")

    def _model_type(self) -> Any:
        """Return the decoder's `model_type`, None where the config has none."""
        speculators = "speculators_model_type" in self.drafter.config
        body = self.drafter.config.get(BODY) if speculators else self.drafter.config
        if not isinstance(body, Mapping) or "model_type" not in body:
            # vLLM's reading of speculators' config takes llama then (0.25.1 to 0.32.0, configs/speculators/algos.py).
            return _TRIED if speculators else None
        return "null" if body["model_type"] is None else body["model_type"]

    def route(self) -> Iterator[Finding]:
        """Judge whether the config reaches the drafter's class."""
        for condition in self.conditions:
            if condition.error:
                yield Finding(
                    "CHK103", Severity.ERROR, self.where,
                    f"with {condition.when} the release raises: {condition.error}", self.source,
                    f"change {condition.when.partition('=')[0]} in config.json, or use another release",
                )  # fmt: skip
        if self.config.get("target_hidden_size", 0) is None:
            yield Finding(
                "CHK103", Severity.ERROR, f"{self.where}: target_hidden_size",
                "with target_hidden_size null the release raises a TypeError: it takes a null for a width",
                "read in SGLang 0.4.6.post5 to 0.5.23 and vLLM 0.11.2 to 0.32.0: models/llama_eagle3.py",
                "remove target_hidden_size from config.json",
            )  # fmt: skip
        names = ", ".join(self.about.architectures) or "none"
        if self._model_type() is None:
            yield Finding(
                "CHK101", Severity.ERROR, f"{self.where}: model_type",
                "model_type is absent: the release raises Unrecognized model",
                "read in transformers 5: models/auto/configuration_auto.py",
                f'write "model_type": "{_TRIED}", or: {self.convert}',
            )  # fmt: skip
        if self.reached == self.contract.model_class:
            return
        if self.reached.startswith("raises "):
            yield Finding(
                "CHK101", Severity.ERROR, self.where,
                f"architectures {names}: the release {self.reached}",
                f"{self.contract.release}, its own config loading, run",
                self.convert,
            )  # fmt: skip
        else:
            yield Finding(
                "CHK102", Severity.ERROR, self.where,
                f"architectures {names} reaches {self.reached}, which is no drafter's class",
                f"{self.contract.release}, its own choice of the class, run",
                f'write "architectures": ["{self.contract.model_class.rpartition(".")[2]}"], or: {self.convert}',
            )  # fmt: skip

    @functools.cached_property
    def reached(self) -> str:
        """Return the class that the config reaches, or `raises ...`."""
        if "speculators_model_type" in self.drafter.config:
            return self.contract.dialects["speculators"]
        for dialect, reached in self.contract.dialects.items():
            if DIALECTS[dialect].architecture in self.about.architectures and dialect != "speculators":
                return reached
        names = [name for name in self.about.architectures if name in self.contract.architectures]
        if names:
            return self.contract.architectures[names[0]]
        return "raises an error for want of a class of that name"

    @functools.cached_property
    def fates(self) -> dict[str, Fate]:
        """What becomes of every key."""
        return {key: self._fate(key) for key in self.drafter.tensors}

    def _fate(self, key: str) -> Fate:
        fate = self.contract.fate(key, self.conditions)
        if fate.into and not set(fate.into) & set(self.built):
            # A layer or chunk beyond the last that is built.
            return self.contract.elsewhere(key, self.conditions)
        if split(key)[2] == NAMELESS and (own := tuple(name for name in self.built if _bare(name) == _bare(key))):
            # Spelled as the engine calls its own parameter: loaders may take it, and no trial asked.
            return Fate("unknown", own)
        return fate

    def keys(self) -> Iterator[Finding]:
        """Judge the fate of every key."""
        fates = self.fates
        groups: dict[str, list[str]] = collections.defaultdict(list)
        for key, fate in fates.items():
            _, _, name = split(key)
            if fate.fate == "dropped" and name in _IGNORED:
                groups["CHK204"].append(key)
            elif fate.fate == "dropped":
                groups["CHK202" if fate.told else "CHK201"].append(key)
            elif fate.fate in ("raises", "unknown"):
                groups["CHK203" if fate.fate == "raises" else "CHK003"].append(key)
        said = {
            "CHK201": "are dropped without a log record",
            "CHK202": "are dropped; the log says so",
            "CHK203": "make the load raise",
            "CHK204": "are ignored by design",
            "CHK003": "are unlike any that the release was tried with",
        }
        for code, names in groups.items():
            by_design = code == "CHK204"
            reasons = {_IGNORED[split(name)[2]] for name in names} if by_design else ()
            yield Finding(
                code,
                Severity.NOTE if by_design else Severity.ERROR,
                _family(names),
                f"{len(names)} of {len(fates)} keys {said[code]}: {some(names, _NAMED)}"
                + (f" ({'; '.join(sorted(reasons))})" if reasons else ""),
                self.source,
                "" if by_design else self._rescue(names),
                tuple(names),
            )

    def _rescue(self, names: Sequence[str]) -> str:
        """Return what is to be done about lost keys: a rename helps those alone that have a place by another name."""
        native = [NATIVE + name if kind == "layer" else name for kind, _, name in map(split, names)]
        homeless = [
            name
            for name, own in zip(names, native, strict=True)
            if self.contract.fate(own, self.conditions).fate != "used"
        ]
        if not homeless:
            return self.convert
        text = f"this release has no place for {some(homeless, _NAMED)} under any name that was tried"
        return f"{text}; the rest: {self.convert}" if len(homeless) < len(names) else f"{text}: use another release"

    @functools.cached_property
    def hidden_states(self) -> int:
        """How many of the target's hidden states `fc` takes in the drafter that the release builds."""
        return self.contract.hidden_states(self.config)

    @functools.cached_property
    def built(self) -> dict[str, Parameter]:
        """The parameters that the release builds, with every further layer, and as many chunks as `fc` takes."""
        built = self.contract.built(self.conditions)
        last = {name: parameter for name, parameter in built.items() if "fc_norm.2." in name}
        for chunk in range(max(self.hidden_states, 0), 3):
            built = {name: parameter for name, parameter in built.items() if f"fc_norm.{chunk}." not in name}
        for chunk in range(3, min(self.hidden_states, 1000)):
            key = f"fc_norm.{chunk}."
            for name, parameter in last.items():
                ways = tuple(tuple(numbered(part, key) for part in way) for way in parameter.ways)
                built[numbered(name, key)] = dataclasses.replace(parameter, name=numbered(name, key), ways=ways)
        layers = self.config.get("num_hidden_layers", 1)
        if not isinstance(layers, int):
            return built
        second = {name: parameter for name, parameter in built.items() if ".layers.1." in f".{name}"}
        for layer in range(2, min(layers, 1000)):
            for name, parameter in second.items():
                built[name.replace("layers.1.", f"layers.{layer}.")] = parameter
        return built

    @functools.cached_property
    def filled(self) -> dict[str, bool]:
        """For every parameter whether keys of the checkpoint fill all of it."""
        landed: dict[str, set[str]] = collections.defaultdict(set)
        for fate in self.fates.values():
            for parameter in fate.into:
                landed[parameter].add(fate.canonical)
        return {
            name: any(landed[name].issuperset(way) for way in parameter.ways)
            for name, parameter in self.built.items()
            if not parameter.attribute
        }

    def parameters(self) -> Iterator[Finding]:
        """Judge which parameters stay as constructed."""
        filled = self.filled
        doubtful = [name for fate in self.fates.values() if fate.fate == "unknown" for name in fate.into]
        empty = [name for name, done in filled.items() if not done]
        # SGLang shares it with a drafter of the target's width alone.
        shares = self.contract.engine != "sglang" or self.gives_way is not False
        shared = [name for name in empty if shares and name.endswith(EMBEDDING)]
        lends = lends_head(self.contract.engine, self.contract.version, self.config)
        if HEAD in empty and lends is None:
            yield Finding(
                "CHK002", Severity.ERROR, HEAD,
                "it is not in the checkpoint, and whether the engine shares the target's was not read of this release",
            )  # fmt: skip
        if HEAD in empty and lends is not False:
            (shared if lends else doubtful).append(HEAD)
        # Constructed as zeros, which are added to the draft id: right where both vocabularies are one (vLLM 0.11.2 to
        # 0.28.0, models/llama_eagle3.py; later releases build no map then).
        full = self.about.draft_vocab is not None and self.about.draft_vocab == self.about.vocab
        identity = {"draft_id_to_target_id"} if full else set()
        lost = [name for name in empty if name not in (*shared, *doubtful, *identity)]
        if lost:
            yield Finding(
                "CHK301", Severity.ERROR, lost[0],
                f"{len(lost)} of {len(filled)} parameters stay as constructed: {some(lost, _NAMED)}", self.source,
                f"find them among the checkpoint's keys; if they are there by another name: {self.convert}",
                tuple(lost),
            )  # fmt: skip
        if shared:
            yield Finding(
                "CHK303", Severity.NOTE, shared[0],
                f"{some(shared, _NAMED)} is not in the checkpoint: the engine shares the target's", self.source,
                names=tuple(shared),
            )  # fmt: skip
        draft, vocab = self.about.draft_vocab, self.about.vocab
        if not any(split(key)[2] == "d2t" for key in self.drafter.tensors) and draft and vocab and draft < vocab:
            yield Finding(
                "CHK302", Severity.ERROR, "d2t",
                f"the draft vocabulary has {draft} tokens of {vocab}, and no d2t says which: draft ids are taken for "
                "target ids", self.source, "export the drafter with its d2t",
            )  # fmt: skip

    @functools.cached_property
    def gives_way(self) -> bool | None:
        """Whether the target's embedding takes the place of the drafter's; None if that is not known."""
        return gives_way(self.contract.engine, self.contract.version, self.config)

    def embedding(self, *, other: bool | None) -> Iterator[Finding]:
        """Judge an embedding whose place the target's takes after the load; `other` None: of values not known."""
        if self.gives_way is False:
            return
        known = self.gives_way is True
        for key in embeddings(self.drafter):
            what = f"{key} is replaced by the target's embedding after the load"
            if not known:
                what = f"whether {what} was not read of this release"
            yield Finding(
                "CHK304",
                Severity.ERROR if known and other else Severity.NOTE,
                key,
                what + ("; whether that holds other values is not known" if other is None else ", which holds others"),
                "read in SGLang 0.4.6.post5 to 0.5.23: set_embed in speculative/eagle_worker.py and eagle_worker_v2.py",
                "give --target with its tensors"
                if other is None
                else "use a drafter that was trained on the target's embedding, or serve it with vLLM",
                (key,),
            )

    def settings(self) -> Iterator[Finding]:
        """Judge settings that change what the drafter computes, and that the release does not read."""
        rope = unspelled_rope(self.config)
        if rope is not None and self.old_transformers:
            yield Finding(
                "CHK401", Severity.ERROR, f"{self.where}: rope_parameters",
                f"rope_parameters = {dict(rope)!r} is ignored, the spelling of transformers 5: "
                "theta is 10000 where rope_theta is absent, and nothing is scaled without rope_scaling",
                f"{self.contract.release} comes with transformers {self.contract.made_with.get('transformers')}, "
                "which reads rope_theta and rope_scaling",
                f"write rope_theta and rope_scaling, too: {self.convert}",
            )  # fmt: skip
        rows = {row.key: row for row in self.contract.config}
        for setting in settings(self.drafter.config):
            row = rows.get(setting.key)
            if row is None or row.read_by:
                continue
            spelled = ", ".join(row.spelled_in)
            where_spelled = f"no module read it while the drafter was built; files that spell it: {spelled}"
            yield Finding(
                "CHK401",
                Severity.WARNING if row.spelled_in else Severity.ERROR,
                f"{self.where}: {setting.key}",
                f"{setting.key} = {setting.value!r} is ignored ({setting.meaning})",
                f"{self.contract.release}, " + (where_spelled if spelled else "no source file of it spells the key"),
                "use a release that reads it, or a drafter trained without it",
            )

    def layer_ids(self) -> Iterator[Finding]:
        """Judge whether the release reads the layer ids where they stand, and what it takes them for."""
        named = {_PLACES[aux.key]: aux for aux in self.about.aux_layers if aux.key in _PLACES}
        read = [key.split() for key, ids in sorted(self.contract.aux.items()) if key.startswith("reads ") and ids]
        asked = [key.split() for key in sorted(self.contract.aux) if key.startswith("reads ")]
        for runner in dict.fromkeys(" ".join(rest) for _, _, *rest in asked):
            seen = {place for _, place, *rest in read if " ".join(rest) == runner}
            yield from self._unread(named, seen, f" by model runner {runner}" if runner else "")
        for aux in {aux.ids: aux for aux in named.values()}.values():
            yield from self._meaning(aux.key, list(aux.ids))

    def _unread(self, named: Mapping[str, AuxLayers], seen: Container[str], by: str) -> Iterator[Finding]:
        """Yield the ids that are not what one runner, which looks at the places `seen`, captures."""
        taken = next((aux for place, aux in named.items() if place in seen), None)
        defaults = self.contract.aux.get("captures default") and self._default_layers()
        for place, aux in named.items():
            if taken is not None and taken.ids == aux.ids:
                continue
            if taken is None and defaults and aux.ids == defaults:
                continue
            other = next(key for key, name in _PLACES.items() if name != place)
            if taken is not None:
                instead, remedy = f"{taken.key} {list(taken.ids)} counts", "leave the ids it was trained with"
            else:
                instead = "the default layers 2, L//2, L-3 are captured"
                can = _PLACES[other] in seen
                remedy = f"write it as {other}" if can else "use a release or a runner that reads it"
            yield Finding(
                "CHK402", Severity.ERROR, f"{self.where}: {aux.key}",
                f"{list(aux.ids)} is not read{by}: {instead}", f"{self.contract.release}, its own reading, run", remedy,
            )  # fmt: skip

    def _default_layers(self) -> tuple[int, ...]:
        layers = shapes.body(self.target.config).get("num_hidden_layers") if self.target else None
        return (2, layers // 2, layers - 3) if isinstance(layers, int) else ()

    def _meaning(self, key: str, ids: list[int]) -> Iterator[Finding]:
        """Say which layers' inputs are captured, and whether the trainer meant others."""
        captured = self.contract.aux.get("captures 1,3,6")
        if not captured or len({got - asked for got, asked in zip(captured, (1, 3, 6), strict=True)}) != 1:
            return
        config = self.target.config if self.target else None
        rules = capture.rules(self.contract.engine, self.contract.version, config, captured[0] - 1)
        layers = [rule.layers(ids) for rule in rules]
        # A conversion says what it wrote. speculators counts hidden states, which are layers' inputs; SpecForge counts
        # the layers they come out of.
        said = aux_ids_are(self.drafter.config)
        offset = {"inputs": 0, "outputs": 1, "speculators": 0, "specforge": 1}.get(said or self.about.dialect)
        meant = None if offset is None else [number + offset for number in ids]
        who = "draftgate.aux_ids_are" if said else self.about.dialect
        if len({tuple(each) for each in layers}) > 1:
            severity, remedy = (
                Severity.WARNING,
                ("compare with the layers it was trained on" if self.target else "give --target: its class decides"),
            )
        elif meant is None:
            severity, remedy = Severity.WARNING, "compare with the layers it was trained on"
        elif meant == layers[0]:
            severity, remedy = Severity.NOTE, ""
        else:
            written = rules[0].ids(meant)
            severity, remedy = Severity.ERROR, f"write {written}" if written else "use an engine that can be told them"
        listed = " or ".join(dict.fromkeys(str(each) for each in layers))
        yield Finding(
            "CHK403",
            severity,
            f"{self.where}: {key}",
            f"{ids} captures the inputs of the target's layers {listed}"
            + (f"; {who} means {meant}" if severity is Severity.ERROR else ""),
            f"{self.contract.release}, {'; '.join(rule.source for rule in rules)}",
            remedy,
        )

    def sizes(self) -> Iterator[Finding]:
        """Judge shapes against the configs of drafter and target."""
        loaded = [key for key, fate in self.fates.items() if fate.fate in ("used", "read")]
        lacking, mismatched = shapes.compare(self.drafter, self.config, self.hidden_states, loaded)
        if lacking:
            yield Finding(
                "CHK504", Severity.ERROR, self.where,
                f"the config lacks {', '.join(lacking)}: shapes could not be compared",
                remedy="add the keys to config.json; engines fill them with defaults of their own",
            )  # fmt: skip
        if mismatched:
            text = "; ".join(f"{m.key} {list(m.shape)}, by the config {list(m.wanted)}" for m in mismatched[:_NAMED])
            yield Finding(
                "CHK501", Severity.ERROR, mismatched[0].key, text, "config.json against the headers",
                "put the config beside the weights that it was written with", tuple(m.key for m in mismatched),
            )  # fmt: skip
        yield from self._against_target()

    def _against_target(self) -> Iterator[Finding]:
        if self.target is None:
            return
        theirs = shapes.body(self.target.config)
        hidden, vocab = theirs.get("hidden_size"), theirs.get("vocab_size")
        fc = next((key for key in self.drafter.tensors if split(key)[2] == "fc.weight"), None)
        if fc and isinstance(hidden, int) and hidden > 0:
            shape = self.drafter.tensors[fc].shape
            count = self.hidden_states
            if len(shape) == 2 and shape[1] != count * hidden:
                wanted = f"{count} x {hidden} = {count * hidden}"
                yield Finding(
                    "CHK502", Severity.ERROR, fc,
                    f"{fc} is {list(shape)}; {wanted} wide features arrive from this target",
                    "the target's hidden_size", "use the target that the drafter was trained on",
                )  # fmt: skip
        if self.about.vocab and isinstance(vocab, int) and vocab != self.about.vocab:
            yield Finding(
                "CHK503", Severity.ERROR, f"{self.where}: vocab_size",
                f"the drafter was made for {self.about.vocab} tokens, the target has {vocab}",
                "both configs", "use the target that the drafter was trained on",
            )  # fmt: skip
        ours, positions = self.config.get("max_position_embeddings"), theirs.get("max_position_embeddings")
        if isinstance(ours, int) and isinstance(positions, int) and ours < positions:
            yield Finding(
                "CHK404", Severity.WARNING, f"{self.where}: max_position_embeddings",
                f"{ours}, the target has {positions}: beyond {ours} tokens the drafter is out of its range",
                "both configs", f"serve with a context of at most {ours}, or write the target's number if rope allows",
            )  # fmt: skip


def _bare(name: str) -> str:
    """Return a name as all spellings of it have it in common: without `model.`, and with one name for the layer."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _family(names: Sequence[str]) -> str:
    prefixes = {split(name)[1].written for name in names}
    return f"{prefixes.pop()}*" if len(prefixes) == 1 and len(names) > 1 else names[0]

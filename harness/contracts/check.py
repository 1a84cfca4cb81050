"""The static contract: what one release will do with one drafter, from headers, configs and the release's contract."""

from __future__ import annotations

import collections
import dataclasses
import functools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.canary.dialects import DIALECTS
from harness.canary.faults import NOT_LOADED
from harness.checkpoint.findings import Severity
from harness.checkpoint.read import Checkpoint
from harness.checkpoint.recognise import Recognition, recognise
from harness.contracts import shapes
from harness.contracts.config import IDS, effective, settings
from harness.contracts.embedding import EMBEDDING, differs, embeddings, gives_way
from harness.contracts.model import Condition, Contract, Fate, Parameter, numbered, split
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
    if about.method not in ("eagle3", "p-eagle"):
        summary = f"this is no EAGLE-3 drafter but {about.method}; contracts speak of EAGLE-3 drafters only"
        return Report(contract.release, (Finding("CHK002", Severity.ERROR, where, summary),))
    case = _Case(drafter, target, contract, about, where, effective(drafter.config))
    fates = {key: contract.fate(key, case.conditions) for key in drafter.tensors}
    filled = case.filled(fates)
    findings = [
        *case.route(),
        *case.keys(fates),
        *case.parameters(filled),
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

    def route(self) -> Iterator[Finding]:
        """Judge whether the config reaches the drafter's class."""
        for condition in self.conditions:
            if condition.error:
                yield Finding(
                    "CHK103", Severity.ERROR, self.where,
                    f"with {condition.when} the release raises: {condition.error}", self.source,
                    f"change {condition.when.partition('=')[0]} in config.json, or use another release",
                )  # fmt: skip
        reached = self._reached()
        names = ", ".join(self.about.architectures) or "none"
        if reached == self.contract.model_class:
            return
        if reached.startswith("raises "):
            yield Finding(
                "CHK101", Severity.ERROR, self.where,
                f"architectures {names}: the release {reached}",
                f"{self.contract.release}, its own config loading, run",
                self.convert,
            )  # fmt: skip
        elif "eagle" in reached.lower():
            yield Finding(
                "CHK002", Severity.ERROR, self.where,
                f"architectures {names} reaches {reached}; the contract speaks of {self.contract.model_class}",
                remedy="serve the pair and read the weights suite: draftgate run --pair NAME",
            )  # fmt: skip
        else:
            yield Finding(
                "CHK102", Severity.ERROR, self.where,
                f"architectures {names} reaches {reached}, which is no drafter's class",
                f"{self.contract.release}, its own choice of the class, run",
                f'write "architectures": ["{self.contract.model_class.rpartition(".")[2]}"], or: {self.convert}',
            )  # fmt: skip

    def _reached(self) -> str:
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

    def keys(self, fates: Mapping[str, Fate]) -> Iterator[Finding]:
        """Judge the fate of every key."""
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

    def built(self) -> dict[str, Parameter]:
        """Return the parameters that the release builds, those of every further layer and chunk included."""
        built = self.contract.built(self.conditions)
        last = {name: parameter for name, parameter in built.items() if "fc_norm.2." in name}
        for chunk in range(3, min(self.about.aux_count or 3, 1000)):
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

    def filled(self, fates: Mapping[str, Fate]) -> dict[str, bool]:
        """Return for every parameter whether keys of the checkpoint fill all of it."""
        landed: dict[str, set[str]] = collections.defaultdict(set)
        for fate in fates.values():
            for parameter in fate.into:
                landed[parameter].add(fate.canonical)
        return {
            name: any(landed[name].issuperset(way) for way in parameter.ways)
            for name, parameter in self.built().items()
            if not parameter.attribute
        }

    def parameters(self, filled: Mapping[str, bool]) -> Iterator[Finding]:
        """Judge which parameters stay as constructed."""
        empty = [name for name, done in filled.items() if not done]
        # SGLang shares it with a drafter of the target's width alone.
        shares = self.contract.engine != "sglang" or self.gives_way is not False
        shared = [name for name in empty if shares and name.endswith(EMBEDDING)]
        # Constructed as zeros, which are added to the draft id: right where both vocabularies are one (vLLM 0.11.2 to
        # 0.28.0, models/llama_eagle3.py; later releases build no map then).
        full = self.about.draft_vocab is not None and self.about.draft_vocab == self.about.vocab
        identity = {"draft_id_to_target_id"} if full else set()
        lost = [name for name in empty if name not in shared and name not in identity]
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
        default = self.contract.aux.get("captures default")
        for aux in self.about.aux_layers:
            place = {IDS: "top-level", f"eagle_config.{IDS}": "nested"}.get(aux.key)
            if place is None:
                continue
            for read, ids in sorted(self.contract.aux.items()):
                verb, _, rest = read.partition(" ")
                if verb != "reads" or rest.split()[0] != place or ids is not None:
                    continue
                runner = rest.partition(" ")[2]
                if default and tuple(aux.ids) == self._default_layers():
                    continue
                other = f"eagle_config.{IDS}" if place == "top-level" else IDS
                yield Finding(
                    "CHK402", Severity.ERROR, f"{self.where}: {aux.key}",
                    f"{list(aux.ids)} is not read{f' by model runner {runner}' if runner else ''}: "
                    "the default layers 2, L//2, L-3 are captured", f"{self.contract.release}, its own reading, run",
                    f"write it as {other}" if self._reads(other, runner) else "use a release or a runner that reads it",
                )  # fmt: skip
            yield from self._meaning(aux.key, list(aux.ids))

    def _reads(self, key: str, runner: str) -> bool:
        place = "top-level" if key == IDS else "nested"
        return self.contract.aux.get(" ".join(filter(None, ("reads", place, runner)))) is not None

    def _default_layers(self) -> tuple[int, ...]:
        layers = self.target.config.get("num_hidden_layers") if self.target else None
        return (2, layers // 2, layers - 3) if isinstance(layers, int) else ()

    def _meaning(self, key: str, ids: list[int]) -> Iterator[Finding]:
        """Say which layers' inputs are captured, and whether the trainer meant others."""
        captured = self.contract.aux.get("captures 1,3,6")
        if not captured or len({got - asked for got, asked in zip(captured, (1, 3, 6), strict=True)}) != 1:
            return
        added = captured[0] - 1
        # speculators counts hidden states, which are layers' inputs; SpecForge counts the layers they come out of.
        meant = {"speculators": 0, "specforge": 1}.get(self.about.dialect)
        written = [number + (meant or 0) - added for number in ids]
        differs = meant is not None and meant != added
        yield Finding(
            "CHK403",
            Severity.ERROR if differs else Severity.NOTE if meant == added else Severity.WARNING,
            f"{self.where}: {key}",
            f"{ids} captures the inputs of the target's layers {[number + added for number in ids]}"
            + (f"; {self.about.dialect} means {[number + (meant or 0) for number in ids]}" if differs else ""),
            f"{self.contract.release}, the target's own set-up of the capture, run",
            f"write {written}" if differs else "" if meant == added else "compare with the layers it was trained on",
        )

    def sizes(self) -> Iterator[Finding]:
        """Judge shapes against the configs of drafter and target."""
        found, mismatched = shapes.compare(self.drafter, self.config, self.target)
        if not found.complete:
            yield Finding(
                "CHK504", Severity.ERROR, self.where,
                f"the config lacks {', '.join(found.lacking)}: shapes could not be compared",
                remedy="add the keys to config.json; engines fill them with defaults of their own",
            )  # fmt: skip
        if mismatched:
            text = "; ".join(f"{m.key} {list(m.shape)}, by the config {list(m.wanted)}" for m in mismatched[:_NAMED])
            yield Finding(
                "CHK501", Severity.ERROR, mismatched[0].key, text, "config.json against the headers",
                "put the config beside the weights that it was written with", tuple(m.key for m in mismatched),
            )  # fmt: skip
        yield from self._against_target(found)

    def _against_target(self, found: shapes.Found) -> Iterator[Finding]:
        if self.target is None:
            return
        theirs = shapes.body(self.target.config)
        hidden, vocab = theirs.get("hidden_size"), theirs.get("vocab_size")
        fc = next((key for key in self.drafter.tensors if split(key)[2] == "fc.weight"), None)
        if fc and isinstance(hidden, int) and hidden > 0:
            shape = self.drafter.tensors[fc].shape
            count = found.aux or 3
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


def _family(names: Sequence[str]) -> str:
    prefixes = {split(name)[1].written for name in names}
    return f"{prefixes.pop()}*" if len(prefixes) == 1 and len(names) > 1 else names[0]

"""Judges of what the drafter is fed and built as: width, layers, target, settings."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from harness.checkpoint.findings import Severity
from harness.contracts.config import IDS
from harness.diagnose.acceptance import State
from harness.diagnose.loading import names, unfilled
from harness.diagnose.rules import (
    accepted_as_trained,
    by_record,
    first,
    idle,
    known_drafter,
    listed,
    no_drafter,
    not_checked,
    seen,
)
from harness.diagnose.verdicts import Case, Opinion, Status, confirmed, excluded, likely, remains
from harness.gate.aux_hidden import default_layers

__all__ = ["layers", "settings", "single_state", "target"]

_EAGLE1 = ("eagle", "nextn")
"""Flags with which the target hands over its last hidden state alone. SGLang takes NEXTN for EAGLE (server_args.py)."""


def _width(case: Case) -> str:
    """Return what fc takes and what a launch as EAGLE would give it; nothing where fc was not seen."""
    static = case.static
    if static is None or static.fc is None:
        return ""
    taken, count = static.fc[1], static.about.aux_count or 3
    single = static.about.target_hidden or taken // count
    return f"fc takes {taken}; launched as EAGLE, {single} arrives instead of {taken}, and goes round fc"


def _one_by_design(case: Case) -> Opinion | None:
    static = case.static
    if static is None:
        return None
    if static.about.method not in ("eagle3", "p-eagle", "unknown"):
        return excluded(f"the drafter is {static.about.method}: it takes one hidden state by design")
    if static.fc is not None and static.fc[1] == static.about.target_hidden:
        return excluded(f"fc takes {static.fc[1]}, one hidden state, by design")
    return None


def _wrong_method(case: Case) -> Opinion | None:
    algorithm = case.symptoms.algorithm
    if algorithm is None or algorithm.value not in _EAGLE1:
        return None
    name = algorithm.value.upper()
    text = f"launched as {name} ({algorithm.source}), not EAGLE3: the target hands over one hidden state"
    width = _width(case)
    return confirmed(text, width) if width else likely(text)


def _off_in_config(case: Case) -> Opinion | None:
    """Judge a config that turns them off: SGLang model_runner.py (0.5.8), vLLM llama_eagle3.py (0.14.1 to 0.32.0)."""
    eagle = case.static.drafter.config.get("eagle_config") if case.static is not None else None
    width = _width(case)
    if not isinstance(eagle, dict) or eagle.get("use_aux_hidden_state") is not False or not width:
        return None
    return confirmed(
        "the drafter's config says eagle_config.use_aux_hidden_state false, so one hidden state is asked for", width,
        remedy="write use_aux_hidden_state true into eagle_config of the drafter's config.json",
    )  # fmt: skip


def _width_not_seen(case: Case) -> Opinion:
    algorithm, width = case.symptoms.algorithm, _width(case)
    if algorithm is not None:
        return remains(
            width, f"launched as {algorithm.value} ({algorithm.source}); the width that arrives was not seen"
        )
    said = "neither the launch nor the width that arrives is known"
    whole = all(judge(case).status is Status.EXCLUDED for judge in (names, unfilled))
    if case.acceptance.state is State.DEAD and width and whole:
        known = "every weight lands, and still nothing at all is accepted: what the drafter is fed comes next"
        return likely(known, width, said)
    return remains(width, said)


single_state = first(
    by_record("AUX002", "AUX003"),
    accepted_as_trained,
    idle,
    _one_by_design,
    _wrong_method,
    _off_in_config,
    otherwise=_width_not_seen,
)
"""DIA301: one hidden state instead of the concatenation."""


def _clash(case: Case) -> Opinion | None:
    clash = [f for f in known_drafter(case).inspected if f.code in ("INS105", "INS106")]
    return likely(*(f"{f.code}: {f.summary}" for f in clash), remedy=clash[0].remedy) if clash else None


def _other_layers(case: Case) -> Opinion | None:
    """Judge ids that are not read, or mean other layers. How much a wrong layer costs only a run shows."""
    static = known_drafter(case)
    for code in ("CHK402", "CHK403"):
        hit = {r.name: [f for f in r.of(code) if f.severity is Severity.ERROR] for r in static.releases}
        hit = {name: findings for name, findings in hit.items() if findings}
        if not hit:
            continue
        worst = next(iter(hit.values()))[0]
        text = f"{', '.join(hit)}: {worst.summary} [{worst.source}]"
        if code == "CHK402" and any(_are_defaults(aux.ids) for aux in static.about.aux_layers):
            return remains(text, "the ids may be those defaults: give --target, and its layers decide")
        return (likely if static.every(hit) else remains)(text, remedy=worst.remedy)
    return None


def _are_defaults(ids: Sequence[int]) -> bool:
    """Whether ids are the default layers of some target, whose number of layers is not known."""
    return len(ids) == 3 and tuple(ids) == default_layers(ids[2] + 3)


def _graphs_have_default_layers(case: Case) -> Opinion | None:
    """Judge releases that capture CUDA graphs with the default layers: read in their source, not run.

    SGLang 0.5.1 to 0.5.10.post1, `model_executor/cuda_graph_runner.py`, calls `set_eagle3_layers_to_capture()` without
    ids just before it captures; `model_runner.py` sets them afterwards, when graphs hold the default ones. 0.5.12 does
    not.
    """
    symptoms = case.symptoms
    try:
        version = Version(symptoms.version.value) if case.engine == "sglang" and symptoms.version else None
    except InvalidVersion:
        version = None
    affected = version is not None and Version("0.5.1") <= version <= Version("0.5.10.post1")
    graphs = symptoms.graphs is not None and symptoms.graphs.value
    if not (
        affected and graphs and any(aux.key == f"eagle_config.{IDS}" for aux in known_drafter(case).about.aux_layers)
    ):
        return None
    return likely(
        f"{case.release} captures CUDA graphs with the default layers 2, L//2, L-3 whatever the config names "
        "(model_executor/cuda_graph_runner.py, read, not run), and graphs are on",
        remedy="compare once with --disable-cuda-graph, or use SGLang 0.5.12 or later",
    )


def _layers_not_seen(case: Case) -> Opinion:
    static = known_drafter(case)
    said = [f.summary for release in static.releases for f in release.of("CHK403")]
    if not static.about.aux_layers:
        said = ["the config names no layers, so 2, L//2 and L-3 are captured: right only if it was trained on those"]
    return remains(*dict.fromkeys(said), "which layers it was trained on is not in the file")


layers = first(
    by_record("AUX004", "AUX005"),
    accepted_as_trained,
    idle,
    no_drafter,
    not_checked,
    _clash,
    _other_layers,
    _graphs_have_default_layers,
    otherwise=_layers_not_seen,
)
"""DIA302: which target layers are captured."""


def _not_its_target(case: Case) -> Opinion:
    static = known_drafter(case)
    # Sizes are those of the files, whatever becomes of the keys.
    asked = (*static.releases, *(release for release in static.silent if not release.of("CHK002")))
    wrong = {f.code: f for release in asked for f in release.of("CHK502", "CHK503")}
    if wrong:
        # A vocabulary of another size may be the same one, padded.
        opinion = confirmed if "CHK502" in wrong else likely
        return opinion(*(f"{f.code}: {f.summary} [{f.source}]" for f in wrong.values()))
    if static.target is None:
        return remains("no --target was given, so sizes and vocabulary were not compared")
    same = (
        "hidden size and vocabulary are the target's; revision, quantisation and chat template are not in the headers"
    )
    if not asked:
        same = "there is no contract to compare with, so sizes were not compared"
    quantised = static.target.config.get("quantization_config")
    return remains(same, "the target is quantised: was it so in training?" if quantised else "")


target = first(accepted_as_trained, idle, no_drafter, otherwise=_not_its_target)
"""DIA501: another target."""


def _unread_in_record(case: Case) -> Opinion | None:
    if red := case.red("WGT005"):
        return likely(*seen(red), remedy=red[0].remedy)
    green = case.green("WGT005")
    return excluded(*seen(green)) if green else None


def _ignored(case: Case) -> Opinion:
    static = known_drafter(case)
    ignoring = {r.name: [f for f in r.of("CHK401") if f.severity is Severity.ERROR] for r in static.releases}
    ignoring = {name: found for name, found in ignoring.items() if found}
    if ignoring:
        found = next(iter(ignoring.values()))
        text = f"{', '.join(ignoring)}: {'; '.join(f.summary for f in found)} [{found[0].source}]"
        return (likely if static.every(ignoring) else remains)(text, remedy=found[0].remedy)
    doubts = [f.summary for release in static.releases for f in release.of("CHK401", "CHK404")]
    doubts += [f"no contract shows whether {key} is read" for release in static.releases for key in release.unsure]
    if static.exact and not doubts:
        return excluded(f"{listed(static.releases)} reads every setting of the config that changes the drafter")
    return remains(*dict.fromkeys(doubts))


settings = first(
    _unread_in_record,
    accepted_as_trained,
    idle,
    no_drafter,
    not_checked,
    otherwise=_ignored,
)
"""DIA601: settings that change what the drafter computes."""

"""Judging what reaches the drafter: width, projection, and which target layers were captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from harness.probe.facts import Evidence, Proposal, Serving, Stray
from harness.verdict import Finding, Judgement, Verdict

__all__ = ["Expected", "default_layers", "expected", "ids_to_write", "judge"]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the drafter was trained on, and who says so. `layers` are those whose *inputs* it reads, in order.

    `one_reading` is true where they are ids of the drafter's config, which does not say whether it means inputs or
    outputs.
    """

    width: int
    layers: tuple[int, ...]
    width_source: str
    layers_source: str
    one_reading: bool = False


_ADDED = {"sglang": 1, "vllm": 0}
"""What an engine adds to an id of the drafter's config to get the layer whose input it captures.

vLLM takes ids as they are (v1/worker/gpu_model_runner.py, 0.32.0). SGLang's targets add 1 (models/llama.py, qwen3.py
and most others, `set_eagle3_layers_to_capture`, 0.5.23). What one did in this run is seen by value, and goes first."""


def default_layers(target_layers: int) -> tuple[int, int, int]:
    """Return what EAGLE-3 reads unless told otherwise: the inputs of layers 2, L // 2 and L - 3.

    vLLM `get_eagle3_default_aux_hidden_state_layers` and SGLang `set_eagle3_layers_to_capture`, in their llama models.
    """
    return 2, target_layers // 2, target_layers - 3


def expected(
    *,
    drafter_config: Mapping[str, Any],
    target_hidden: int,
    target_layers: int,
    pair_width: int | None,
    pair_layers: tuple[int, ...] | None,
) -> Expected:
    """Return what the pair promises; where it says nothing, what the drafter's config does; else EAGLE-3's defaults."""
    ids = None
    if pair_layers is not None:
        layers, layers_source = pair_layers, "the pair's expect.aux_layers"
    else:
        nested = drafter_config.get("eagle_config") or {}
        ids = drafter_config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        if ids:
            layers, layers_source = tuple(ids), "the drafter's config, taken as inputs of layer k"
        else:
            layers, layers_source = default_layers(target_layers), f"EAGLE-3's default for {target_layers} layers"
    if pair_width is not None:
        return Expected(pair_width, layers, "the pair's expect.aux_hidden_dim", layers_source, bool(ids))
    width = len(layers) * target_hidden
    width_source = f"{len(layers)} x the target's hidden size {target_hidden}"
    return Expected(width, layers, width_source, layers_source, bool(ids))


def judge(evidence: Evidence, want: Expected) -> Judgement:
    """Judge every real proposal that was seen, on every rank.

    Codes: AUX001 nothing was seen, AUX002 width, AUX003 projection, AUX004 captured layers, AUX005 the engine's default
    layers were captured although others are asked for, AUX006 the layers could not be identified in every proposal, or
    none was after a decode, AUX007 the config's ids have two readings, and the pair does not say which is right, AUX008
    the states of another token.
    """
    findings: list[Finding] = []
    for serving in evidence.servings:
        where = f"probe, rank {serving.place.rank}, {serving.proposer} ({serving.runner})"
        if not serving.proposals:
            reasons = "; ".join(serving.unobserved) or "the proposer was never called"
            findings.append(_unseen(f"no real proposal was seen on rank {serving.place.rank}", reasons, where))
            continue
        findings.append(_width(serving, want, where))
        findings.append(_projection(serving, want, where))
        findings += _unidentified(serving, want, where)
        seen = [proposal for proposal in serving.proposals if proposal.captures]
        if seen:
            findings.append(_layers(serving, seen, want, evidence, where))
            findings += _tokens(seen, where)
    if not evidence.servings:
        findings.append(_unseen("no drafter at work was seen", "no process wrote serving evidence", "probe"))
    measured = {
        "expected": dataclasses.asdict(want),
        "servings": [
            {
                "rank": serving.place.rank,
                "runner": serving.runner,
                "drafter_class": serving.drafter_class,
                "requested": serving.requested,
                "declared": serving.declared,
                "proposals": len(serving.proposals),
                "feature_widths": sorted({proposal.feature_width for proposal in serving.proposals}),
                "captured": [proposal.layers() for proposal in serving.proposals if proposal.captures][:1],
                "went_around": serving.went_around,
                "decodes": sum(proposal.decode for proposal in serving.proposals),
                "rows_compared": sum(proposal.compared for proposal in serving.proposals),
                "unobserved": serving.unobserved,
            }
            for serving in evidence.servings
        ],
    }
    return Judgement("aux_hidden", tuple(findings), measured)


def _unseen(summary: str, reasons: str, source: str) -> Finding:
    return Finding(
        "AUX001",
        Verdict.INVALID,
        summary,
        actual=reasons,
        source=source,
        cause="the probe was not attached to the drafter's proposer, or no draft was made",
        remedy="see the evidence folder for hooks that failed, and the server's log",
    )


def _width(serving: Serving, want: Expected, source: str) -> Finding:
    proposals = serving.proposals
    widths = sorted({proposal.feature_width for proposal in proposals})
    seen = ", ".join(map(str, widths))
    if widths == [want.width]:
        return Finding(
            "AUX002",
            Verdict.PASS,
            f"auxiliary hidden states of width {want.width} reach the drafter",
            n=len(proposals),
            expected=f"{want.width} ({want.width_source})",
            actual=seen,
            source=source,
        )
    count = len(want.layers)
    single = count > 1 and widths == [want.width // count]
    return Finding(
        "AUX002",
        Verdict.FAIL,
        f"{seen} arrives, {want.width} expected" + (", projection bypassed" if serving.went_around else ""),
        n=len(proposals),
        expected=f"{want.width} ({want.width_source})",
        actual=seen,
        source=source,
        cause="one hidden state reaches the drafter, not the concatenation: the engine runs it as EAGLE or EAGLE-2"
        if single
        else "the engine concatenates another number of layers than the drafter was trained on",
        remedy="launch it as EAGLE-3 (vLLM: method eagle3; SGLang: --speculative-algorithm EAGLE3), and check the "
        "auxiliary layer ids in the drafter's config",
    )


def _projection(serving: Serving, want: Expected, source: str) -> Finding:
    count = len(serving.proposals)
    projection = serving.projection
    if projection is None:
        return Finding(
            "AUX003",
            Verdict.INVALID,
            "the drafter's input projection was not found",
            source=source,
            actual=f"drafter class {serving.drafter_class}",
            cause="no module was filled by a key named fc, and none has the right shape",
            remedy="see the weights suite: was fc loaded at all?",
        )
    widths = sorted({width for proposal in serving.proposals for width in proposal.projection_widths})
    text = f"{projection.module} [{projection.out_features}, {projection.in_features}] saw widths {widths or 'none'}"
    if serving.went_around:
        return Finding(
            "AUX003",
            Verdict.FAIL,
            f"the projection was bypassed in {serving.went_around} of {count} proposals",
            n=count,
            expected=f"{projection.module} applied to {want.width} in each",
            actual=text,
            source=source,
            cause="the projection is applied only if the incoming width differs from the drafter's own: a single "
            "hidden state passes it by",
            remedy="see AUX002: mend the width, and the projection is applied",
        )
    unseen = sum(not proposal.projection_widths for proposal in serving.proposals)
    if unseen:
        return Finding(
            "AUX003",
            Verdict.INVALID,
            f"whether the projection was applied could not be seen in {unseen} of {count} proposals",
            n=count,
            expected=f"{projection.module} applied to {want.width} in each",
            actual=f"{text}; no layer of the drafter was seen to run either",
            source=source,
            cause="the drafter runs where hooks do not reach (compiled or replayed graphs)",
            remedy="run this suite once with the engine in eager mode",
        )
    if widths != [want.width] or projection.in_features != want.width:
        return Finding(
            "AUX003",
            Verdict.FAIL,
            "the projection is applied to the wrong width",
            n=count,
            source=source,
            expected=f"{want.width} ({want.width_source})",
            actual=text,
            cause="the drafter was built for another target or another number of auxiliary layers",
            remedy="use the drafter that was trained for this target",
        )
    return Finding(
        "AUX003",
        Verdict.PASS,
        "the projection was applied in every proposal",
        n=count,
        expected=f"width {want.width}",
        actual=text,
        source=source,
    )


def _unidentified(serving: Serving, want: Expected, source: str) -> list[Finding]:
    """Return a finding for the proposals whose layers are not known, and one where only prompts were looked at."""
    proposals = serving.proposals
    blind = sum(not proposal.captures for proposal in proposals)
    decoded = any(proposal.decode and proposal.captures for proposal in proposals)
    missing = {
        f"the captured layers could not be identified by value in {blind} of {len(proposals)} proposals": blind > 0,
        "what reaches the drafter was not seen in any decode: after the prefill of prompts alone": not decoded,
    }
    reasons = "; ".join(serving.unobserved) or "no capture was compared"
    return [
        Finding(
            "AUX006",
            Verdict.INVALID,
            summary,
            n=len(proposals),
            expected=f"inputs of layers {list(want.layers)} ({want.layers_source}) in every proposal",
            actual=f"{reasons}; {_said(serving)}",
            source=source,
            cause="the target's layers run where hooks do not reach (compiled or replayed graphs), or drafts were "
            "never verified",
            remedy="run this suite once with the engine in eager mode",
        )
        for summary, applies in missing.items()
        if applies
    ]


def _said(serving: Serving) -> str:
    return f"the engine asked the target for {serving.requested}, and it declares {serving.declared}"


def _tokens(seen: Sequence[Proposal], source: str) -> list[Finding]:
    """Return a finding on whose states the rows hold; none where what they hold is not known (AUX004)."""
    strays = [
        f"proposal {number} of {len(seen)}, {_where(stray)}"
        for number, proposal in enumerate(seen, 1)
        for stray in proposal.strays
    ]
    compared = sum(proposal.compared for proposal in seen)
    expected_text = "each row holds the states of its own token, in every chunk"
    if strays:
        return [
            Finding(
                "AUX008",
                Verdict.FAIL,
                f"the states of another token reach the drafter, in {len(strays)} of {compared} rows",
                n=compared,
                expected=expected_text,
                actual="; ".join(strays[:_NAMED]) + ("; ..." if len(strays) > _NAMED else ""),
                source=source,
                cause="rows are shifted, repeated or in another order between the target's pass and the drafter's, or "
                "the chunks of one row are taken from several",
                remedy="compare what the engine does between the two passes (the rows it keeps after a verification, "
                "padding, the order of requests) with the version that last passed",
            )
        ]
    if not all(capture.layers or capture.final_norm for proposal in seen for capture in proposal.captures):
        return []
    return [
        Finding(
            "AUX008",
            Verdict.PASS,
            "no row holds the states of another token",
            n=compared,
            expected=expected_text,
            actual=f"{compared} rows of {len(seen)} proposals",
            source=source,
        )
    ]


_NAMED = 4
"""Rows that are named."""


def _where(stray: Stray) -> str:
    held = ", ".join(
        f"chunk {number} holds {'row ' + ' or '.join(map(str, rows)) if rows else 'no row of this pass'}"
        for number, rows in enumerate(stray.held)
    )
    return f"row {stray.row}: {held}" + (f" instead of row {stray.own[0]}" if stray.own else "")


def _layers(serving: Serving, seen: Sequence[Proposal], want: Expected, evidence: Evidence, source: str) -> Finding:
    said = _said(serving)
    expected_text = f"inputs of layers {list(want.layers)} ({want.layers_source})"
    bad = next((proposal for proposal in seen if not _matches(proposal, want.layers)), None)
    if bad is None:
        exact = all(capture.exact for proposal in seen for capture in proposal.captures)
        return Finding(
            "AUX004",
            Verdict.PASS,
            f"the inputs of layers {list(want.layers)} were captured, in this order",
            n=len(seen),
            expected=expected_text,
            actual=f"equal {'bit for bit' if exact else 'within rounding'}; {said}",
            source=source,
        )
    flat = "; ".join(
        f"chunk {number}: {' or '.join(map(str, layers)) or 'none'}" for number, layers in enumerate(bad.layers())
    )
    defaults = default_layers(serving.target_layers)
    asked = ", ".join(key.path for key in evidence.absent if "layer" in key.path)
    write = ids_to_write(evidence.engine, serving.requested, bad.layers(), want.layers)
    if _matches(bad, defaults) and tuple(want.layers) != defaults:
        return Finding(
            "AUX005",
            Verdict.FAIL,
            f"layers {list(defaults)} were captured instead of {list(want.layers)}",
            n=len(seen),
            expected=expected_text,
            actual=f"{flat}; {said}",
            source=source,
            cause="the engine fell back to EAGLE-3's default layers: it does not take the ids from where they stand"
            + (f"; it asked the drafter's config for keys that are not there: {asked}" if asked else ""),
            remedy=f"put the ids where this version looks for them, or use another version or runner; {write}",
        )
    if not any(layers for layers in bad.layers()):
        return Finding(
            "AUX004",
            Verdict.FAIL,
            "the captured states equal no target layer's input",
            n=len(seen),
            expected=expected_text,
            actual=f"{flat}; {said}",
            source=source,
            cause="the states are altered on the way, or come from elsewhere than the target's residual stream",
            remedy="compare the engine's capture code with the version that last passed",
        )
    if want.one_reading and _matches(bad, [layer + 1 for layer in want.layers]):
        return Finding(
            "AUX007",
            Verdict.INVALID,
            f"the drafter's ids {list(want.layers)} have two readings, and nobody says which is right",
            n=len(seen),
            expected=expected_text,
            actual=f"{flat}; {said}",
            source=source,
            cause="a drafter's ids mean layer inputs to vLLM and layer outputs to most of SGLang's targets; "
            f"{evidence.engine} took them as outputs",
            remedy="write the layers whose inputs the drafter was trained on into the pair: expect.aux_layers",
        )
    return Finding(
        "AUX004",
        Verdict.FAIL,
        f"other layers were captured than the drafter was trained on: {flat}",
        n=len(seen),
        expected=expected_text,
        actual=f"{flat}; {said}",
        source=source,
        cause="the ids mean layer outputs to one side and layer inputs to the other, or their order was changed",
        remedy=write,
    )


def ids_to_write(
    engine: str,
    requested: Sequence[int] | None,
    captured: Sequence[Sequence[int]],
    wanted: Sequence[int],
) -> str:
    """Return which ids the drafter's config must have, for the wanted layers to be captured by this engine.

    `captured` are the layers that each chunk may be. What the engine added to the ids it `requested` is what every
    chunk agrees on; its usual habit where there were no ids.
    """
    added, how = _ADDED.get(engine, 0), f"as {engine} usually does"
    asked = requested or ()
    if len(asked) == len(captured) > 0:
        apart = [{layer - id_ for layer in layers} for id_, layers in zip(asked, captured, strict=True)]
        common = set.intersection(*apart)
        if common and added not in common:
            added = min(common, key=abs)
        if common:
            how = "as seen here"
    ids = [layer - added for layer in wanted]
    if min(ids) < 0:
        return f"{engine} adds {added} to each id ({how}): the input of layer 0 cannot be asked for"
    rule = f"{engine} adds {added} to each" if added else f"{engine} takes them as they are"
    return f"for {engine}, write the ids {ids} into the drafter's config: {rule}, {how}"


def _matches(proposal: Proposal, layers: Sequence[int]) -> bool:
    chunks = proposal.layers()
    return len(chunks) == len(layers) and all(layer in chunk for layer, chunk in zip(layers, chunks, strict=True))

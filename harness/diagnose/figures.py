"""Judges of figures: what they mean, whether anything was learnt, whether it pays, whether they are made up."""

from __future__ import annotations

import math

from harness.diagnose.acceptance import UNLEARNT, State
from harness.diagnose.loading import matrices
from harness.diagnose.rules import accepted_as_trained, first, idle, seen
from harness.diagnose.verdicts import Case, Opinion, confirmed, excluded, likely, remains

__all__ = ["cost", "metric", "off", "other_states", "simulated", "untrained"]

_PER_REQUEST = 1.15
"""Accept length up to which a figure per request, of an output of n tokens, may be a dead drafter's n / (n - 1)."""

_LEARNT = 0.5
"""Step-0 accuracy above which a drafter has learnt to predict. A rule of thumb."""

_LITTLE = 1 / (1 - UNLEARNT)
"""Accept length that a drafter reaches at most which predicts every token of a step with that accuracy."""

_NOT_SEEN = "whether drafts are accepted is not known"


def _unclear(case: Case) -> Opinion | None:
    found = case.acceptance
    if found.state in (State.AMBIGUOUS, State.CONTRADICTORY):
        return likely(*found.problems)
    as_expected = found.state is State.EXPECTED and not found.slow
    if as_expected and case.symptoms.accept_rate is not None:
        return likely(f"accept length {found.length:.2f} is what was to be expected: nothing is wrong with acceptance")
    return None


def _per_request(case: Case) -> Opinion | None:
    length = case.acceptance.length
    if length is None or not case.acceptance.accepted or length > _PER_REQUEST or case.engine == "vllm":
        return None
    return remains(
        f"accept length {length:.2f}: if it is SGLang's figure per request (meta_info), of outputs of about "
        f"{math.ceil(length / (length - 1))} tokens, it is zero drafts accepted"
    )


def _read_rightly(case: Case) -> Opinion:
    length = case.acceptance.length
    if case.acceptance.state is State.OFF:
        return excluded("there are no acceptance figures to misread")
    if length is None:
        return remains("no accept length, and no rate that could be read as one")
    return excluded(f"the accept length is known, {length:.2f}, and needs no rate")


metric = first(_unclear, _per_request, otherwise=_read_rightly)
"""DIA101: what the figures mean."""


def _plain(case: Case) -> Opinion | None:
    algorithm = case.symptoms.algorithm
    if case.acceptance.state is State.OFF and algorithm is not None:
        return confirmed(f"no method of speculation is on ({algorithm.source})")
    blind = [f for f in case.symptoms.findings if f.code == "ACC004" and f.verdict == "INVALID"]
    return likely(*seen(blind)) if blind else None


def _verified(case: Case) -> Opinion | None:
    if case.symptoms.accept_length is None and case.symptoms.accept_rate is None:
        return None
    return excluded("verify steps were counted: there are acceptance figures")


def _maybe_plain(case: Case) -> Opinion:
    found, algorithm = case.acceptance, case.symptoms.algorithm
    if found.speedup is not None and abs(found.speedup - 1) <= 0.03:
        return likely(f"no acceptance figures, and the same speed with and without ({found.speedup:.2f}x)")
    if algorithm is not None:
        return remains(f"launched as {algorithm.value} ({algorithm.source}), but no verify step was seen")
    return remains("no acceptance figures, and the launch is not known")


off = first(_plain, _verified, otherwise=_maybe_plain)
"""DIA102: whether it speculates at all."""


def _trained_on_serving_engine(case: Case) -> Opinion | None:
    trained = case.symptoms.trained_on
    if trained is None or not case.engine or case.engine not in trained.value:
        return None
    return excluded(
        f"trained on hidden states of {case.engine} itself ({trained.source}), and the symptom is the same: training "
        "and serving then read one engine's states"
    )


def _nothing_of_much(case: Case) -> Opinion | None:
    accuracy = case.symptoms.training_accuracy
    if case.acceptance.state is not State.DEAD or accuracy is None or accuracy.value < _LEARNT:
        return None
    return excluded(
        f"nothing at all is accepted although step-0 accuracy is {accuracy.value:.1%} ({accuracy.source}): the same "
        "layer's states differ between engines by rounding, which costs some acceptance, not all of it"
    )


def _states_unknown(case: Case) -> Opinion:
    trained = case.symptoms.trained_on
    if trained is not None and case.engine and case.acceptance.state is State.WEAK:
        return likely(f"trained on states of {', '.join(trained.value)} ({trained.source}), served by {case.engine}")
    return remains(
        "" if trained else "which engine's states it was trained on is not known",
        "" if case.symptoms.training_accuracy else "its training accuracy is not known",
    )


other_states = first(accepted_as_trained, idle, _trained_on_serving_engine, _nothing_of_much, otherwise=_states_unknown)
"""DIA701: states of another engine."""


def _unlearnt(case: Case) -> Opinion | None:
    """Judge an accuracy below which nothing was learnt, before anything is said of what acceptance promises."""
    accuracy, found = case.symptoms.training_accuracy, case.acceptance
    if accuracy is None or accuracy.value >= UNLEARNT or found.length is None:
        return None
    text = f"step-0 accuracy {accuracy.value:.1%} ({accuracy.source})"
    if found.length > _LITTLE or found.state is State.EXPECTED:
        return remains(f"{text}, but accept length {found.length:.2f} is more than such a drafter brings")
    if found.state in (State.DEAD, State.WEAK, State.SOME):
        return likely(f"{text}: little is there to accept")
    return None


def _learnt(case: Case) -> Opinion:
    accuracy = case.symptoms.training_accuracy
    if accuracy is None:
        return remains("its training accuracy is not known")
    text = f"step-0 accuracy {accuracy.value:.1%} ({accuracy.source})"
    return excluded(f"{text}: it predicts its training text well") if accuracy.value >= _LEARNT else remains(text)


untrained = first(_unlearnt, accepted_as_trained, idle, otherwise=_learnt)
"""DIA702: nothing was learnt."""


def _nothing_to_pay_for(case: Case) -> Opinion | None:
    if case.acceptance.state is State.DEAD:
        return excluded("a drafter that is never accepted only costs: that it is slow follows from that")
    return excluded("the server does not speculate") if case.acceptance.state is State.OFF else None


def _pays_by_record(case: Case) -> Opinion | None:
    red, green, found = case.red("THR010"), case.green("THR010"), case.acceptance
    if red and found.length is not None and not found.accepted:
        return remains(*seen(red), _NOT_SEEN)
    if red:
        return confirmed(*seen(red), remedy=red[0].remedy)
    return excluded(*seen(green)) if green else None


def _pays(case: Case) -> Opinion:
    found = case.acceptance
    if found.speedup is None:
        return remains("speed with and without speculation is not known")
    speed = f"{found.speedup:.2f}x as fast as without"
    if not found.slow:
        return excluded(speed)
    if not found.accepted:
        return remains(speed, _NOT_SEEN)
    return confirmed(f"accept length {found.length:.2f}, and a step takes {found.step_cost:.2f} plain ones: {speed}")


cost = first(_nothing_to_pay_for, _pays_by_record, otherwise=_pays)
"""DIA801: drafts are accepted, and it does not pay."""


def _said_to_be(case: Case) -> Opinion | None:
    if made_up := [f for f in case.symptoms.findings if f.code == "ACC011" and f.verdict != "PASS"]:
        return confirmed(*seen(made_up))
    said = case.symptoms.simulated
    if said is None:
        return None
    return (likely if "in each of" in said.value else confirmed)(f"{said.value} ({said.source})")


def _too_good(case: Case) -> Opinion:
    static, found = case.static, case.acceptance
    if found.state is State.OFF:
        return excluded("the server does not speculate")
    dropped = static is not None and static.exact and any(matrices(r.lost_layer) for r in static.releases)
    if dropped and found.accepted:
        return likely(
            f"{case.release} drops the decoder layer of this drafter, and still accept length is {found.length:.2f}: "
            "simulated, or another release or checkpoint is served"
        )
    return remains("whether it is switched on is in the server's environment, which was not seen")


simulated = first(_said_to_be, otherwise=_too_good)
"""DIA901: acceptance is made up."""

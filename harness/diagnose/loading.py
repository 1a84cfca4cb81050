"""Judges of what is loaded: keys that are dropped, parameters that nothing fills, the vocabulary map."""

from __future__ import annotations

from collections.abc import Sequence

from harness.checkpoint.findings import Severity
from harness.diagnose.acceptance import State
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
from harness.diagnose.static import Release
from harness.diagnose.verdicts import Case, Opinion, Status, confirmed, excluded, likely, remains
from harness.verdict import some

__all__ = ["embedding", "mapping", "matrices", "names", "unfilled"]

_MAPS = ("d2t", "hot_token_id", "draft_id_to_target_id")
"""The vocabulary map: the checkpoint's key, SGLang's attribute, vLLM's parameter."""

_NAMED = 6
_UNSOUND = ("INS201", "INS203", "INS204", "INS205", "INS206")
_DOUBTFUL = ("INS202", "INS207", "INS208")


def matrices(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the projections among keys: without them a layer computes noise."""
    return tuple(key for key in keys if key.endswith("_proj.weight"))


def _weights(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that are no vocabulary map, which is a cause of its own."""
    return tuple(key for key in keys if not key.endswith("d2t"))


def _only_the_map(case: Case) -> Opinion | None:
    """Leave alone a finding that names the vocabulary map and no weight."""
    red = [f for f in case.red("WGT003", "WGT004") if "drafter" in f.summary]
    if red and all(any(name in f.actual for name in _MAPS) and ".weight" not in f.actual for f in red):
        return excluded(*seen(red), "of the drafter's tensors it is the vocabulary map alone")
    return None


def _used(case: Case) -> Opinion | None:
    static = known_drafter(case)
    if any(_weights(release.lost) for release in static.releases):
        return None
    raising = [release for release in static.releases if release.raises]
    if raising and static.every(raising):
        keys = some(raising[0].raises, _NAMED)
        return excluded(f"{listed(raising)}: the load raises at {keys}, so the server would not have started")
    text = f"{listed(static.releases)}: their own loader uses every key of the drafter"
    return excluded(text) if static.exact or static.between else remains(text)


def _dropped(case: Case) -> Opinion:
    static = known_drafter(case)
    losing = [release for release in static.releases if _weights(release.lost)]
    using = [release for release in static.releases if release not in losing]
    lost = _weights(losing[0].lost)
    layer = bool(matrices(losing[0].lost_layer))
    finding = losing[0].of("CHK201", "CHK202")[0]
    count = f"{len(lost)} of {len(static.drafter.tensors)} keys"
    grounds = [f"{listed(losing)}: {count} are dropped: {some(lost, _NAMED)} [{finding.source}]"]
    stays = "the decoder layer stays as constructed, so its drafts are noise"
    grounds.append(stays if layer else "what they fill stays as constructed")
    if layer and case.acceptance.state in (State.SOME, State.WEAK):
        grounds.append(
            f"but accept length {case.acceptance.length:.2f} says that drafts are accepted: another release or another "
            "checkpoint is served, or acceptance is simulated"
        )
        return remains(*grounds, remedy=finding.remedy)
    if static.exact:
        return (confirmed if layer else likely)(*grounds, remedy=finding.remedy)
    grounds.append(_which(case, using))
    return (likely if static.every(losing) else remains)(*grounds, remedy=finding.remedy)


def _which(case: Case, using: Sequence[Release]) -> str:
    """Say why nothing is certain where the release that serves has no contract, or is not known."""
    if case.release:
        text = f"{case.release} has no contract of its own"
    elif case.acceptance.counts_root is not None and not using and not known_drafter(case).silent:
        text = "the release is not named, but of those that print such an accept rate every one drops them"
    else:
        text = "which release serves is not known"
    return f"{text}; {listed(using)} uses them" if using else text


names = first(
    _only_the_map,
    by_record("WGT003", of="drafter"),
    accepted_as_trained,
    idle,
    no_drafter,
    not_checked,
    _used,
    otherwise=_dropped,
)
"""DIA201: keys that the release drops."""


def _unfilled_for_want_of_keys(case: Case) -> Opinion | None:
    """Leave open what the record saw unfilled where it also saw keys land nowhere: those were to fill it."""
    red = [f for f in case.red("WGT004") if "drafter" in f.summary]
    if red and names(case).status is Status.CONFIRMED:
        return remains(*seen(red), "keys of the drafter landed nowhere: these may be what they were to fill")
    return None


def _missing(case: Case) -> Opinion:
    static = known_drafter(case)
    lacking = [release for release in static.releases if release.missing]
    if not lacking:
        text = f"{listed(static.releases)}: there is a tensor for every parameter but the target's own"
        return excluded(text) if static.exact or static.between else remains(text)
    text = f"{listed(lacking)}: no tensor for {some(lacking[0].missing, _NAMED)}"
    remedy = f"export the drafter again with {some(lacking[0].missing, _NAMED)}"
    if not static.every(lacking):
        return remains(text, remedy=remedy)
    # A norm that stays as constructed is all ones: what that costs is not known. Of a matrix it is noise.
    noise = any("norm" not in name for release in lacking for name in release.missing)
    return (confirmed if static.exact and noise else likely)(text, remedy=remedy)


unfilled = first(
    _only_the_map,
    _unfilled_for_want_of_keys,
    by_record("WGT004", of="drafter"),
    accepted_as_trained,
    idle,
    no_drafter,
    not_checked,
    otherwise=_missing,
)
"""DIA202: parameters that nothing fills."""


def _map_in_record(case: Case) -> Opinion | None:
    red = [f for f in case.red("WGT003", "WGT004") if "drafter" in f.summary and any(m in f.actual for m in _MAPS)]
    return confirmed(*seen(red)) if red else None


def _unsound(case: Case) -> Opinion | None:
    found = [f for f in known_drafter(case).inspected if f.code in _UNSOUND]
    return confirmed(*(f"{f.code}: {f.where} {f.summary}" for f in found), remedy=found[0].remedy) if found else None


def _map_dropped(case: Case) -> Opinion | None:
    static = known_drafter(case)
    dropping = [release for release in static.releases if set(release.lost) - set(_weights(release.lost))]
    if not dropping:
        return None
    opinion = confirmed if static.exact else likely if static.every(dropping) else remains
    return opinion(f"{listed(dropping)}: d2t is dropped")


def _no_map(case: Case) -> Opinion | None:
    static = known_drafter(case)
    if any(key.endswith("d2t") for key in static.drafter.tensors):
        return None
    about = static.about
    if about.draft_vocab and about.draft_vocab == about.vocab:
        return excluded(f"the draft vocabulary is the target's ({about.vocab}): no d2t is needed")
    return remains("there is no d2t, and the config does not say how large both vocabularies are")


def _doubts(case: Case) -> list[str]:
    return [f"{f.code}: {f.where} {f.summary}" for f in known_drafter(case).inspected if f.code in _DOUBTFUL]


def _offsets(case: Case) -> str:
    return f"d2t holds sound offsets for {known_drafter(case).about.draft_vocab} draft tokens (draftgate inspect)"


def _landed(case: Case) -> Opinion | None:
    landed = seen(f for f in case.green("WGT003") if "drafter" in f.summary)
    return excluded(_offsets(case), *landed) if landed and not _doubts(case) else None


def _sound(case: Case) -> Opinion:
    static = known_drafter(case)
    if doubts := _doubts(case):
        return remains(*doubts)
    if static.exact or static.between:
        return excluded(_offsets(case), f"{listed(static.releases)}: the release's own loader uses it")
    return remains(_offsets(case), "whether the release applies it is not known")


mapping = first(
    _map_in_record,
    accepted_as_trained,
    idle,
    no_drafter,
    _unsound,
    _no_map,
    _landed,
    not_checked,
    _map_dropped,
    otherwise=_sound,
)
"""DIA401: the draft vocabulary map."""


def _replaced(case: Case) -> Opinion:
    static = known_drafter(case)
    replacing = {release.name: told[0] for release in static.releases if (told := release.of("CHK304"))}
    if not replacing:
        text = f"{listed(static.releases)}: the drafter has no embedding but the target's, or keeps its own"
        return excluded(text) if static.exact else remains(text)
    found = next(iter(replacing.values()))
    text = f"{', '.join(replacing)}: {found.summary} [{found.source}]"
    if found.severity is not Severity.ERROR or not static.every(replacing):
        return remains(text, remedy=found.remedy)
    # One value that differs is enough to be told: how much it costs shows in what is accepted.
    sure = static.exact and case.acceptance.state is State.DEAD
    return (confirmed if sure else likely)(text, remedy=found.remedy)


embedding = first(
    by_record("WGT008"),
    accepted_as_trained,
    idle,
    no_drafter,
    not_checked,
    otherwise=_replaced,
)
"""DIA203: whose embedding the drafter computes with."""

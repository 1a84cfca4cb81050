"""Start an engine with a pair, ask it some prompts, and read the states that its drafter was handed for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import EvidenceError
from harness.parity.compare import Rows
from harness.probe import evidence as probe
from harness.probe import features

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.gate.case import Case
    from harness.measure.endpoint import Prompt

__all__ = ["Asked", "Captured", "arrange", "capture"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """One prompt as the engine says that it tokenised it, and what it generated."""

    name: str
    prompt_ids: tuple[int, ...]
    generated: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Captured:
    """What one engine handed over, and which ids it asked its target for; `rejected` rows were of refused drafts."""

    asked: tuple[Asked, ...]
    rows: tuple[Rows, ...]
    rejected: int
    requested: tuple[int, ...] | None


def capture(case: Case, prompts: Sequence[Prompt], max_tokens: int) -> Captured:
    """Ask `prompts` one at a time, end the server, and return what its drafter was handed. Needs `keep_features`.

    Raises:
        ServerError: the server does not start or stay up.
        EvidenceError: the probe failed or saw nothing, an answer does not tell its prompt's tokens, or a prompt's
            features are not all there.

    """
    asked = []
    try:
        endpoint = case.endpoint(speculative=True)
        for prompt in prompts:
            answer = endpoint.generate(prompt, max_tokens)
            ids = prompt.token_ids or answer.prompt_token_ids
            if ids is None:
                raise EvidenceError(
                    f"{case.id}: the answer to prompt {prompt.name} does not tell the prompt's tokens",
                    remedy="use a release that returns them, or a pair whose prompts are token ids",
                )
            asked.append(Asked(prompt.name, tuple(ids), answer.token_ids))
    finally:
        case.release()
    folder = case.folder / "evidence"
    servings = case.seen().servings
    rows, rejected = arrange(features.read(folder / probe.FEATURES), asked, folder)
    return Captured(tuple(asked), rows, rejected, servings[0].requested)


def arrange(handed: Sequence[features.Handed], asked: Sequence[Asked], folder: Path) -> tuple[tuple[Rows, ...], int]:
    """Return the rows of each prompt, in the order of their positions, and how many were left out.

    A proposal that starts at position 0 starts a sequence. A verified step's rows go on to the drafts that were
    refused: from the first token on that is not the sequence's, a row belongs to no sequence and is left out.

    Raises EvidenceError, naming the file or the prompt, where rows of several requests are mixed, a prompt was seen in
    no proposal, or one of its positions is missing.
    """
    import numpy as np  # noqa: PLC0415 -- keeps other commands quick

    sequences: list[list[features.Handed]] = []
    for each in handed:
        if (np.diff(each.positions) != 1).any():
            raise EvidenceError(
                f"{folder / each.file}: positions {each.positions[:8].tolist()} do not follow each other",
                remedy="nothing else may send requests to the server meanwhile",
            )
        if each.positions[0] == 0 or not sequences:
            sequences.append([])
        sequences[-1].append(each)
    found, rejected = [], 0
    for prompt in asked:
        whole = (*prompt.prompt_ids, *prompt.generated)
        count = len(prompt.prompt_ids)
        mine = next((parts for parts in reversed(sequences) if _begins(parts, prompt.prompt_ids)), None)
        if mine is None:
            raise EvidenceError(
                f"{folder}: no proposal was made on the {count} tokens of prompt {prompt.name}",
                remedy="the engine ran the target on other tokens than it says, or the drafter was never called",
            )
        kept: dict[int, NDArray[Any]] = {}
        for part in mine:
            for number, (position, token) in enumerate(zip(part.positions, part.token_ids, strict=True)):
                if position >= len(whole) or whole[position] != token:
                    rejected += len(part.positions) - number
                    break
                kept.setdefault(int(position), part.features[number])
        missing = [position for position in range(count) if position not in kept]
        if missing:
            raise EvidenceError(
                f"{folder}: prompt {prompt.name}: {len(missing)} of {count} positions were handed over in no proposal, "
                f"the first is {missing[0]}",
                remedy="a cached prefix is not computed again: the prefix cache must be off",
            )
        places = sorted(kept)
        rows = np.stack([kept[place] for place in places])
        found.append(Rows(prompt.name, count, whole, np.array(places), rows))
    return tuple(found), rejected


def _begins(parts: Sequence[features.Handed], ids: Sequence[int]) -> bool:
    """Return whether the sequence starts with these tokens, as far as it says."""
    said = {
        int(position): int(token)
        for part in reversed(parts)
        for position, token in zip(part.positions, part.token_ids, strict=True)
    }
    return 0 in said and all(said.get(position, token) == token for position, token in enumerate(ids))

"""One pair under two releases of an engine: what each was seen to do, and their speculative servers, asked in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.gate.case import Case
from harness.measure import acceptance
from harness.measure.acceptance import AcceptanceRun

__all__ = ["Change"]


@dataclasses.dataclass(frozen=True)
class Change:
    """The two cases of a comparison, and what the record has of each so far."""

    old: Case
    new: Case
    old_record: Mapping[str, Any]
    new_record: Mapping[str, Any]

    def __post_init__(self) -> None:
        # Where servers do not run side by side, neither do the two releases.
        self.old.rivals, self.new.rivals = (self.new,), (self.old,)

    def acceptance(self) -> tuple[AcceptanceRun, AcceptanceRun]:
        """Ask both releases the pair's prompts: each prompt of one, then of the other, where they run side by side.

        Raises what `harness.measure.acceptance.measure` raises.
        """
        pair, prompts = self.new.pair, self.new.prompts
        sides = [case.endpoint(speculative=True) for case in (self.old, self.new)]
        parts = [[prompt] for prompt in prompts] if pair.side_by_side else [prompts]
        tokens = pair.workload.max_tokens
        runs = [[acceptance.measure(side, part, tokens, pair.k) for side in sides] for part in parts]
        return _joined([old for old, _ in runs]), _joined([new for _, new in runs])


def _joined(runs: list[AcceptanceRun]) -> AcceptanceRun:
    """Return runs of one endpoint as one. Its witnesses speak of all that it was asked, so the last ones stand."""
    return dataclasses.replace(
        runs[-1],
        prompts=tuple(record for run in runs for record in run.prompts),
        missing=next((run.missing for run in runs if run.missing), ""),
    )

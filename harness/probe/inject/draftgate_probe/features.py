"""Keep the features that reach the drafter, row by row, with the token and the position that each row is of.

Only where the harness asks for it, by DRAFTGATE_PROBE_FEATURES: a copy of each costs time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT = 1
"""Version of the files; docs/evidence.md."""

LIMIT = 256 << 20
"""Bytes of features that one process writes at most. At Kimi-K2.5's 21504 bfloat16 values a row: 6241 rows."""


class FeatureRecorder:
    """Writes one safetensors file per real proposal, whole, then renamed, until `LIMIT`. Raises what goes wrong."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.full = False
        self._folder = folder
        self._left = limit
        self._number = 0
        self._target: tuple[list[int], list[int]] = ([], [])

    @classmethod
    def from_environment(cls) -> FeatureRecorder | None:
        """Return a recorder if the harness asked for the features, else None."""
        folder = os.environ.get("DRAFTGATE_PROBE_FEATURES")
        return cls(Path(folder)) if folder else None

    def target_rows(self, token_ids: Any, positions: Any) -> None:
        """Say which tokens the target is about to run on, and at which positions of the sequence they stand."""
        self._target = (integers(token_ids), integers(positions))

    def tokens_at(self, positions: Any) -> list[int]:
        """Return the tokens that the target's last pass had at these positions.

        Raises LookupError if it had none there, or several: then requests share the step, and no row has an owner.
        """
        tokens, places = self._target
        if len(set(places)) != len(places) or len(tokens) != len(places):
            raise LookupError(f"{len(tokens)} tokens at {len(set(places))} positions: several requests share a step?")
        at = dict(zip(places, tokens, strict=True))
        return [at[place] for place in integers(positions)]

    def take(self, features: Sequence[Any], token_ids: Any, positions: Any) -> None:
        """Write the rows of one proposal: chunks [rows, hidden] or one tensor [rows, n_aux x hidden].

        `token_ids` [rows] are the target's inputs, not the drafter's, which are one token on. An engine may hand over
        more rows than there are tokens, for padding; fewer are an error.
        """
        from safetensors.torch import save_file  # noqa: PLC0415 -- only where features are kept

        if token_ids is None or positions is None:
            raise LookupError("the engine does not say which tokens the rows of the features are of")
        ids, places = integers(token_ids), integers(positions)
        rows = len(ids)
        wide = torch.cat([part.reshape(-1, part.shape[-1])[:rows] for part in features], dim=-1).detach().cpu()
        if len(places) != rows or wide.shape[0] != rows or not rows:
            raise ValueError(f"{wide.shape[0]} rows of features for {rows} tokens at {len(places)} positions")
        size = wide.numel() * wide.element_size()
        self._folder.mkdir(parents=True, exist_ok=True)
        if size > self._left:
            self.full = True
            (self._folder / f"full-{os.getpid()}").touch()
            return
        self._left -= size
        name = f"features-{os.getpid()}-{self._number:06d}.safetensors"
        scratch = self._folder / f".{name}.tmp"
        tensors = {"features": wide.contiguous(), "token_ids": torch.tensor(ids), "positions": torch.tensor(places)}
        save_file(tensors, scratch, metadata={"format": str(FORMAT)})
        scratch.replace(self._folder / name)
        self._number += 1


def integers(values: Any) -> list[int]:
    """Return a tensor of tokens or positions as numbers; of M-RoPE's three rows of positions, the first."""
    if isinstance(values, list):
        return values
    flat = values[0] if values.dim() > 1 else values
    return [int(value) for value in flat.tolist()]

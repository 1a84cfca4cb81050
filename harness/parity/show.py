"""The numbers of a comparison: for the record, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from harness.parity.compare import Between, Measured, Row

__all__ = ["between_numbers", "numbers", "write_table"]


def numbers(measured: Measured) -> dict[str, Any]:
    """Return what the record says: `rows`, each [prompt, position, token, generated], and for each slot its distances.

    `search` is by state of the reference, `error`, `limit` and `cosine` by row, in the order of `rows`.
    """
    return {
        "rows": _rows(measured.rows),
        "slots": [
            {
                "slot": slot.index,
                "expected": slot.judged,
                "nearest": slot.nearest,
                "tolerance": _short(np.median(slot.limit)),
                "reference_rounding": _short(slot.noise[slot.judged]),
                "nearest_other_layer": _short(slot.apart),
                "search": [_short(value) for value in slot.search],
                "error": [_short(value) for value in slot.error],
                "limit": [_short(value) for value in np.atleast_1d(slot.limit)],
                "cosine": [round(float(value), 7) for value in slot.cosine],
            }
            for slot in measured.slots
        ],
    }


def between_numbers(rows: Sequence[Row], slots: Sequence[Between]) -> dict[str, Any]:
    """Return the same for two engines against each other."""
    return {
        "rows": _rows(rows),
        "slots": [
            {
                "slot": slot.index,
                "error": [_short(value) for value in slot.error],
                "cosine": [round(float(value), 7) for value in slot.cosine],
            }
            for slot in slots
        ],
    }


def write_table(title: str, measured: Measured, out: IO[str]) -> None:
    """Write one line a slot: which state of the reference it is, and how far it is from the expected one."""
    decoded = sum(row.decoded for row in measured.rows)
    out.write(f"{title}: {len(measured.rows) - decoded} rows of prompts, {decoded} of generated tokens\n")
    head = ("slot", "expected", "nearest", "median error", "largest", "least cosine", "tolerance", "next layer")
    out.write("  ".join(f"{word:>12}" for word in head) + "\n")
    for slot in measured.slots:
        words = (
            slot.index,
            slot.judged,
            slot.nearest if slot.nearest < measured.layers else measured.label(slot.nearest),
            f"{np.median(slot.error):.3g}",
            f"{slot.error.max():.3g}",
            f"{slot.cosine.min():.6f}",
            f"{np.median(slot.limit):.3g}",
            f"{slot.apart:.3g}",
        )
        out.write("  ".join(f"{word:>12}" for word in words) + "\n")


def _rows(rows: Sequence[Row]) -> list[list[Any]]:
    return [[row.prompt, row.position, row.token_id, row.decoded] for row in rows]


def _short(value: float) -> float:
    return float(f"{float(value):.4g}")

"""Read back the features that the probe kept: what the target handed to the drafter, row by row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import EvidenceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FORMAT", "Handed", "read"]

FORMAT = 1
"""Version of the files that this reader understands."""


@dataclasses.dataclass(frozen=True)
class Handed:
    """What one real proposal was handed: features [rows, n_aux x hidden] in the engine's dtype.

    `token_ids` [rows] are the tokens that the target ran on, `positions` [rows] where they stand in the sequence.
    """

    file: str
    features: NDArray[Any]
    token_ids: NDArray[Any]
    positions: NDArray[Any]


def read(folder: Path) -> tuple[Handed, ...]:
    """Return the proposals whose features one process kept, in their order.

    Raises EvidenceError, naming the file, where nothing was kept, a file is missing or damaged, its arrays do not fit
    each other, several processes wrote (replicas; ranks of one tensor group write once) or the bound on the size was
    reached.
    """
    import ml_dtypes  # noqa: F401, PLC0415 -- registers bfloat16 with numpy
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- imports numpy

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EvidenceError(
            f"{folder}: no features at all: the probe kept none",
            remedy="see the server's log for 'draftgate probe', and the evidence folder for hooks that failed",
        )
    if any(folder.glob("full-*")):
        raise EvidenceError(
            f"{folder}: the bound on the size of what is kept was reached, so the last prompts are not there",
            remedy="ask fewer or shorter prompts (--prompts)",
        )
    numbers = [file.stem.rpartition("-")[2] for file in files]
    processes = {file.stem.rpartition("-")[0] for file in files}
    if len(processes) > 1:
        raise EvidenceError(f"{folder}: {len(processes)} processes kept features", remedy="serve one replica")
    missing = next((number for number, seen in enumerate(numbers) if seen != f"{number:06d}"), None)
    if missing is not None:
        raise EvidenceError(f"{folder}: the features of proposal {missing} are missing, those after it are there")
    found = []
    for file in files:
        try:
            with safe_open(file, framework="np") as handle:
                version = (handle.metadata() or {}).get("format")
                features, ids, positions = (handle.get_tensor(name) for name in ("features", "token_ids", "positions"))
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise EvidenceError(f"{file}: cannot be read: {error}") from error
        if version != str(FORMAT):
            raise EvidenceError(f"{file}: format {version}, this reader knows {FORMAT}")
        if features.ndim != 2 or ids.shape != positions.shape or ids.shape != features.shape[:1] or not ids.size:
            raise EvidenceError(
                f"{file}: features {list(features.shape)} do not fit {list(ids.shape)} tokens and "
                f"{list(positions.shape)} positions"
            )
        found.append(Handed(file.name, features, ids, positions))
    return tuple(found)

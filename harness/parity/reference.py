"""Run the plain forward of the target under an engine's Python, and read its states."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import EvidenceError, UsageError
from harness.files import exclusive
from harness.measure.endpoint import Prompt
from harness.steps import StepError, run_step

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WIDER", "Forward", "Reference", "run"]

WIDER: Mapping[str, str] = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
"""By the pair's dtype: the one in which the reference is run as well, so that its own rounding is known."""

_PROGRAM = Path(__file__).with_name("plain_forward.py")


@dataclasses.dataclass(frozen=True)
class Forward:
    """The target's own states of one sequence, in the pair's dtype and in the wider one.

    Each is [layers + 2, tokens, hidden]: k is the input of layer k, then the output of the last layer, then the final
    normed state.
    """

    own: NDArray[Any]
    wide: NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the plain forward said: states by token ids, prompts as its tokenizer has them, and what made it."""

    forwards: Mapping[tuple[int, ...], Forward]
    tokens: Mapping[str, tuple[int, ...]]
    made_with: Mapping[str, str]


def run(
    python: Path,
    target: Path,
    *,
    sequences: Sequence[tuple[int, ...]],
    prompts: Sequence[Prompt],
    dtype: str,
    device: str,
    folder: Path,
    trust_remote_code: bool = False,
) -> Reference:
    """Return the states of `sequences` and the token ids of the prompts that are conversations.

    Raises:
        UsageError: the dtype has no wider one here.
        EvidenceError: the program failed (its log is in `folder`), or what it left is missing, damaged or not finite.

    """
    if dtype not in WIDER:
        raise UsageError(f"dtype {dtype} cannot be compared", remedy=f"a pair's dtype is one of {', '.join(WIDER)}")
    distinct = list(dict.fromkeys(sequences))
    folder.mkdir(parents=True)
    job = {
        "target": str(target),
        "dtypes": [dtype, WIDER[dtype]],
        "device": device,
        "trust_remote_code": trust_remote_code,
        "conversations": [
            (prompt.name, [{"role": role, "content": content} for role, content in prompt.messages])
            for prompt in prompts
            if prompt.messages is not None
        ],
        "sequences": [(f"{number:04d}", ids) for number, ids in enumerate(distinct)],
        "out": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [str(python), str(_PROGRAM), str(folder / "job.json")]
    with exclusive(folder / ".lock") as held:
        try:
            run_step(command, log=folder / "reference.log", held=held)
        except StepError as error:
            raise EvidenceError(
                f"the plain forward of {target} failed: {error.message}",
                remedy="transformers must know the target, and the machine must hold it in its wider dtype",
            ) from error
    found = read(folder, distinct, dtype)
    for file in folder.glob("*.safetensors"):
        file.unlink()  # the largest files of a run, and made again from job.json at any time
    return found


def read(folder: Path, sequences: Sequence[tuple[int, ...]], dtype: str) -> Reference:
    """Return what the program left for `sequences`. Raises EvidenceError as `run` does."""
    try:
        tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{folder}: the plain forward is not complete: {error}") from error
    forwards = {}
    for number, ids in enumerate(sequences):
        own, wide = (_states(folder / f"{kind}-{number:04d}.safetensors", len(ids)) for kind in (dtype, WIDER[dtype]))
        if own.shape != wide.shape:
            raise EvidenceError(f"{folder}: sequence {number} is {own.shape} in {dtype}, {wide.shape} in the wider")
        forwards[ids] = Forward(own, wide)
    return Reference(forwards, {name: tuple(ids) for name, ids in tokens.items()}, made)


def _states(file: Path, tokens: int) -> NDArray[Any]:
    import ml_dtypes  # noqa: F401, PLC0415 -- registers bfloat16 with numpy
    import numpy as np  # noqa: PLC0415 -- keeps other commands quick
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- imports numpy

    try:
        with safe_open(file, framework="np") as handle:
            states: NDArray[Any] = handle.get_tensor("states")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise EvidenceError(f"{file}: cannot be read: {error}") from error
    if states.ndim != 3 or states.shape[1] != tokens:
        raise EvidenceError(f"{file}: states {list(states.shape)} for {tokens} tokens")
    if not np.isfinite(states.astype(np.float64)).all():
        raise EvidenceError(
            f"{file}: the plain forward has values that are not finite",
            remedy="the target overflows in this dtype without any engine: use another dtype for the pair",
        )
    return states

"""Writing a canary pair to disk, and finding it there again.

::

    FOLDER/target/{config.json, model.safetensors}
    FOLDER/drafter/{config.json, model.safetensors}
    FOLDER/oracle.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.canary.oracle import Oracle, make_oracle
from harness.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.canary.spec import CanarySpec

__all__ = ["Canary", "build", "load", "write_checkpoint"]


@dataclasses.dataclass(frozen=True)
class Canary:
    """A canary pair on disk. `target` and `drafter` are checkpoint folders."""

    folder: Path
    spec: CanarySpec
    oracle: Oracle

    @property
    def target(self) -> Path:
        """The target's checkpoint folder."""
        return self.folder / "target"

    @property
    def drafter(self) -> Path:
        """The drafter's checkpoint folder."""
        return self.folder / "drafter"


def load(folder: Path) -> Canary:
    """Return the canary in a folder. Raises `CheckpointError` when there is none."""
    oracle = Oracle.load(folder / "oracle.json")
    return Canary(folder, oracle.spec, oracle)


def build(spec: CanarySpec, folder: Path) -> Canary:
    """Write the pair, or return it unchanged when the folder already holds it.

    The pair is written to a temporary sibling and moved into place when complete. Raises `UsageError` when the folder
    holds anything else, and when the spec's `hidden` is too narrow. Peak memory is about the larger checkpoint's size.
    """
    if folder.exists():
        _require_same(spec, folder)
        return load(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(spec, made)
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:  # another process was faster; what it made must be the same
            _require_same(spec, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return load(folder)


def _require_same(spec: CanarySpec, folder: Path) -> None:
    """Raise `UsageError` unless the folder holds a canary of this very spec and builder."""
    try:
        found = json.loads((folder / "oracle.json").read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found != spec.fingerprint:
        what = "a canary of another spec or builder" if found else "something that is not a canary"
        raise UsageError(f"{folder} holds {what}; it is left alone", remedy="remove it, or name another folder")


def _write(spec: CanarySpec, folder: Path) -> None:
    """Write target, drafter and oracle, in that order."""
    from harness.canary import dialects, drafter, target  # noqa: PLC0415 -- numpy, only when building

    oracle = make_oracle(spec)
    write_checkpoint(
        folder / "target",
        dialects.target_config(spec, target.target_intermediate(spec)),
        target.target_tensors(spec, oracle),
    )
    tensors = {
        name: tensor
        for original, tensor in drafter.drafter_tensors(spec, oracle).items()
        if (name := dialects.rename(original, spec.dialect)) is not None
    }
    draft_vocab = len(tensors["lm_head.weight"])
    config = dialects.drafter_config(spec, drafter.drafter_intermediate(spec), draft_vocab)
    write_checkpoint(folder / "drafter", config, tensors)
    (folder / "oracle.json").write_text(json.dumps(oracle.as_json(), indent=1))


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> None:
    """Write `config.json` and `model.safetensors` into a new folder."""
    from safetensors.numpy import save_file  # noqa: PLC0415 -- numpy, only when building

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    file = folder / "model.safetensors"
    save_file(tensors, os.fspath(file), metadata={"format": "pt"})

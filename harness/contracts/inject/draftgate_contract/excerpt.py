"""Run one statement or function of a release's source, where the whole around it wants a GPU, a server or a model."""

from __future__ import annotations

import ast
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IDS = "eagle_aux_hidden_state_layer_ids"
"""The config key of the layer ids, in every release that has one."""


def spelling(node: ast.AST, word: str) -> bool:
    """Say whether a string of this value stands in a piece of source."""
    return any(isinstance(part, ast.Constant) and part.value == word for part in ast.walk(node))


def nodes(folder: Path, kind: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    """Yield every statement of a kind under a folder, with its file."""
    for file in sorted(folder.rglob("*.py")):
        source = file.read_bytes()
        if IDS.encode() in source:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, kind):
                    yield file, node


def run(node: Any, file: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Run a statement with these names, and return the names afterwards."""
    # Annotations name types that are not there.
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node.returns = None
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module([node], []), str(file), "exec"), names)  # noqa: S102 -- the release's own source
    return names


def of_attributes(**values: Any) -> Any:
    """Return an object with these attributes."""
    return types.SimpleNamespace(**values)

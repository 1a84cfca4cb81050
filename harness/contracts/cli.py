"""The command `draftgate contract`: derive a release's contract by running it, and list those that ship."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness.files import write_atomically

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the command and its own commands."""
    contract = commands.add_parser("contract", help="what an engine release does with a drafter's names and config")
    inner = contract.add_subparsers(dest="contract_command", required=True, metavar="COMMAND")
    derive = inner.add_parser(
        "derive", help="run a release's own model class and load_weights on synthetic drafters, and print its contract"
    )
    derive.add_argument("release", metavar="RELEASE", help="sglang==VERSION or vllm==VERSION, or a wheel's path")
    derive.add_argument("--output", type=Path, metavar="FILE", help="write the contract there instead of printing it")
    derive.add_argument(
        "--engines-root", type=Path, default=Path(".tox/engines"), metavar="DIR",
        help="where `draftgate env` keeps environments; the shared one is made there",
    )  # fmt: skip
    derive.add_argument(
        "--root", type=Path, metavar="DIR",
        help="where releases and derived contracts are kept (default: the user's cache)",
    )  # fmt: skip
    inner.add_parser("list", help="list the releases whose contracts ship")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from harness.contracts import environment, model  # noqa: PLC0415 -- keeps other commands quick

    if arguments.contract_command == "list":
        for engine in environment.ENGINES:
            for version in model.versions(engine):
                print(f"{engine}=={version}")
        return 0
    from harness.contracts.derive import derive  # noqa: PLC0415 -- as above

    contract = derive(
        arguments.release,
        engines_root=arguments.engines_root,
        root=arguments.root or environment.default_root(),
        progress=lambda text: print(f"draftgate: {text}", file=sys.stderr),
    )
    if arguments.output is None:
        print(model.render(contract), end="")
    else:
        write_atomically(arguments.output, model.render(contract))
    return 0

"""The commands `draftgate contract` and `draftgate check`: what a release does with names, and with one drafter."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.files import write_atomically

__all__ = ["add_parsers", "run_check", "run_contract"]


_EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "INVALID": 3}


def add_parsers(commands: Any) -> None:
    """Add both commands to argparse's subparsers."""
    check = commands.add_parser(
        "check",
        help="say what engine releases will do with a drafter, without starting one",
        description="Reads headers and configs, and the contract of each release: what its own loader was seen to do "
        "with names. Exit status: 0 all releases pass, 1 one fails, 2 bad input, 3 something is not known.",
    )
    check.add_argument("drafter", metavar="PATH", help="the drafter's checkpoint, as `draftgate inspect` takes it")
    check.add_argument("--target", metavar="PATH", help="the target's checkpoint: widths, vocabularies and layers")
    check.add_argument(
        "--engine", action="append", default=[], metavar="RELEASE", help="sglang==V or vllm==V; may be given again"
    )
    check.add_argument(
        "--contract", action="append", default=[], type=Path, metavar="FILE",
        help="a contract that `draftgate contract derive` wrote; may be given again",
    )  # fmt: skip
    check.add_argument("--format", choices=("text", "json", "sarif", "github"), default="text")
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


def run_check(arguments: argparse.Namespace) -> int:
    """Run `draftgate check`. Raises UsageError for input that means nothing."""
    from harness.checkpoint.read import read  # noqa: PLC0415 -- keeps other commands quick
    from harness.contracts import check, model, show  # noqa: PLC0415 -- as above
    from harness.contracts.environment import engine_release  # noqa: PLC0415 -- as above
    from harness.verdict import worst  # noqa: PLC0415 -- as above

    if not arguments.engine and not arguments.contract:
        raise UsageError(
            "no release is named", remedy="give --engine sglang==V or --engine vllm==V, or --contract FILE"
        )
    drafter = read(arguments.drafter)
    target = read(arguments.target) if arguments.target else None
    contracts = {contract.release: contract for contract in map(model.load, arguments.contract)}
    wanted = [*(release for release in contracts)]
    for text in arguments.engine:
        engine, release = engine_release(text)
        wanted.append(f"{engine}=={release.version}")
    asked = {name: contracts.get(name) or model.shipped(*name.split("==", 1)) for name in wanted}
    other = check.other_embedding(drafter, target, asked.values())
    reports = [
        check.check(drafter, target, contract, other_embedding=other)
        if contract
        else check.unknown_release(name, model.versions(name.partition("==")[0]))
        for name, contract in asked.items()
    ]
    print(show.render(reports, str(arguments.drafter), arguments.format), end="")
    return _EXIT[worst([report.verdict for report in reports])]


def run_contract(arguments: argparse.Namespace) -> int:
    """Run `draftgate contract`. Raises UsageError, EnvironmentFault or derive.Unknown."""
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

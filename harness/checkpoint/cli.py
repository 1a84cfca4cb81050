"""The command `draftgate inspect`: what a checkpoint is, from its headers."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from harness.errors import UsageError

__all__ = ["add_parser", "run"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def add_parser(subparsers: Any) -> None:
    """Add `inspect` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "inspect",
        help="say what a checkpoint holds: tensors, config, method, dialect, vocabulary mapping",
        description="Reads headers and config.json, and of the data d2t and t2d. Exit status: 0, 1 with a finding of "
        "severity error, 2 if the checkpoint cannot be read.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="PATH",
        help=".safetensors file, its index, a folder, a folder of a Hugging Face cache, or ORG/NAME that the cache has",
    )
    parser.add_argument("--json", action="store_true", help="the document that docs/inspect.md describes")
    parser.add_argument("--all", action="store_true", help="one line per tensor, however many there are")
    parser.add_argument(
        "--stats", action="store_true", help="read all data: NaN, infinities, all-zero tensors, constant rows"
    )
    chosen = parser.add_argument_group("which tensors are listed, and read by --stats")
    chosen.add_argument("--key", action="append", default=[], metavar="GLOB", help="by name; may be given again")
    chosen.add_argument("--dtype", action="append", default=[], help="by dtype, such as BF16; may be given again")
    chosen.add_argument("--min-size", default="0", metavar="BYTES", help="at least so large, such as 4096, 10MB, 1GiB")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed `inspect` command and return the exit status. Raises `UsageError`."""
    from harness.checkpoint import show  # noqa: PLC0415 -- keeps other commands quick
    from harness.checkpoint.header import BITS  # noqa: PLC0415
    from harness.checkpoint.inspection import Filter, inspect  # noqa: PLC0415

    dtypes = tuple(name.upper() for name in arguments.dtype)
    if unknown := [name for name in dtypes if name not in BITS]:
        raise UsageError(f"--dtype: no dtype {unknown[0]!r}", remedy=f"choose from {', '.join(BITS)}")
    only = Filter(tuple(arguments.key), dtypes, _bytes(arguments.min_size))
    found = inspect(arguments.checkpoint, stats=arguments.stats, only=only)
    if arguments.json:
        show.write_json(found, sys.stdout.buffer)
    else:
        show.write_table(found, sys.stdout, every_tensor=arguments.all)
    return int(found.failed)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18})\s*([KMG]I?|)B?", text.upper())
    if match is None:
        raise UsageError(f"--min-size: {text!r} is no size", remedy="give bytes, such as 4096, 10MB or 1GiB")
    return int(match[1]) * _UNITS[match[2]]

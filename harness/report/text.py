"""Text and numbers from outside, made fit to be shown: nothing hidden, nothing that acts on a terminal or a reader."""

from __future__ import annotations

import math
import re
from typing import Any

from harness.checkpoint.show import printable

__all__ = ["number", "one_line", "percent", "terminal", "visible"]

MOST = 4_000
"""Characters of one text that are shown; the record has all of them."""

# ECMA-48: control sequences (CSI), then strings (OSC, DCS, SOS, PM, APC) with their terminator, then short escapes.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)

# What a GitHub runner takes for an order: `::` at a line's beginning, and `##[` anywhere in it, before a known name
# (actions/runner, src/Runner.Common/ActionCommand.cs, TryParseV2 and TryParse).
_ORDERS = re.compile(r"(?<=^:)(?=:)|(?<=##)(?=\[)")


def visible(text: str) -> str:
    r"""Return `text` without terminal sequences, with every other hidden character written out as `\u202e` or `\x00`.

    Lines stay lines; what is longer than MOST is cut, and says so.
    """
    rest = len(text) - MOST
    lines = _ESCAPES.sub("", text[:MOST]).replace("\r\n", "\n").replace("\t", "    ").split("\n")
    shown = "\n".join(map(printable, lines))
    return f"{shown} ... ({rest} more characters in record.json)" if rest > 0 else shown


def one_line(text: str, most: int = MOST) -> str:
    """Return `visible(text)` with every run of white space as one space, cut to `most` characters."""
    line = " ".join(visible(text).split())
    return f"{line[:most]} ..." if len(line) > most + 4 else line


def terminal(text: str) -> str:
    """Return `visible(text)` as one line to print, its spaces kept; a space is put into what a CI runner would obey."""
    line = visible(text).replace("\n", " ")
    bare = line.lstrip(" ")
    return line[: len(line) - len(bare)] + _ORDERS.sub(" ", bare)


def number(value: Any, digits: int = 4) -> str:
    """Return a number for people; what is none is said in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "none" if value is None else one_line(str(value))
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    return f"{value:.{digits}g}"


def percent(share: Any) -> str:
    """Return a share as per cent."""
    finite = isinstance(share, (int, float)) and math.isfinite(share)
    return f"{100 * share:.1f} %" if finite else number(share)

"""What an engine shows to dashboards and launch scripts: metrics with their types, keys of answers, flags."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.errors import EvidenceError
from harness.measure.endpoint import Said

__all__ = [
    "WARM_UP_TOKENS",
    "Metric",
    "Surface",
    "about_acceptance",
    "declared_flags",
    "metrics_of",
    "said_in",
]

WARM_UP_TOKENS = 64
"""Output tokens to ask for before looking: more than ten verify steps, for what is updated every few of them."""

_OF_A_KIND = {"le", "quantile"}
"""Labels that a histogram and a summary always have."""

_BOOKKEEPING = "_created"
"""What the Python exporter adds to each counter and histogram as a gauge of its own: when it was made."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric: its type as the page declares it, its label names, its help text."""

    type: str
    labels: tuple[str, ...]
    help: str


@dataclasses.dataclass(frozen=True)
class Surface:
    """The metrics by the name that a query uses, and other names by where they stand ("flags", "meta_info")."""

    metrics: Mapping[str, Metric]
    names: Mapping[str, tuple[str, ...]]


def metrics_of(page: str) -> dict[str, Metric]:
    """Return the metrics on a page in Prometheus' text format; a histogram counts once, without its suffixes.

    Raises EvidenceError if it is no such page.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 -- 60 ms at import

    found = {}
    try:
        for family in text_string_to_metric_families(page):
            labels = {name for sample in family.samples for name in sample.labels} - _OF_A_KIND
            if family.name.endswith(_BOOKKEEPING):
                continue
            # The parser takes the suffix from a counter's name; whoever queries it writes it.
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = Metric(family.type, tuple(sorted(labels)), family.documentation)
    except ValueError as error:
        raise EvidenceError(f"/metrics is not in Prometheus' text format: {error}") from error
    return found


def about_acceptance(name: str) -> bool:
    """Whether a figure of this name is about acceptance, and not a setting or a speed."""
    return bool(re.search(r"spec|accept|draft", name, re.IGNORECASE)) and not re.search(
        r"speculative_|throughput|special|specif", name, re.IGNORECASE
    )


def said_in(text: str) -> dict[str, Said]:
    """Return the figures about acceptance in a line such as "Name: 3.05, Other name: 68.2%, Third: 0.9, 0.8"."""
    said: dict[str, Said] = {}
    for name, numbers in re.findall(r"([#\w][#\w ()/-]*): *((?:-?\d+(?:\.\d+)?%?(?:, *|(?![\w.])))+)", text):
        values = [_number(number) for number in re.findall(r"[^\s,]+", numbers)]
        if about_acceptance(name):
            many = "position" in name.lower() or len(values) > 1
            value = tuple(each for each, _ in values) if many else values[0][0]
            said[f"log {name.strip()}"] = Said(value, max(tolerance for _, tolerance in values))
    return said


def _number(text: str) -> tuple[float, float]:
    """Return a printed number, and half a unit of its last place."""
    unit = 100.0 if text.endswith("%") else 1.0
    digits = text.rstrip("%")
    places = len(digits.partition(".")[2])
    return float(digits) / unit, 0.5 * 10.0**-places / unit


def declared_flags(files: Iterable[Path]) -> tuple[str, ...]:
    """Return the flags that parsers in these source files declare, read and not run.

    That is the names given to `add_argument`, and a flag for each field of a class named `...FrontendArgs` (vLLM makes
    flags of them: entrypoints/openai/cli_args.py, 0.28.0, entrypoints/launchers/cli_args.py, 0.32.0). Raises
    EvidenceError if a file cannot be read, or there is no flag.
    """
    flags: set[str] = set()
    for file in files:
        try:
            flags.update(_flags(ast.parse(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, SyntaxError) as error:
            raise EvidenceError(f"{file}: the launch flags cannot be read: {error}") from error
    if not flags:
        raise EvidenceError("no source file declares a launch flag", remedy="extend harness/engines for this release")
    return tuple(sorted(flags))


def _flags(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from (
                each.value
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.startswith("--")
            )
        elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            yield from (
                f"--{each.target.id.replace('_', '-')}"
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            )

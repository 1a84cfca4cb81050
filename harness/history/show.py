"""Trends for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

from harness.checkpoint.show import printable
from harness.history.store import Concluded
from harness.history.trend import MIN_RUNS, Series, Step
from harness.verdict import Verdict

__all__ = ["sparkline", "step_text", "write_json", "write_text"]

Verdicts = Mapping[tuple[str, str, str, str, str], Sequence[Concluded]]

_BARS = "▁▂▃▄▅▆▇█"
_MARKS: dict[str, str] = {Verdict.PASS: "✓", Verdict.FAIL: "✗", Verdict.INCONCLUSIVE: "?", Verdict.INVALID: "!"}
_LATEST = 24
"""Runs that a row of the table has room for."""

_DIGITS = 4


def sparkline(values: Sequence[float]) -> str:
    """Return one bar for each value, from the lowest to the highest; bars of one height where all are equal."""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def step_text(series: Series, step: Step) -> str:
    """Return a step in one line: what changed, how far, with which version, first seen when, what else is new."""
    moved = "fell" if step.after < step.before else "rose"
    engine = f"{series.engine} {step.version}"
    where = f"within {engine}, whose version is the same before and after" if step.within else f"with {engine}"
    also = f"; also new there: {', '.join(step.changed)}" if step.changed else ""
    return (
        f"{series.metric} {moved} from {step.before:.{_DIGITS}g} to {step.after:.{_DIGITS}g} {where}, "
        f"first seen {step.started} ({step.run}){also}"
    )


def write_text(verdicts: Verdicts, series: Sequence[Series], file: IO[str]) -> None:
    """Print the verdicts, the figures, then every step in words."""
    from rich.console import Console  # noqa: PLC0415 -- 60 ms at import
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(file=file, highlight=False, soft_wrap=True, width=None if file.isatty() else 160)

    def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        made = Table(*columns)
        for row in rows:
            made.add_row(*(Text(printable(cell)) for cell in row))
        console.print(made)

    if verdicts:
        table(("pair", "engine", "runner", "device", "suite", "runs", "verdicts", "last"), [
            (*subject, str(len(runs)), _marks(runs), _last(runs[-1])) for subject, runs in verdicts.items()
        ])  # fmt: skip
        console.print(Text(", ".join(f"{mark} {verdict}" for verdict, mark in _MARKS.items())))
    if series:
        table(("pair", "engine", "runner", "device", "figure", "runs", "trend", "lowest", "highest", "last"), [
            (
                each.pair, each.engine, each.runner, each.device, each.metric, str(len(each.points)),
                sparkline(values[-_LATEST:]), f"{min(values):.{_DIGITS}g}", f"{max(values):.{_DIGITS}g}",
                f"{_value(each)} at {each.points[-1].version}",
            )
            for each in series
            for values in [[point.value for point in each.points]]
        ])  # fmt: skip
    for line in _steps(series):
        console.print(Text(printable(line)))


def _marks(runs: Sequence[Concluded]) -> str:
    return "".join(_MARKS.get(run.verdict, "!") for run in runs[-_LATEST:])


def _last(run: Concluded) -> str:
    return f"{run.verdict} at {run.version} {run.red}".rstrip()


def _value(series: Series) -> str:
    last = series.points[-1]
    interval = "" if last.lower is None or last.upper is None else f" ({last.lower:.3g} to {last.upper:.3g})"
    return f"{last.value:.{_DIGITS}g}{interval}"


def _steps(series: Sequence[Series]) -> list[str]:
    lines = [
        f"{each.pair} / {each.engine} / {each.runner} / {each.device}: {step_text(each, step)}"
        for each in series for step in each.steps()
    ]  # fmt: skip
    short = sum(len(each.points) < MIN_RUNS for each in series)
    if not lines and short < len(series):
        lines.append("no step")
    if short:
        lines.append(f"{short} of {len(series)} figures have fewer than {MIN_RUNS} runs: no step is looked for in them")
    return lines


def write_json(runs: int, verdicts: Verdicts, series: Sequence[Series], file: IO[str]) -> None:
    """Print the document that docs/history.md describes."""
    document = {
        "schema": 1,
        "runs": runs,
        "verdicts": [
            {
                **dict(zip(("pair", "engine", "runner", "device", "suite"), subject, strict=True)),
                "runs": [
                    {
                        "run": run.run,
                        "version": run.version,
                        "started": run.started,
                        "verdict": run.verdict,
                        "red": run.red.split(),
                    }
                    for run in concluded
                ],
            }
            for subject, concluded in verdicts.items()
        ],
        "figures": [_document(each) for each in series],
    }
    file.write(json.dumps(document, indent=1) + "\n")


def _document(series: Series) -> dict[str, Any]:
    return {
        "pair": series.pair, "engine": series.engine, "runner": series.runner, "device": series.device,
        "suite": series.suite, "metric": series.metric, "looked_for_steps": len(series.points) >= MIN_RUNS,
        "points": [
            {
                "run": point.run, "version": point.version, "started": point.started, "value": point.value,
                "lower": point.lower, "upper": point.upper, "verdict": point.verdict,
            }
            for point in series.points
        ],
        "steps": [
            {
                "before": step.before, "after": step.after, "version": step.version, "run": step.run,
                "started": step.started, "within_version": step.within, "also_changed": list(step.changed),
                "text": step_text(series, step),
            }
            for step in series.steps()
        ],
    }  # fmt: skip

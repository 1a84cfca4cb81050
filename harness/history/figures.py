"""A report's figures over time: what the history has of the pairs, checkpoints and engines of one record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.history import store, trend
from harness.report.plots import Trend, TrendPoint

__all__ = ["trends"]

_DRAWN = {"accept_length": ("Accept length", "tokens per verify step"), "speed_up": ("Speed-up", "with over without")}
"""Figures that a report draws: what they are called, and in which unit; of a speed-up, each concurrency."""


def trends(run: Path, record: Mapping[str, Any]) -> tuple[Trend, ...]:
    """Return the figures over the runs beside `run` of what `record` measured, in the order of versions, then time.

    None where there is no history file, or one run alone. Raises HistoryError where the file cannot be read.
    """
    path = run.parent / store.FILE_NAME
    return tuple(_trends(path, record)) if path.is_file() else ()


def _trends(path: Path, record: Mapping[str, Any]) -> Iterator[Trend]:
    asked = {_subject(case): (case.get("pair") or {}).get("expect") or {} for case in record["cases"]}
    for each in trend.series(point for point in store.measured(path) if _of(point) in asked):
        metric, _, load = each.metric.partition(".")
        if metric not in _DRAWN or len(each.points) < 2:
            continue
        name, unit = _DRAWN[metric]
        at = f" at concurrency {load}" if load else ""
        yield Trend(
            f"{name}{at} of {each.pair} on {each.engine} ({each.runner})",
            unit,
            tuple(
                TrendPoint(point.started, point.version, point.value, point.lower, point.upper) for point in each.points
            ),
            _threshold(asked[_of(each.points[-1])], metric, load),
        )


def _of(point: store.Measured) -> tuple[Any, ...]:
    """Return the same as `_subject` for what the history has."""
    return (
        point.pair, point.engine, point.runner, point.device, point.k, point.target, point.drafter, point.prompts,
    )  # fmt: skip


def _subject(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what must be the same for figures to be of one kind: all but the engine's version, and the machine."""
    pair, engine = case.get("pair") or {}, case.get("engine") or {}
    digests = ((case.get(role) or {}).get("digest", "") for role in ("target", "drafter", "prompts"))
    return (
        pair.get("name"), engine.get("engine"), case.get("runner_asked", ""), case.get("device", ""), pair.get("k"),
        *digests,
    )  # fmt: skip


def _threshold(expected: Mapping[str, Any], metric: str, load: str) -> float | None:
    least = expected.get("accept_length") if metric == "accept_length" else _ratios(expected).get(load)
    return None if least is None else float(least)


def _ratios(expected: Mapping[str, Any]) -> Mapping[str, Any]:
    return expected.get("throughput_ratio") or {}

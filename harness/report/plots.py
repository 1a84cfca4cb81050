"""The figures of a report as geometry: what to draw where, and the same in words and in a table.

Nothing here writes SVG; templates/plots.svg.j2 does. Coordinates are in units of the figure's own width (WIDTH).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from harness.report.text import number, one_line, percent
from harness.verdict import some

__all__ = [
    "WIDTH",
    "Bar",
    "Bars",
    "Chart",
    "Dot",
    "Mark",
    "Segment",
    "Table",
    "Tensor",
    "TensorMap",
    "Trend",
    "TrendPoint",
    "acceptance",
    "coverage",
    "startup",
    "throughput",
    "trend",
]

WIDTH = 360
"""As wide as a phone, so that letters keep their size there."""

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 220, 46, 12, 24, 38

ALPHA = 0.05
"""One-sided, each bound: what is drawn is a 90 % interval."""

MOST_TENSORS = 400
"""Squares of one map; those that did not land come first, and a note says what is left out."""

MOST_SERVERS = 12
"""Servers of one case that are shown."""

_MOST_RUNS = 400
"""Runs of a figure over time that are drawn: the last."""

_MOST_STEPS = 64
"""Phases of a server, and draft positions: of more, nothing could be read."""

_MOST_PROMPTS = 2_000
"""Prompts; the bootstrap takes 80 kB for each."""

_SOURCES = 4
"""Names of where a tensor went or came from."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The same as the figure, to be read."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Dot:
    """One value: where it is, its interval, and the level it is held against (None = there is none)."""

    x: float
    y: float | None
    low: float | None
    high: float | None
    level: float | None
    label: str
    title: str


@dataclasses.dataclass(frozen=True)
class Mark:
    """A word at a place: a tick of an axis, or an engine version's first run."""

    at: float
    label: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """Values with intervals over places, from `plot_left` to `plot_right` and `plot_bottom` up to `plot_top`."""

    kind: ClassVar[str] = "chart"

    title: str
    description: str
    table: Table
    dots: tuple[Dot, ...]
    ticks: tuple[Mark, ...]
    x_label: str
    y_label: str
    value_name: str
    level_name: str = ""
    base: float | None = None
    base_name: str = ""
    versions: tuple[Mark, ...] = ()
    line: str = ""
    note: str = ""
    half: float = 16
    width: int = WIDTH
    height: int = _HEIGHT
    plot_left: int = _LEFT
    plot_right: int = WIDTH - _RIGHT
    plot_top: int = _TOP
    plot_bottom: int = _HEIGHT - _BOTTOM


@dataclasses.dataclass(frozen=True)
class Segment:
    """One phase of a start-up. `kind` numbers the phase, the same in every bar."""

    x: float
    width: float
    kind: int
    label: str
    title: str


@dataclasses.dataclass(frozen=True)
class Bar:
    """One server. `y` is the top of its bar."""

    label: str
    y: float
    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True)
class Bars:
    """Phases of several servers over time."""

    kind: ClassVar[str] = "bars"

    title: str
    description: str
    table: Table
    bars: tuple[Bar, ...]
    ticks: tuple[Mark, ...]
    height: float
    bar_height: float = 22
    width: int = WIDTH
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One square. `state` is landed, exempt, unused, unsure or unjudged."""

    x: float
    y: float
    state: str
    title: str


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """The drafter's tensors: keys of its checkpoint, or tensors of the engine's model."""

    kind: ClassVar[str] = "map"

    title: str
    description: str
    table: Table
    tensors: tuple[Tensor, ...]
    counts: tuple[tuple[str, str, int], ...]
    height: float
    size: float
    width: int = WIDTH
    note: str = ""


@dataclasses.dataclass(frozen=True)
class TrendPoint:
    """One run: when, in which engine version, the value and its interval (None = there is none)."""

    when: str
    version: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Trend:
    """A figure over runs, in the order to draw, such as the accept length of one pair on one engine."""

    title: str
    unit: str
    points: tuple[TrendPoint, ...]
    threshold: float | None = None


@dataclasses.dataclass(frozen=True)
class _Value:
    """What becomes a Dot once there is a scale."""

    label: str
    value: float
    low: float | None
    high: float | None
    level: float | None
    title: str


def acceptance(measurements: Mapping[str, Any], pair: Mapping[str, Any]) -> Chart | None:
    """Draw the share of verify steps that accepted each draft position, with the oracle's share for a canary.

    The interval is the studentised bootstrap over prompts by which an accept length is judged. None if no step ran.
    """
    from harness.measure.acceptance import MIN_PROMPTS, SEED  # noqa: PLC0415 -- imports numpy
    from harness.measure.statistics import ratio_bounds  # noqa: PLC0415 -- imports numpy

    prompts = [each for each in measurements.get("prompts") or () if each["drafts"] > 0]
    oracle = list((measurements.get("oracle") or {}).values())
    if not prompts:
        return None
    drafts = [each["drafts"] for each in prompts]
    truth_steps = sum(each["drafts"] for each in oracle)
    values, rows = [], []
    positions = max(len(each["per_position"]) for each in prompts)
    if positions > _MOST_STEPS or len(prompts) > _MOST_PROMPTS:
        raise ValueError(f"{positions} draft positions of {len(prompts)} prompts are too many")
    for position in range(positions):
        accepted = [each["per_position"][position] for each in prompts]
        share, low, high = sum(accepted) / sum(drafts), None, None
        if len(prompts) > 1:
            bounds = ratio_bounds(accepted, drafts, alpha=ALPHA, seed=SEED)
            low, high = (min(max(bound, 0.0), 1.0) for bound in (bounds.lower, bounds.upper))
        level = sum(each["per_position"][position] for each in oracle) / truth_steps if truth_steps else None
        interval = "none" if low is None else f"{percent(low)} to {percent(high)}"
        said = "" if level is None else f"; oracle {percent(level)}"
        values.append(_Value(str(position), share, low, high, level, f"position {position}: {percent(share)}{said}"))
        row = [str(position), f"{sum(accepted)} of {sum(drafts)}", percent(share), interval]
        rows.append((*row, *(() if level is None else (percent(level),))))
    few = f" Fewer than {MIN_PROMPTS} prompts: such intervals err more often." if len(prompts) < MIN_PROMPTS else ""
    return _chart(
        values,
        0.0,
        1.0,
        [(share / 4, f"{25 * share} %") for share in range(5)],
        title="Acceptance per draft position",
        description=f"Share of {sum(drafts)} verify steps, over {len(prompts)} prompts, that accepted each position. "
        + "; ".join(value.title for value in values)
        + ".",
        table=Table(
            ("position", "accepted", "share", "90 % interval", *(("oracle",) if truth_steps else ())), tuple(rows)
        ),
        x_label=f"draft position (K = {number(measurements.get('k', pair.get('k')))})",
        y_label="of verify steps",
        value_name="measured, 90 % interval over prompts",
        level_name="oracle" if truth_steps else "",
        note=few.strip(),
    )


def throughput(measurements: Mapping[str, Any], pair: Mapping[str, Any]) -> Chart | None:
    """Draw the speed-up at each concurrency with its interval and the pair's threshold; None if no two rounds ran."""
    from harness.measure.statistics import mean_bounds  # noqa: PLC0415 -- imports numpy

    thresholds = {int(load): float(least) for load, least in _thresholds(pair).items()}
    sides: dict[int, dict[int, dict[bool, float]]] = {}
    for each in measurements.get("rounds") or ():
        if each["pair"] is not None:
            speed = sum(request["tokens"] for request in each["requests"]) / each["seconds"]
            sides.setdefault(each["concurrency"], {}).setdefault(each["pair"], {})[each["speculative"]] = speed
    values, rows = [], []
    for load, pairs in sorted(sides.items()):
        both = [each for each in pairs.values() if len(each) == 2 and min(each.values()) > 0]
        if not both:
            continue
        logs = [math.log(each[True] / each[False]) for each in both]
        ratio, low, high = math.exp(sum(logs) / len(logs)), None, None
        if len(logs) > 1:
            bounds = mean_bounds(logs, ALPHA)
            low, high = math.exp(bounds.lower), math.exp(bounds.upper)
        level = thresholds.get(load)
        said = "" if level is None else f", at least {number(level)}x asked"
        values.append(_Value(str(load), ratio, low, high, level, f"concurrency {load}: {number(ratio)}x{said}"))
        interval = "none" if low is None else f"{number(low)} to {number(high)}"
        fast, slow = (math.exp(sum(math.log(each[side]) for each in both) / len(both)) for side in (True, False))
        asked = "none" if level is None else f"{number(level)}x"
        rows.append((str(load), f"{number(ratio)}x", interval, asked, number(fast), number(slow), str(len(both))))
    if not values:
        return None
    top = max(part for value in values for part in (value.value, value.high, value.level, 1.0) if part is not None)
    scale = _nice(0.0, top)
    return _chart(
        values,
        0.0,
        scale[-1],
        [(tick, f"{number(tick)}x") for tick in scale],
        title="Speed-up by speculation",
        description="Output tokens per second with speculation over without, per concurrency. "
        + "; ".join(value.title for value in values)
        + ".",
        table=Table(
            ("concurrency", "speed-up", "90 % interval", "threshold", "tokens/s with", "tokens/s without", "pairs"),
            tuple(rows),
        ),
        x_label="concurrency",
        y_label="with over without",
        value_name="speed-up, 90 % interval over pairs of rounds",
        level_name="threshold" if any(value.level is not None for value in values) else "",
        base=1.0,
        base_name="1x: speculation costs what it gives",
    )


def _thresholds(pair: Mapping[str, Any]) -> Mapping[str, Any]:
    return (pair.get("expect") or {}).get("throughput_ratio") or {}


def trend(history: Trend) -> Chart | None:
    """Draw a figure over runs, with a line where the engine's version changes; None without a finite value."""
    left_out = max(0, len(history.points) - _MOST_RUNS)
    points = [point for point in history.points[left_out:] if math.isfinite(point.value)]
    if not points:
        return None
    parts = [
        part for point in points for part in (point.value, _finite(point.low), _finite(point.high)) if part is not None
    ]
    parts += [] if history.threshold is None else [history.threshold]
    scale = _nice(min(parts), max(parts))
    values = [
        _Value(
            one_line(point.when),
            point.value,
            _finite(point.low),
            _finite(point.high),
            None,
            one_line(f"{point.when}, {point.version}: {number(point.value)} {history.unit}").strip(),
        )
        for point in points
    ]
    unit = f" {history.unit}" if history.unit else ""
    rows = tuple(
        (
            point.when,
            point.version,
            number(point.value),
            "none" if point.low is None or point.high is None else f"{number(point.low)} to {number(point.high)}",
        )
        for point in history.points[left_out:]
    )
    first, last = points[0], points[-1]
    chart = _chart(
        values,
        scale[0],
        scale[-1],
        [(tick, number(tick)) for tick in scale],
        title=history.title + (f", {history.unit}" if history.unit else ""),
        description=one_line(
            f"{len(points)} runs, from {number(first.value)}{unit} ({first.version}, {first.when}) to "
            f"{number(last.value)}{unit} ({last.version}, {last.when})."
        ),
        table=Table(("run", "engine version", history.title, "interval"), rows),
        x_label=f"{len(points)} runs",
        y_label="",
        value_name="run, with its interval",
        base=history.threshold,
        base_name="" if history.threshold is None else f"threshold {number(history.threshold)}",
    )
    dots = tuple(dataclasses.replace(dot, label="") for dot in chart.dots)
    changes, room = [], -math.inf
    for before, point, dot in zip([None, *points], points, dots, strict=False):
        if before is None or before.version != point.version:
            # Where versions follow each other too closely for their names, the lines stay and the table has the names.
            fits = dot.x - room > 56 and dot.x < chart.plot_right - 40
            changes.append(Mark(dot.x, one_line(point.version)[:14] if fits else ""))
            room = dot.x if fits else room
    path = " ".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in dots if dot.y is not None)
    note = f"{left_out} runs before these are in the history." if left_out else ""
    return dataclasses.replace(chart, dots=dots, versions=tuple(changes), line=path, half=4, note=note)


def startup(measurements: Mapping[str, Any]) -> Bars | None:
    """Draw what each server did until it was ready; None if there was no server."""
    servers: Mapping[str, Any] = measurements.get("servers") or {}
    timelines = {
        name: [(float(seconds), str(label)) for seconds, label in facts.get("timeline") or ()]
        for name, facts in servers.items()
    }
    every = {name: steps for name, steps in timelines.items() if steps}
    if not every:
        return None
    timelines = dict(itertools.islice(every.items(), MOST_SERVERS))
    longest = max(map(len, timelines.values()))
    if longest > _MOST_STEPS:
        raise ValueError(f"a server with {longest} phases is too much to draw")
    end = max(seconds for steps in timelines.values() for seconds, _ in steps) or 1.0
    kinds = tuple(dict.fromkeys(label for steps in timelines.values() for _, label in steps[:-1]))
    span, left, scale = WIDTH - 16, 8, _nice(0.0, end)
    durations: dict[str, dict[str, float]] = {name: {} for name in timelines}
    bars = []
    for row, (name, steps) in enumerate(timelines.items()):
        segments = []
        for (start, label), (stop, _) in itertools.pairwise(steps):
            durations[name][label] = durations[name].get(label, 0.0) + stop - start
            wide = max(0.0, (stop - start) / scale[-1] * span)
            kind = kinds.index(label)
            shown = str(kind + 1) if wide >= 12 else ""
            title = one_line(f"{name}: {label}, {stop - start:.1f} s (from {start:.1f} s)")
            segments.append(Segment(left + start / scale[-1] * span, wide, kind, shown, title))
        bars.append(Bar(one_line(f"{name}: {steps[-1][1]} at {steps[-1][0]:.1f} s"), 18.0 + row * 44, tuple(segments)))
    rows = [
        (
            str(index + 1),
            kind,
            *(f"{durations[name][kind]:.1f} s" if kind in durations[name] else "-" for name in timelines),
        )
        for index, kind in enumerate(kinds)
    ]
    ends = [("", "in all", *(f"{steps[-1][0]:.1f} s" for steps in timelines.values()))]
    return Bars(
        "Start-up",
        "Seconds from launch. "
        + " ".join(
            one_line(f"{name} came to {steps[-1][1]!r} after {steps[-1][0]:.1f} s.")
            for name, steps in timelines.items()
        ),
        Table(("", "phase", *timelines), (*rows, *ends)),
        tuple(bars),
        tuple(Mark(left + tick / scale[-1] * span, f"{number(tick)} s") for tick in scale),
        18.0 + 44 * len(bars) + 4,
        note=f"{len(every) - len(timelines)} more servers are in record.json." if len(every) > len(timelines) else "",
    )


_STATES = {
    "landed": "landed",
    "exempt": "not needed by this engine, by design",
    "unused": "did not land",
    "unsure": "cannot be told",
    "unjudged": "did not land; this record does not say whether that is by design",
}


def coverage(evidence: Mapping[str, Any], measurements: Mapping[str, Any]) -> Iterator[TensorMap]:
    """Draw the drafter's tensors: the keys of its checkpoint, then the tensors of the engine's model.

    What landed is as the weights suite judged it, over all ranks; nothing is yielded where no load was seen.
    """
    loads = [load for load in evidence.get("loads") or () if load["role"] == "drafter"]
    judged: Mapping[str, Any] = measurements.get("drafter") or {}
    keys = {key["name"]: key for load in loads for key in load["keys"]}
    landed = {key["name"]: key["landed"] for load in loads for key in load["keys"] if key["landed"]}
    if keys:
        entries = [_key(name, key, landed.get(name, ()), judged.get("unused_keys")) for name, key in keys.items()]
        yield _map("The drafter's checkpoint", "keys", "where it landed", entries)
    tensors = {
        tensor["name"]: tensor
        for load in loads
        for tensor in load["parameters"]
        if tensor["kind"] != "attribute" and tensor["elements"]
    }
    if tensors:
        entries = [_tensor(name, tensor, judged.get("tensors_not_filled")) for name, tensor in tensors.items()]
        yield _map("The drafter in the engine", "tensors", "filled from", entries)


_Entry = tuple[str, str, str, str]
"""Name, shape and dtype, state, where it went or came from."""


def _key(name: str, key: Mapping[str, Any], landed: Sequence[str], unused: Mapping[str, Any] | None) -> _Entry:
    shape = f"{key['shape']} {key['dtype']}"
    if unused is None:
        return name, shape, "landed" if landed else "unjudged", some(landed, _SOURCES)
    if name not in unused:
        return name, shape, "landed", some(landed, _SOURCES) or "read as values"
    lost = unused[name]
    return name, shape, "exempt" if lost["exempt"] else "unused", lost["exempt"] or lost["fate"]


def _tensor(name: str, tensor: Mapping[str, Any], lacking: Mapping[str, str] | None) -> _Entry:
    shape = f"{tensor['shape']} {tensor['dtype']}"
    source = some(tensor["keys"], _SOURCES)
    written = f"{tensor['written']} of {tensor['elements']} elements written"
    if lacking is None:
        whole = tensor["written"] and tensor["written"] + tensor["filled"] >= tensor["elements"]
        return name, shape, "landed" if whole else "unjudged", source if whole else written
    state = {"exempt": "exempt", "cannot be told": "unsure", "not filled": "unused"}.get(
        lacking.get(name, ""), "landed"
    )
    return name, shape, state, source if state == "landed" else written


def _map(title: str, what: str, where: str, entries: Sequence[_Entry]) -> TensorMap:
    bad_first = sorted(entries, key=lambda entry: (entry[2] == "landed", list(_STATES).index(entry[2]) == 1))
    shown = sorted(bad_first[:MOST_TENSORS], key=lambda entry: entry[0])
    left_out = collections.Counter(entry[2] for entry in bad_first[MOST_TENSORS:])
    more = ", ".join(f"{left_out[state]} {words}" for state, words in _STATES.items() if left_out[state])
    size, gap, left = 16.0, 4.0, 8.0
    columns = int((WIDTH - 2 * left + gap) // (size + gap))
    counts = tuple(
        (state, words, sum(entry[2] == state for entry in entries))
        for state, words in _STATES.items()
        if any(entry[2] == state for entry in entries)
    )
    named = some([entry[0] for entry in entries if entry[2] not in ("landed", "exempt")], 8)
    return TensorMap(
        f"{title}: {len(entries)} {what}",
        ", ".join(f"{count} {words}" for _, words, count in counts) + "." + (f" {one_line(named)}." if named else ""),
        Table(("tensor", "shape", "state", where), tuple((e[0], e[1], _STATES[e[2]], e[3]) for e in shown)),
        tuple(
            Tensor(
                left + index % columns * (size + gap),
                4 + index // columns * (size + gap),
                entry[2],
                one_line(f"{entry[0]} {entry[1]}: {_STATES[entry[2]]}" + (f" ({entry[3]})" if entry[3] else "")),
            )
            for index, entry in enumerate(shown)
        ),
        counts,
        8 + math.ceil(len(shown) / columns) * (size + gap),
        size,
        note=f"{left_out.total()} more are in record.json: {more}." if more else "",
    )


def _chart(
    values: Sequence[_Value], bottom: float, top: float, ticks: Iterable[tuple[float, str]], **texts: Any
) -> Chart:
    left, right, low, high = _LEFT, WIDTH - _RIGHT, _HEIGHT - _BOTTOM, _TOP
    base = texts.pop("base", None)

    def place(value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        return low - (min(max(value, bottom), top) - bottom) / (top - bottom) * (low - high)

    step = (right - left) / len(values)
    # Of labels that would lie over each other, every second, third ... is written.
    every = math.ceil((8 * max(len(each.label) for each in values) + 2) / step)
    dots = tuple(
        Dot(
            left + (index + 0.5) * step,
            place(each.value),
            place(each.low),
            place(each.high),
            place(each.level),
            each.label if index % every == 0 else "",
            each.title,
        )
        for index, each in enumerate(values)
    )
    marks = tuple(Mark(place(value) or 0.0, label) for value, label in ticks)
    return Chart(dots=dots, ticks=marks, base=place(base), half=min(22.0, step * 0.36), **texts)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _nice(low: float, high: float) -> tuple[float, ...]:
    """Return three to six round numbers that enclose low to high."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(step * index for index in range(first, last + 1))

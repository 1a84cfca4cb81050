"""Which meanings a figure can have, given what it said and what happened.

A meaning is a scope and a formula, written "scope: formula". Scopes:

- request: of the request that was answered last;
- setting: no count, but a number that stays what it is from the first request on;
- total: a count that grows; what it has grown by since the first reading;
- average: a ratio of everything since the first reading, brought up to date every so many verify steps;
- step: of the latest verify step;
- interval: of the steps since the last update but one, which come every so many steps, or seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from harness.measure.endpoint import Figure, Said
from harness.metrics.truth import COUNTS, RATIOS, Answered, Formula, Stretch, whole

__all__ = ["LOGGED", "Line", "Meanings", "lines_of", "meanings", "of_steps"]

LOGGED = "log "
"""What the names of figures in the log begin with: their readings are its lines, not one for each request."""

MIN_READINGS = 3
"""Readings that a meaning must explain before it is one."""

_WAYS = 16
"""Ways to cut the log's lines that are looked at; figures that are counts leave one."""

_ALL: Mapping[str, Formula] = {**COUNTS, **RATIOS}


Line = Mapping[str, Said]
"""The figures of one line of the log, by name."""

Meanings = Mapping[str, tuple[str, ...]]
"""The meanings that each figure can have, by the figure's name."""


def meanings(
    k: int,
    requests: Sequence[Answered],
    readings: Mapping[str, Sequence[Said | None]],
    *,
    every: int | None,
) -> dict[str, tuple[str, ...]]:
    """Return the meanings that each figure can have.

    `readings` has one reading before the first request and one after each; None is a figure that was not there. A
    figure that nothing explains has no meaning: an empty tuple. Averages and intervals are brought up to date in every
    verify step, or after `every` so many, if that is not None.
    """
    windows = _Windows(k, tuple(step for request in requests for step in request.steps), {1, every or 1})
    return {name: tuple(_meanings(k, requests, said, windows)) for name, said in readings.items()}


class _Windows:
    """What formulas say of stretches of the steps. The figures share it, for each looks at the same ones."""

    def __init__(self, k: int, steps: tuple[int, ...], intervals: Collection[int]) -> None:
        self._k, self._steps = k, steps
        self.intervals = intervals
        self._stretches: dict[tuple[int, int], Stretch] = {}
        self._said: dict[tuple[str, int, int], Figure] = {}

    def says(self, name: str, first: int, last: int) -> Figure:
        """Return what a formula says of the steps from `first` to before `last`."""
        key = (name, first, last)
        if key not in self._said:
            stretch = self._stretches.setdefault((first, last), Stretch(self._k, self._steps[first:last]))
            self._said[key] = _ALL[name].of(stretch)
        return self._said[key]


def _meanings(k: int, requests: Sequence[Answered], said: Sequence[Said | None], windows: _Windows) -> Iterator[str]:
    after = said[1:]
    if sum(each is not None for each in after) < MIN_READINGS:
        return
    yield from _at_once(k, requests, after)
    for name, formula in COUNTS.items():
        if _grows(said, [_value(formula, whole(k, requests[: i + 1])) for i in range(len(requests))]):
            yield f"total: {name}"
    ends = itertools.accumulate(len(each.steps) for each in requests)
    readings = list(zip(ends, after, strict=True))
    for name, formula in _ALL.items():
        if formula.whole:
            continue
        yield from _updated(windows, name, readings)


def _at_once(k: int, requests: Sequence[Answered], after: Sequence[Said | None]) -> Iterator[str]:
    """Yield the meanings that each reading has by itself."""
    for name, setting in (("K", k), ("K + 1, the root among the draft tokens", k + 1)):
        if all(reading is not None and reading.is_(setting) for reading in after):
            yield f"setting: {name}"
    for name, formula in _ALL.items():
        one = [
            (reading, _value(formula, whole(k, [request]))) for reading, request in zip(after, requests, strict=True)
        ]
        if all(reading is not None and value is not None and reading.is_(value) for reading, value in one):
            yield f"request: {name}"


def _value(formula: Formula, stretch: Stretch) -> Figure | None:
    """Return what the formula says of a stretch, None where it says nothing."""
    try:
        return formula.of(stretch)
    except ZeroDivisionError:
        return None


def _grows(said: Sequence[Said | None], totals: Sequence[Figure | None]) -> bool:
    """Whether a figure has grown by these totals since its first reading; one that was not there yet was 0."""
    begun = said[0]
    for reading, total in zip(said[1:], totals, strict=True):
        if reading is None or total is None:
            return False
        grown = reading.value
        if begun is not None:
            if isinstance(grown, tuple) is not isinstance(begun.value, tuple):
                return False
            if isinstance(grown, tuple) and isinstance(begun.value, tuple):
                grown = tuple(a - b for a, b in itertools.zip_longest(grown, begun.value, fillvalue=0.0))
            elif not isinstance(grown, tuple) and not isinstance(begun.value, tuple):
                grown -= begun.value
        if not dataclasses.replace(reading, value=grown).is_(total):
            return False
    return True


def _updated(windows: _Windows, name: str, readings: Sequence[tuple[int, Said | None]]) -> Iterator[str]:
    """Yield the meanings of a figure that is brought up to date every so many steps; `readings` are after so many."""
    for every in sorted(windows.intervals):
        for scope, interval in (("average", False), ("step" if every == 1 else "interval", True)):
            if (interval or name in RATIOS) and any(
                _explains(windows, name, readings, every, phase, interval=interval) for phase in range(every)
            ):
                yield f"{scope}: {name}"


def _explains(
    windows: _Windows,
    name: str,
    readings: Sequence[tuple[int, Said | None]],
    every: int,
    phase: int,
    *,
    interval: bool,
) -> bool:
    explained: dict[int, Figure] = {}
    for end, reading in readings:
        last = phase + (end - phase) // every * every  # where the latest update was
        first = last - every if interval else 0
        if first < 0 or last <= 0:
            continue  # some of it was before the first reading
        value = windows.says(name, first, last)
        if reading is None or not reading.is_(value):
            return False
        explained[last] = value
    # What is the same for any steps whatever explains only that a figure stands still.
    return len(explained) >= MIN_READINGS and len(set(explained.values())) > 1


def of_steps(meaning: str) -> bool:
    """Whether a figure of this meaning tells what the steps accepted."""
    formula = meaning.partition(": ")[2]
    return "accept" in formula and "delivered" not in formula


def lines_of(
    k: int,
    requests: Sequence[Answered],
    lines: Sequence[Line],
    expected: Mapping[str, str],
    *,
    every: int | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return the meanings that each figure of the log's lines can have; none where nothing explains it.

    A line is of the steps since the one before it: `every` so many, of which the first line's may have been before the
    first request, or any number (None), and the first line's since the first request. The lines are cut so that as many
    figures as can be have their `expected` meaning. Together they are of all steps, but for fewer than `every`.
    """
    steps = tuple(step for request in requests for step in request.steps)
    names = sorted({name for line in lines for name in line})
    known = {name: _ALL[meaning.removeprefix("interval: ")] for name, meaning in expected.items() if name in names}
    subsets = (each for size in range(len(known), 0, -1) for each in itertools.combinations(known, size))
    for subset in subsets:
        fitting = {name: known[name] for name in subset}
        if every is None:
            cuts = [(lines, (0, *cut)) for cut in _cuts(k, steps, lines, fitting)]
        else:
            cuts = [
                (told, cut)
                for told, cut in _even_cuts(len(steps), every, lines)
                if all(_fits(k, steps, told, cut, name, formula) for name, formula in fitting.items())
            ]
        if cuts:
            return {name: tuple(dict.fromkeys(_over(k, steps, cuts, name))) for name in names}
    return dict.fromkeys(names, ())


def _even_cuts(steps: int, every: int, lines: Sequence[Line]) -> Iterator[tuple[Sequence[Line], tuple[int, ...]]]:
    """Yield the ways in which lines can be of `every` steps each; a first one that began before them is left out."""
    for phase in range(1, every + 1):
        ends = tuple(range(phase, steps + 1, every))
        if len(ends) == len(lines) and len(lines) > 1:
            yield (lines, (0, *ends)) if phase == every else (lines[1:], ends)


def _over(
    k: int, steps: tuple[int, ...], cuts: Iterable[tuple[Sequence[Line], tuple[int, ...]]], name: str
) -> Iterator[str]:
    """Yield the meanings of a figure of lines that are cut like this, or like this."""
    for lines, cut in cuts:
        for meaning, formula in _ALL.items():
            if not formula.whole and _fits(k, steps, lines, cut, name, formula):
                yield f"interval: {meaning}"


def _fits(
    k: int, steps: tuple[int, ...], lines: Sequence[Line], cut: tuple[int, ...], name: str, formula: Formula
) -> bool:
    """Whether a figure has this meaning in every line, the first of which is of `steps[cut[0]:cut[1]]`."""
    return all(
        name in line and line[name].is_(formula.of(Stretch(k, steps[first:last])))
        for line, (first, last) in zip(lines, itertools.pairwise(cut), strict=True)
    )


def _cuts(
    k: int, steps: tuple[int, ...], lines: Sequence[Line], fitting: Mapping[str, Formula]
) -> Iterator[tuple[int, ...]]:
    """Yield some ways to cut the steps into the lines, each by where the lines end."""

    @functools.cache
    def ends(number: int, first: int) -> tuple[int, ...]:
        """Return where a line that begins there can end."""
        return tuple(
            last
            for last in range(first + 1, len(steps) + 1)
            if all(_fits(k, steps, [lines[number]], (first, last), *each) for each in fitting.items())
        )

    @functools.cache
    def walk(number: int, first: int) -> tuple[tuple[int, ...], ...]:
        """Return ways to go on from there."""
        if number == len(lines):
            return ((),) if first == len(steps) else ()
        ways = ((last, *rest) for last in reversed(ends(number, first)) for rest in walk(number + 1, last))
        return tuple(itertools.islice(ways, _WAYS))

    if lines:
        yield from walk(0, 0)

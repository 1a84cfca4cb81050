"""Figures over runs, and the steps in them.

A series is one figure of one pair, engine, runner and device. Its runs are ordered by the engine's version, then by
time: the question is which version brought a change, and an old version that is measured again must stand with its
fellows instead of making two steps that are none.

Steps are found by PELT on a Gaussian kernel (Killick et al. 2012; Arlot et al. 2019; `ruptures`). The kernel looks at
how far two runs are apart in units of the noise and saturates, so that no single run, however far out, weighs more than
any other. The noise is estimated from the differences of neighbouring runs, which a step hardly touches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from packaging.version import InvalidVersion, Version

from harness.history.store import Concluded, Measured

__all__ = ["MIN_RUNS", "Series", "Step", "breaks", "noise", "series", "verdicts"]

MIN_RUNS = 8
"""Runs below which no step is looked for: with fewer, noise of two values or two modes looks like one too often."""

PENALTY = 0.75
"""What a step must gain, times the logarithm of the number of runs, of 30 at most.

More would keep two runs of a new version from being seen at the end of a long history. By simulation, steps are found
in less than 5 % of noisy series (tests/history/test_trend.py, docs/history.md).
"""

GAMMA = 0.15
"""Width of the kernel: exp(-GAMMA d^2) for two runs d noise units apart."""

_AT_EACH_LEVEL = 2
"""Runs that a level must have: one run that stands out is an outlier until a second one says the same."""

_RESOLUTION = 1e-3
"""The noise is at least this share of the largest value: what differs by less is not worth a person's time."""

_NEAR = 3.0
"""Noise units within which a run beside a version's edge may belong to either level."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A change of level: `run` is the first at the new one. `changed` names what else is new with that run.

    `within` says that the engine's version is the same on both sides, so that it is not what changed.
    """

    before: float
    after: float
    version: str
    run: str
    started: str
    within: bool
    changed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Series:
    """One figure of one pair, engine, runner and device, in order."""

    pair: str
    engine: str
    runner: str
    device: str
    suite: str
    metric: str
    points: tuple[Measured, ...]

    def steps(self) -> tuple[Step, ...]:
        """Return the steps; none where there are fewer than `MIN_RUNS` runs."""
        points = self.points
        if len(points) < MIN_RUNS:
            return ()
        values = [point.value for point in points]
        versions = [point.version for point in points]
        found = list(breaks(values))
        for index, place in enumerate(found):
            start, *_, end = (0, *found, len(points))[index : index + 3]
            found[index] = _at_edge(values, versions, (start, place, end))
        edges = (0, *found, len(points))
        levels = [statistics.median(values[start:end]) for start, end in itertools.pairwise(edges)]
        return tuple(
            Step(
                before, after, points[place].version, points[place].run, points[place].started,
                versions[place] == versions[place - 1], tuple(_changed(points[place - 1], points[place])),
            )
            for place, (before, after) in zip(found, itertools.pairwise(levels), strict=True)
        )  # fmt: skip


_SUBJECT = ("machine", "draftgate", "k", "target", "drafter", "prompts")


def _changed(before: Measured, after: Measured) -> list[str]:
    return [name for name in _SUBJECT if getattr(before, name) != getattr(after, name)]


def series(measured: Iterable[Measured]) -> list[Series]:
    """Group figures into series, each in the order of versions, then time."""
    groups: dict[tuple[str, str, str, str, str, str], list[Measured]] = {}
    for point in sorted(measured, key=_place):
        key = (point.pair, point.engine, point.runner, point.device, point.suite, point.metric)
        groups.setdefault(key, []).append(point)
    return [Series(*key, points=tuple(points)) for key, points in sorted(groups.items())]


def verdicts(concluded: Iterable[Concluded]) -> dict[tuple[str, str, str, str, str], list[Concluded]]:
    """Group verdicts by pair, engine, runner, device and suite, each in the order of versions, then time."""
    groups: dict[tuple[str, str, str, str, str], list[Concluded]] = {}
    for each in sorted(concluded, key=_place):
        groups.setdefault((each.pair, each.engine, each.runner, each.device, each.suite), []).append(each)
    return dict(sorted(groups.items()))


def _place(point: Concluded) -> tuple[bool, Version, str, str, str]:
    """Order by version, then time; what is no version (a branch, a commit) comes last, by name."""
    try:
        return False, Version(point.version), "", point.started, point.run
    except InvalidVersion:
        return True, Version("0"), point.version, point.started, point.run


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of what varies from run to run, from the differences of neighbours (von Neumann).

    A step adds one difference to n - 2 others, an outlier two.
    """
    squares = [(after - before) ** 2 for before, after in itertools.pairwise(values)]
    return max(math.sqrt(statistics.fmean(squares) / 2), _RESOLUTION * max(map(abs, values)))


def breaks(values: Sequence[float]) -> tuple[int, ...]:
    """Return the places at which a new level begins."""
    import numpy as np  # noqa: PLC0415 -- keeps other commands quick
    import ruptures  # noqa: PLC0415 -- as above; it brings scipy

    scale = noise(values)
    if scale == 0:
        return ()
    signal = (np.asarray(values, dtype=float) - statistics.median(values)) / scale
    finder = ruptures.KernelCPD(kernel="rbf", min_size=_AT_EACH_LEVEL, params={"gamma": GAMMA})
    *places, _ = finder.fit(signal.reshape(-1, 1)).predict(pen=PENALTY * math.log(min(len(values), 30)))
    return tuple(places)


def _at_edge(values: Sequence[float], versions: Sequence[str], segment: tuple[int, int, int]) -> int:
    """Return the place of a step, put where a version begins if that is one run away and the noise allows it.

    A place is certain to within one run, and versions are where levels change.
    """
    start, place, end = segment

    def begins(at: int) -> bool:
        return start < at < end and versions[at] != versions[at - 1]

    if begins(place):
        return place
    before, after = statistics.median(values[start:place]), statistics.median(values[place:end])
    far = _NEAR * noise(values)
    options = [
        (abs(values[moved] - level), at)
        for at, moved, level in ((place + 1, place, before), (place - 1, place - 1, after))
        if begins(at) and abs(values[moved] - level) <= far
    ]
    return min(options)[1] if options else place

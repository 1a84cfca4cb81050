"""What a run costs besides the engine: wall time less engine start-ups less decoding, from a run's record."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import run_seconds, table

__all__ = ["TARGET", "Account", "account", "report"]

TARGET = 0.10
"""The share of the wall time that may be neither engine start-up nor decoding."""


@dataclasses.dataclass(frozen=True)
class Account:
    """Where a run's wall time went; all values are seconds.

    `startup` by server, `decoding` by case and suite (the time in which a request was in flight), `own` by suite: what
    the suite took besides. What none of them has is the session's: Python, pytest, provenance, canaries, stopping.
    `untimed` names the suites whose requests the record has no times of; their decoding is counted as overhead, so
    that the overhead is then an upper bound.
    """

    wall_s: float
    verdict: str
    startup: Mapping[str, float]
    decoding: Mapping[str, float]
    own: Mapping[str, float]
    untimed: tuple[str, ...]

    @property
    def overhead_s(self) -> float:
        """What was neither start-up nor decoding."""
        return self.wall_s - sum(self.startup.values()) - sum(self.decoding.values())

    @property
    def session_s(self) -> float:
        """The part of the overhead that lies outside of all suites."""
        return self.overhead_s - sum(self.own.values())


def account(record: Mapping[str, Any], wall_s: float | None = None) -> Account:
    """Split a record's time. `wall_s` is the wall time of the whole process, where it was measured from outside.

    Without it, it is what the record says: from pytest's start to its end, to the second.

    Raises:
        ValueError: the record is of a run that did not end, that has no start-up times or measurements, or of a pair
            whose servers took turns.

    """
    if not record["complete"]:
        raise ValueError("the run did not come to its end, so its wall time says nothing")
    if wall_s is None:
        wall_s = run_seconds(record)
    if any(case.get("pair", {}).get("side_by_side") is False for case in record["cases"]):
        raise ValueError("servers took turns: only the first start of each is timed in the record")
    startup: dict[str, float] = {}
    decoding: dict[str, float] = {}
    own: dict[str, float] = {}
    untimed = set()
    for case in record["cases"]:
        for judgement in case["judgements"]:
            suite, measured = judgement["suite"], judgement["measurements"]
            where = f"{case['id']} {suite}"
            took = 0.0
            if suite == "startup":
                # The suite's second test reads logs only; how many servers there must be is looked at below.
                servers = {name: server["started_in_s"] for name, server in measured.get("servers", {}).items()}
                startup |= servers
                took = sum(servers.values())
            elif suite in _DECODING:
                seconds = _DECODING[suite](measured, where)
                if seconds is None:
                    untimed.add(suite)
                else:
                    took = seconds
                    decoding[where] = decoding.get(where, 0.0) + seconds
            own[suite] = own.get(suite, 0.0) + judgement["seconds"] - took
    if len(startup) != 2 * len(record["cases"]) or not startup:
        raise ValueError(
            f"start-up times of {len(startup)} servers in {len(record['cases'])} cases, not of two in each"
        )
    return Account(wall_s, record["verdict"], startup, decoding, own, tuple(sorted(untimed)))


def _need(measured: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in measured:
        raise ValueError(f"{where}: its measurements have no {key!r}, so the suite did not get to measure")
    return measured[key]


def _acceptance(measured: Mapping[str, Any], where: str) -> float | None:
    """One request at a time."""
    return float(sum(prompt["seconds"] for prompt in _need(measured, "prompts", where)))


def _losslessness(measured: Mapping[str, Any], where: str) -> float | None:
    """One request at a time, then several at once. None if the record has no times of them."""
    at_once = _need(measured, "concurrent", where)
    kinds = (_need(measured, "comparisons", where), _need(measured, "repeats", where), at_once["comparisons"])
    segments = [segment for kind in kinds for comparison in kind for segment in comparison["segments"]]
    if any("spec_seconds" not in segment or "plain_seconds" not in segment for segment in segments):
        return None
    alone = float(sum(segment["spec_seconds"] + segment["plain_seconds"] for segment in segments))
    return alone + _covered((each["started"], each["started"] + each["seconds"]) for each in at_once["requests"])


def _throughput(measured: Mapping[str, Any], where: str) -> float | None:
    """Overlapping requests within a round; the rounds follow one another."""
    return sum(
        _covered((request["started"], request["started"] + request["seconds"]) for request in each["requests"])
        for each in _need(measured, "rounds", where)
    )


def _metrics(measured: Mapping[str, Any], where: str) -> float | None:
    """One request at a time."""
    return float(sum(_need(measured, "seconds", where)))


def _upgrade(measured: Mapping[str, Any], where: str) -> float | None:
    """Both releases' rounds, both releases' prompts, or nothing: what was recorded needs no request."""
    if "new_rounds" in measured:
        return sum(_throughput({"rounds": measured[side]}, where) or 0.0 for side in ("old_rounds", "new_rounds"))
    return sum(
        _acceptance(measured[side], where) or 0.0 for side in ("old", "new") if isinstance(measured.get(side), dict)
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (begin, end) spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


_DECODING: dict[str, Callable[[Mapping[str, Any], str], float | None]] = {
    "acceptance": _acceptance,
    "losslessness": _losslessness,
    "metrics": _metrics,
    "throughput": _throughput,
    "upgrade": _upgrade,
}
"""How long a suite had requests in flight; suites that are not here send none."""


def report(accounts: Sequence[Account]) -> str:
    """Return the table: a column for each run, in seconds and as a share of its wall time."""
    suites = accounts[0].own
    rows: list[tuple[str, Callable[[Account], float]]] = [
        ("engine start-up", lambda each: sum(each.startup.values())),
        ("decoding: requests in flight", lambda each: sum(each.decoding.values())),
        *((f"the `{suite}` suite's own", lambda each, suite=suite: each.own[suite]) for suite in suites),
        ("outside of suites", lambda each: each.session_s),
        ("**overhead**: all but the first two", lambda each: each.overhead_s),
        ("wall", lambda each: each.wall_s),
    ]
    cells = [
        (part, *(f"{seconds(each):.2f} s ({seconds(each) / each.wall_s:.1%})" for each in accounts))
        for part, seconds in rows
    ]
    head = ("part", *(f"run {number}, {each.verdict}" for number, each in enumerate(accounts, start=1)))
    untimed = sorted({suite for each in accounts for suite in each.untimed})
    note = (
        f" The record has no times of the requests of {', '.join(untimed)}: they count as overhead." if untimed else ""
    )
    return (
        f"{table(head, cells)}\n\n"
        f"{len(accounts[0].startup)} server starts a run. Target: overhead below {TARGET:.0%} of wall.{note}"
    )


def main() -> int:
    """Print the table of the records given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, nargs="+", help="record.json of a run; several runs of the same suites")
    accounts = []
    for path in parser.parse_args().record:
        try:
            accounts.append(account(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    if len({tuple(each.own) for each in accounts}) != 1:
        parser.error("the records are of runs with different suites; give them one by one")
    print(report(accounts))
    return 0


if __name__ == "__main__":
    sys.exit(main())

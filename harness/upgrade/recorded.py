"""What a record says of one case, as typed facts: what is missing or of another form is named by its place."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from harness.errors import EvidenceError
from harness.probe.facts import Evidence
from harness.verdict import Verdict, worst

__all__ = ["Side", "at", "concluded", "judgements", "measured", "need"]

T = TypeVar("T")


def at(data: Any, path: str) -> Any:
    """Return the value at a dotted path of a record's part. Raises EvidenceError naming how far the path goes."""
    seen = []
    for name in path.split("."):
        seen.append(name)
        if not isinstance(data, Mapping) or name not in data:
            raise EvidenceError(".".join(seen))
        data = data[name]
    return data


def need(data: Any, path: str, kind: type[T]) -> T:
    """Return the value at a dotted path, which must be a `kind` and not empty. Raises EvidenceError naming the path."""
    value = at(data, path)
    if not isinstance(value, kind) or value in ("", [], {}):
        raise EvidenceError(f"{path} (it is {_short(value)})")
    return value


def judgements(side: Side, suite: str) -> list[Mapping[str, Any]]:
    """Return what the tests of one suite concluded. Raises EvidenceError if there is nothing."""
    found = [item for item in need(side.case, "judgements", list) if at(item, "suite") == suite]
    if not found:
        raise EvidenceError(f"a judgement of the suite {suite}")
    return found


def concluded(side: Side, suite: str) -> Verdict:
    """Return the verdict of one suite. Raises EvidenceError if there is none."""
    return worst([Verdict(at(item, "verdict")) for item in judgements(side, suite)])


def measured(side: Side, suite: str) -> Mapping[str, Any]:
    """Return what a suite measured. Raises EvidenceError, with what the suite says itself, if it measured nothing."""
    found = judgements(side, suite)
    for item in found:
        if item.get("measurements"):
            return need(item, "measurements", dict)
    reasons = [
        f" ({finding['code']}: {finding['summary']})"
        for item in found
        for finding in at(item, "findings")
        if finding["verdict"] != Verdict.PASS
    ]
    raise EvidenceError(f"measurements of the suite {suite}" + "".join(reasons[:1]))


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a comparison: a case as the record holds it."""

    case: Mapping[str, Any]

    @functools.cached_property
    def evidence(self) -> Evidence:
        """Return the probe's evidence. Raises EvidenceError if the record has none, or only the reason why."""
        data = at(self.case, "evidence")
        if not isinstance(data, Mapping):
            raise EvidenceError(f"evidence (it is {_short(data)})")
        made: Evidence = _rebuild(Evidence, data, "evidence")
        return made


def _rebuild(kind: Any, data: Any, path: str) -> Any:
    """Return the `kind` that was written as plain data: frozen dataclasses, tuples and scalars.

    Raises EvidenceError naming the place that is missing or of another type.
    """
    if kind is Any:
        return data
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _rebuild(next(part for part in parts if part is not type(None)), data, path)
    if origin is tuple and isinstance(data, list) and (parts[-1] is Ellipsis or len(parts) == len(data)):
        each: Iterable[Any] = [parts[0]] * len(data) if parts[-1] is Ellipsis else parts
        return tuple(
            _rebuild(part, item, f"{path}[{index}]") for index, (part, item) in enumerate(zip(each, data, strict=True))
        )
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(data, Mapping):
        lacking = [name for name, _ in _types(kind) if name not in data]
        if lacking:
            raise EvidenceError(f"{path}.{lacking[0]}")
        return kind(**{name: _rebuild(part, data[name], f"{path}.{name}") for name, part in _types(kind)})
    if (
        origin is None
        and not dataclasses.is_dataclass(kind)
        and isinstance(data, (int, float) if kind is float else kind)
        and isinstance(data, bool) == (kind is bool)
    ):
        return data
    raise EvidenceError(f"{path} (it is {_short(data)})")


@functools.cache
def _types(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((each.name, hints[each.name]) for each in dataclasses.fields(kind))


def _short(value: Any) -> str:
    text = "empty" if value in ({}, [], "") else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

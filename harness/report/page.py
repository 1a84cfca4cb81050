"""The report as one HTML file: no script, nothing loaded from anywhere."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.report import plots
from harness.report.summary import Row, Summary, summarise
from harness.report.text import number, one_line, visible
from harness.verdict import Verdict

if TYPE_CHECKING:
    import jinja2

__all__ = ["render"]

_TONES = {"PASS": "pass", "FAIL": "fail", "INVALID": "invalid", "INCONCLUSIVE": "inconclusive"}
_GLYPHS = {"PASS": "\u2713", "FAIL": "\u2717", "INVALID": "!", "INCONCLUSIVE": "?"}
_NOTHING = "\u2013"

_OPEN = 2
"""Cases up to which all are shown unfolded; of more, those that are not green."""

_CASES, _FINDINGS, _REASONS, _TRENDS = 50, 50, 200, 50
"""How many are shown, of findings those of one suite; what is not green goes first, and the page says what it lacks."""


@dataclasses.dataclass(frozen=True)
class _Undrawn:
    """A figure for which the record has not what it takes; said in its place, so that nobody misses it silently."""

    title: str
    note: str
    kind: str = "none"
    table: plots.Table = dataclasses.field(default_factory=lambda: plots.Table((), ()))


@dataclasses.dataclass(frozen=True)
class _Finding:
    verdict: str
    code: str
    summary: str
    facts: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class _Suite:
    name: str
    verdict: Verdict
    seconds: str
    findings: tuple[_Finding, ...]
    more: int


@dataclasses.dataclass(frozen=True)
class _Server:
    name: str
    command: str
    facts: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class _Case:
    row: Row
    open: bool
    figures: tuple[Any, ...]
    suites: tuple[_Suite, ...]
    servers: tuple[_Server, ...]
    more_servers: int
    facts: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class _Environment:
    name: str
    versions: tuple[str, ...]


def render(record: Mapping[str, Any], trends: Sequence[plots.Trend] = ()) -> str:
    """Return the page for a run record; `trends` are figures over earlier runs, if the caller has a history.

    Raises KeyError, TypeError or ValueError where the record is none.
    """
    summary = summarise(record)
    drawn = [_drawn(trend.title, functools.partial(plots.trend, trend)) for trend in trends[:_TRENDS]]
    cases = list(zip(record["cases"], summary.rows, strict=False))
    shown = sorted(sorted(range(len(cases)), key=lambda index: cases[index][1].verdict is Verdict.PASS)[:_CASES])
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            summary=summary,
            tone=_tone(summary),
            about=_about(record),
            reasons=summary.reasons[:_REASONS],
            trends=[figure for figures in drawn for figure in figures],
            more_trends=max(0, len(trends) - _TRENDS),
            cases=[
                _case(case, row, unfolded=len(cases) <= _OPEN or row.verdict is not Verdict.PASS)
                for case, row in (cases[index] for index in shown)
            ],
            more_cases=len(cases) - len(shown),
            environments=list(_environments(record)),
            command=str(record.get("command") or "not in the record"),
            machine=tuple((str(name), number(value)) for name, value in (record.get("machine") or {}).items()),
            version=str(record.get("draftgate") or ""),
        )
    )


@functools.cache
def _templates() -> jinja2.Environment:
    import jinja2  # noqa: PLC0415 -- 40 ms at import
    import markupsafe  # noqa: PLC0415 -- comes with jinja2

    def shown(value: Any) -> Any:
        # Whatever a template prints passes here, then through autoescape: no text can be forgotten.
        return visible(value) if isinstance(value, str) and not isinstance(value, markupsafe.Markup) else value

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["tone"] = lambda word: _TONES.get(word, "none")
    made.filters["glyph"] = lambda word: _GLYPHS.get(word, _NOTHING)
    return made


def _tone(summary: Summary) -> str:
    """Return the colour of the answer; a run without an end is not green, whatever it saw."""
    green = summary.verdict is Verdict.PASS and not summary.complete
    return "inconclusive" if green else _TONES[summary.verdict]


def _about(record: Mapping[str, Any]) -> str:
    machine: Mapping[str, Any] = record.get("machine") or {}
    parts = [str(record.get("started") or "")]
    try:
        begun, ended = (dt.datetime.fromisoformat(record[key]) for key in ("started", "finished"))
        parts[0] += f", {(ended - begun).total_seconds() / 60:.0f} minutes"
    except (KeyError, TypeError, ValueError):
        pass  # a run without an end has no length
    if machine:
        memory = machine.get("memory_bytes")
        size = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) and memory else ""
        parts.append(f"{machine.get('cpu')}, {number(machine.get('cores'))} cores{size}, {machine.get('system')}")
    return one_line("; ".join(part for part in parts if part))


def _case(case: Mapping[str, Any], row: Row, *, unfolded: bool) -> _Case:
    measured: dict[str, Mapping[str, Any]] = {}
    for item in case["judgements"]:
        measured.setdefault(item["suite"], {})
        measured[item["suite"]] = {**measured[item["suite"]], **(item.get("measurements") or {})}
    servers: Mapping[str, Any] = (measured.get("startup") or {}).get("servers") or {}
    return _Case(
        row,
        unfolded,
        tuple(_figures(case, measured)),
        tuple(_suites(case)),
        tuple(_servers(servers)),
        max(0, len(servers) - plots.MOST_SERVERS),
        tuple(_facts(case)),
    )


def _figures(case: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    pair: Mapping[str, Any] = case.get("pair") or {}
    evidence = case.get("evidence")
    yield from _drawn("Acceptance per draft position", lambda: plots.acceptance(measured.get("acceptance") or {}, pair))
    yield from _drawn("Speed-up by speculation", lambda: plots.throughput(measured.get("throughput") or {}, pair))
    if isinstance(evidence, Mapping):
        yield from _drawn("The drafter's tensors", lambda: plots.coverage(evidence, measured.get("weights") or {}))
    yield from _drawn("Start-up", lambda: plots.startup(measured.get("startup") or {}))


def _drawn(title: str, draw: Callable[[], Any]) -> list[Any]:
    """Return what `draw` makes: one figure, several or none; if the record has another form, its name and why."""
    try:
        made = draw()
        return [] if made is None else list(made) if isinstance(made, Iterator) else [made]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return [_Undrawn(title, f"The record's figures cannot be drawn: {type(error).__name__}: {error}")]


def _suites(case: Mapping[str, Any]) -> Iterator[_Suite]:
    for item in case["judgements"]:
        shown = sorted(item["findings"], key=lambda finding: finding["verdict"] == Verdict.PASS)[:_FINDINGS]
        findings = tuple(
            _Finding(
                str(finding["verdict"]),
                str(finding["code"]),
                str(finding["summary"]),
                tuple(
                    (label, number(finding[key]) if key == "n" else str(finding[key]))
                    for label, key in (
                        ("Expected", "expected"), ("Seen", "actual"), ("Samples", "n"), ("Evidence", "source"),
                        ("Cause", "cause"), ("Remedy", "remedy"), ("Known issue", "known_issue"),
                    )
                    if finding.get(key) not in (None, "")
                )
                + ((("Interval", " to ".join(map(number, finding["interval"]))),) if finding.get("interval") else ()),
            )
            for finding in shown
        )  # fmt: skip
        more = len(item["findings"]) - len(shown)
        yield _Suite(str(item["suite"]), Verdict(item["verdict"]), number(item.get("seconds")), findings, more)


def _servers(servers: Mapping[str, Any]) -> Iterator[_Server]:
    for name, facts in itertools.islice(servers.items(), plots.MOST_SERVERS):
        env = "\n".join(f"{key}={value}" for key, value in (facts.get("env") or {}).items() if value is not None)
        proof = facts.get("proof")
        known = proof if isinstance(proof, Mapping) else {"proof": proof}
        yield _Server(
            str(name),
            shlex.join(map(str, facts.get("argv") or ())),
            (
                ("Environment", env),
                ("Ready after", f"{number(facts.get('started_in_s'))} s"),
                ("Readiness", ", ".join(f"{key}: {number(value)}" for key, value in known.items())),
                ("Log", str(facts.get("log") or "")),
            ),
        )


def _facts(case: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    pair: Mapping[str, Any] = case.get("pair") or {}
    engine: Mapping[str, Any] = case.get("engine") or {}
    prompts: Mapping[str, Any] = case.get("prompts") or {}
    yield "Case", str(case["id"])
    yield "Pair", ", ".join(f"{key} {number(pair[key])}" for key in ("method", "k", "dtype", "canary") if pair.get(key))
    yield "Defined in", str(pair.get("source") or "")
    yield "Engine", " ".join(str(engine[key]) for key in ("distribution", "version") if engine.get(key))
    yield "Python", " ".join(str(engine[key]) for key in ("python", "python_version") if engine.get(key))
    for role in ("target", "drafter"):
        found: Mapping[str, Any] = case.get(role) or {}
        size = f"{number(found.get('bytes'))} bytes" if found.get("bytes") is not None else ""
        yield (
            role.capitalize(),
            "\n".join(part for part in (str(found.get("folder") or ""), str(found.get("digest") or ""), size) if part),
        )
    yield "Prompts", ", ".join(f"{key} {number(value)}" for key, value in prompts.items())
    if isinstance(case.get("evidence"), str):
        yield "Evidence", str(case["evidence"])


def _environments(record: Mapping[str, Any]) -> Iterator[_Environment]:
    """Yield each environment's packages once, however many cases ran in it."""
    seen: dict[tuple[str, ...], str] = {}
    for case in record["cases"]:
        engine: Mapping[str, Any] = case.get("engine") or {}
        versions = tuple(f"{name}=={version}" for name, version in (engine.get("packages") or {}).items())
        if versions:
            seen.setdefault(versions, f"{engine.get('engine')} {engine.get('version')}")
    for versions, name in seen.items():
        yield _Environment(name, versions)

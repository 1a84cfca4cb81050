"""Reports of `draftgate check` as text, JSON, SARIF 2.1.0 or GitHub workflow commands."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

import harness
from harness.checkpoint.findings import Severity
from harness.contracts.check import CODES, Finding, Report
from harness.github import command

__all__ = ["FORMATS", "render"]

SCHEMA = 1
"""Of the JSON document."""

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def render(reports: Sequence[Report], drafter: str, form: str) -> str:
    """Return the reports in one of FORMATS, with a line end."""
    return FORMATS[form](reports, drafter)


def _text(reports: Sequence[Report], drafter: str) -> str:
    lines = []
    for report in reports:
        fates = collections.Counter(fate.fate for fate in report.fates.values())
        counts = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items()))
        filled = sum(report.filled.values())
        about = f": {len(report.fates)} keys ({counts}), {filled} of {len(report.filled)} parameters filled"
        lines.append(f"{report.verdict:<12} {report.release}{about if report.fates else ''}")
        for finding in report.findings:
            lines.append(f"  {finding.code} {finding.severity}: {finding.summary}")
            lines += [f"      at:     {finding.where}"]
            lines += [f"      source: {finding.source}"] if finding.source else []
            lines += [f"      remedy: {finding.remedy}"] if finding.remedy else []
    return "\n".join([drafter, *lines]) + "\n"


def _json(reports: Sequence[Report], drafter: str) -> str:
    document = {
        "schema": SCHEMA,
        "drafter": drafter,
        "reports": [
            {
                "release": report.release,
                "verdict": report.verdict,
                "findings": [
                    {**dataclasses.asdict(finding), "verdict": finding.verdict} for finding in report.findings
                ],
                "keys": {key: dataclasses.asdict(fate) for key, fate in sorted(report.fates.items())},
                "parameters": dict(sorted(report.filled.items())),
            }
            for report in reports
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _sarif(reports: Sequence[Report], drafter: str) -> str:
    results = [
        {
            "ruleId": finding.code,
            "level": _LEVELS[finding.severity],
            "message": {"text": _message(report, finding)},
            "locations": [
                {
                    "physicalLocation": {"artifactLocation": {"uri": drafter}},
                    "logicalLocations": [{"fullyQualifiedName": finding.where}],
                }
            ],
            "properties": {"release": report.release, "verdict": report.verdict},
        }
        for report in reports
        for finding in report.findings
    ]
    driver = {
        "name": "draftgate",
        "version": harness.__version__,
        "rules": [{"id": code, "shortDescription": {"text": text}} for code, text in CODES.items()],
    }
    document = {"$schema": _SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(document, indent=1) + "\n"


def _github(reports: Sequence[Report], drafter: str) -> str:
    lines = [
        command(
            _COMMANDS[finding.severity],
            _message(report, finding),
            file=drafter,
            title=f"{finding.code} {report.release}",
        )
        for report in reports
        for finding in report.findings
    ]
    return "".join(f"{line}\n" for line in lines)


def _message(report: Report, finding: Finding) -> str:
    parts = [
        f"{report.release}: {finding.summary}",
        finding.source,
        f"remedy: {finding.remedy}" if finding.remedy else "",
    ]
    return "\n".join(part for part in parts if part)


FORMATS: Mapping[str, Callable[[Sequence[Report], str], str]] = {
    "text": _text,
    "json": _json,
    "sarif": _sarif,
    "github": _github,
}
"""Format -> what writes it."""

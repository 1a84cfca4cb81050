"""The gate between a release and itself, again and again: it must pass every time, whatever the machine does.

Interrupted, it reports the gates that ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, add_engine_options, engine, rewrite_results, run_seconds, table, tell

from harness.engines.adapters import ADAPTERS
from harness.engines.base import EngineIdentity
from harness.report.record import RunFolder, read

__all__ = ["report"]


def measure(identity: EngineIdentity, times: int, rest: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Run the gate `times` times and yield the records. Raises SystemExit if one of them left none."""
    for number in range(1, times + 1):
        tell(f"gate {number} of {times}")
        runs = folder / str(number)
        python = str(identity.python)
        runner = ADAPTERS[identity.engine][0].default_runner("cpu")
        command = [sys.executable, "-m", "harness.cli", "gate", "--engine", identity.engine, "--from", python]
        command += ["--to", python, "--runner", runner, "--runs", str(runs), *rest]
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
        found = list(runs.glob("*/record.json"))
        if len(found) != 1:
            raise SystemExit(f"bench: gate {number} ended with {status} and left no record")
        record, _ = read(found[0])
        tell(f"gate {number}: {record['verdict']}")
        if not any(item["suite"] == "upgrade" for case in record["cases"] for item in case["judgements"]):
            raise SystemExit("bench: nothing was held against the old release; -k must leave it a suite")
        yield record


def report(records: list[dict[str, Any]]) -> str:
    """Return a row for each gate: its verdict, the speed of new over old, and how long it took."""
    rows = []
    for number, record in enumerate(records, start=1):
        speeds = [
            finding
            for case in record["cases"]
            for judgement in case["judgements"]
            for finding in judgement["findings"]
            if finding["code"] == "CHG020"
        ]
        rows.append(
            (
                str(number),
                record["verdict"],
                ", ".join("{:.3f} to {:.3f}".format(*each["interval"]) for each in speeds if each.get("interval"))
                or "not compared",
                ", ".join(str(each["n"]) for each in speeds),
                f"{run_seconds(record):.0f}",
            )
        )
    head = ("gate", "verdict", "tokens/s, new over old (5 % each way)", "pairs of rounds", "wall s")
    passed = sum(record["verdict"] == "PASS" for record in records)
    return f"{table(head, rows)}\n\n{passed} of {len(records)} passed."


def main() -> int:
    """Run, print and, if asked, rewrite. Exit status 1 unless every gate passed."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="All other options go to `draftgate gate`.")
    add_engine_options(parser)
    parser.add_argument("--times", type=int, default=10, metavar="N", help="gates (default: 10)")
    parser.add_argument("--write", action="store_true", help="rewrite the table in RESULTS.md")
    arguments, rest = parser.parse_known_args()
    load = os.getloadavg()[0]
    identity = engine(arguments)
    folder = RunFolder.create(ROOT / "runs").path
    records: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):
        records.extend(measure(identity, arguments.times, rest, folder))
    if not records:
        raise SystemExit("bench: no gate ended")
    block = f"{report(records)}\nLoad average before: {load:.2f} (of {os.cpu_count()})."
    if arguments.write:
        rewrite_results({f"same release {identity.engine}": block})
    print(block)
    return int(any(record["verdict"] != "PASS" for record in records))


if __name__ == "__main__":
    sys.exit(main())

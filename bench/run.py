"""All figures of RESULTS.md, side by side in one run; its tables are rewritten when all of them are there."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import headers
import import_time
import overhead
import probe_cost
from common import ROOT, add_engine_options, engine, machine_table, require_places, rewrite_results, tell

from harness.engines.adapters import ADAPTERS
from harness.engines.base import EngineIdentity
from harness.report.record import RunFolder

_ENDED = (0, 1, 3)
"""Exit statuses of a run that came to its end. Its verdict stands in the table: it is not what is measured here."""


def _whole_run(arguments: argparse.Namespace, identity: EngineIdentity, runs: Path, cache: Path) -> overhead.Account:
    """Run the suites in a process of their own and account for its whole wall time, from start to exit."""
    command = [sys.executable, "-m", "harness.cli", "run", "--runs", str(runs), "--cache", str(cache)]
    if arguments.engine_env is not None:
        command += ["--engine-env", arguments.engine_env]
    else:
        command += ["--engine-python", str(arguments.engine_python)]
    # One runner, the fastest that there is without a GPU, so the run in which the harness weighs most.
    runner = ADAPTERS[identity.engine][0].default_runner("cpu")
    command += ["--engine", identity.engine, "--runner", runner]
    command += [word for name in probe_cost.CANARIES for word in ("--pair", name)]
    began = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    wall_s = time.monotonic() - began
    if status not in _ENDED:
        raise SystemExit(f"bench: exit status {status} of: {shlex.join(command)}")
    [record] = runs.glob("*/record.json")
    return overhead.account(json.loads(record.read_text(encoding="utf-8")), wall_s)


def main() -> int:
    """Measure, print and rewrite. Exit status 1 if `harness` imports what it must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--processes", type=int, default=21, metavar="N", help="fresh processes each (default: 21)")
    parser.add_argument("--whole-runs", type=int, default=2, metavar="N", help="runs of the suites (default: 2)")
    probe_cost.add_options(parser)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    identity = engine(arguments)
    require_places(("import", "headers", *(f"{name} {identity.engine}" for name in ("machine", "overhead", "probe"))))
    folder = RunFolder.create(ROOT / "runs").path

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        tell("1 of 4: imports")
        sought = import_time.unwanted()
        blocks = {"import": import_time.report(import_time.measure(arguments.processes), sought)}
        # Before the probe's cost: these leave the engine's files in the page cache for the starts that are compared.
        # The first of them builds the canaries.
        tell("2 of 4: whole runs")
        blocks[f"overhead {identity.engine}"] = overhead.report(
            [
                _whole_run(arguments, identity, folder / f"whole-run-{number}", Path(cache))
                for number in range(1, arguments.whole_runs + 1)
            ]
        )
        tell("3 of 4: the probe")
        measured = probe_cost.measure(identity, folder, Path(cache), starts=arguments.starts, rounds=arguments.rounds)
        blocks[f"probe {identity.engine}"] = probe_cost.report(measured)
    tell("4 of 4: headers of a large checkpoint")
    blocks["headers"] = headers.report(headers.measure(arguments.processes // 3))
    blocks[f"machine {identity.engine}"] = machine_table(identity, load_before)
    rewrite_results(blocks)
    print("\n\n".join(f"{name}\n\n{block}" for name, block in blocks.items()))
    return int(any(sought.values()))


if __name__ == "__main__":
    sys.exit(main())

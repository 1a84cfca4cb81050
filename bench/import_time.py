"""What importing draftgate costs: whole fresh processes beside a bare interpreter, and what they import."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from common import ROOT, spread, table

__all__ = ["TARGET_S", "measure", "report", "unwanted"]

TARGET_S = 0.150
"""What a process that imports `harness` may take in all."""

_ENGINES = ("torch", "vllm", "sglang")

PROCESSES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "`python -c pass`": ("pass", ()),
    "`import harness`": ("import harness", (*_ENGINES, "numpy")),
    "`import harness.cli`": ("import harness.cli", _ENGINES),
    "`draftgate --version`": ("from harness.cli import main; main(['--version'])", _ENGINES),
}
"""What is run, and which packages it must not import. The first is what the others are compared with."""

# Tells what was *sought*: where torch is not installed, nobody would find it in sys.modules.
_SOUGHT = """
import atexit, sys
sought = set()
class Recorder:
    def find_spec(self, name, path=None, target=None):
        sought.add(name.partition(".")[0])
sys.meta_path.insert(0, Recorder())
atexit.register(lambda: print(*(sought | {name.partition(".")[0] for name in sys.modules})))
exec(sys.argv[1])
"""


def _environment() -> dict[str, str]:
    # Bytecode is what an installed package has, and what the first of these processes leaves to the others.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def unwanted() -> dict[str, list[str]]:
    """Return, by process, which of the packages that it must not import it sought, installed or not.

    Raises CalledProcessError if a process fails, RuntimeError if the recorder did not even see harness.
    """
    found = {}
    for name, (statement, forbidden) in PROCESSES.items():
        if not forbidden:
            continue
        done = subprocess.run(
            [sys.executable, "-c", _SOUGHT, statement],
            cwd=ROOT,
            env=_environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        sought = set(done.stdout.splitlines()[-1].split())
        if "harness" not in sought:
            raise RuntimeError(f"the recorder saw no harness in {name}, so it sees nothing")
        found[name] = sorted(sought & set(forbidden))
    return found


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the wall seconds of `rounds` processes of each kind. Each round runs all, beginning with another one.

    One more round goes first and is not counted: it fills the page cache and writes bytecode.
    """
    names = list(PROCESSES)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            command = [sys.executable, "-c", PROCESSES[name][0]]
            began = time.perf_counter()
            subprocess.run(command, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, check=True)
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(seconds: Mapping[str, Sequence[float]], sought: Mapping[str, Sequence[str]]) -> str:
    """Return the table: per command the process's time, its ratio to the bare interpreter's, and what it adds."""
    bare = next(iter(seconds.values()))
    rows = []
    for name, values in seconds.items():
        beside = list(zip(values, bare, strict=True))
        row = [name, spread([value * 1000 for value in values], ".0f")]
        if values is bare:
            row += ["1", "", ""]
        else:
            found = ", ".join(sought[name])
            row += [
                spread([value / base for value, base in beside], ".2f"),
                spread([(value - base) * 1000 for value, base in beside], ".0f"),
                f"**{found}**" if found else f"none of {', '.join(PROCESSES[name][1])}",
            ]
        rows.append(row)
    head = ("process", "ms", "times the bare one, same round", "ms more than it", "imports")
    return (
        f"{table(head, rows)}\n\n"
        f"Median (min to max) of {len(bare)} processes each. Target: below {TARGET_S * 1000:.0f} ms."
    )


def main() -> int:
    """Print the table. Exit status 1 if a forbidden package was imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=21, metavar="N", help="processes of each kind (default: 21)")
    arguments = parser.parse_args()
    sought = unwanted()
    print(report(measure(arguments.processes), sought))
    return int(any(sought.values()))


if __name__ == "__main__":
    sys.exit(main())

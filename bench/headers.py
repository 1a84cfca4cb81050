"""How fast `draftgate inspect` reads a checkpoint of the trillion-parameter class, beside what there is else."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import ROOT, rewrite_results, spread, table

__all__ = ["measure", "report"]

SCALES = (0.1, 1.0, 5.0)
PEAK_TARGET_MIB = 300

_LISTING = "`safe_open` listing shapes"
_LIBRARY = "`inspect()`, the library call"
_COMMAND = "`draftgate inspect`, the command"

_CALLS: Mapping[str, str] = {
    _LISTING: """
from safetensors import safe_open
def call():
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as handle:
            for name in handle.keys():
                found[name] = handle.get_slice(name).get_shape()
    return len(found)
""",
    "`json` decode of all headers": """
import json, struct
def call():
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            found.update(json.loads(handle.read(length)))
    return len(found) - ("__metadata__" in found)
""",
    _LIBRARY: """
from harness.checkpoint.inspection import inspect
def call():
    found = inspect(folder)
    assert not found.findings, found.findings
    return found.totals()["tensors"]
""",
    _COMMAND: """
import contextlib, re
from harness import cli
def call():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert cli.main(["inspect", str(folder)]) == 0
    return int(re.search(r"tensors +(\\d+) of", text.getvalue())[1])
""",
}
"""Code that defines `call`, which returns the number of tensors it saw. Its imports are not in the call's time."""

_CHILD = """
import io, json, pathlib, resource, sys, time
folder = pathlib.Path(sys.argv[2])
exec(sys.argv[1])
began = time.process_time()
tensors = call()
seconds = time.process_time() - began
print(json.dumps([tensors, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def _one(code: str, folder: Path, tensors: int) -> tuple[float, float, float]:
    """Return the call's CPU seconds, the whole process's wall seconds, and its peak memory in MiB.

    Raises CalledProcessError if it fails, RuntimeError if it did not see every tensor.
    """
    # Bytecode is what an installed package has.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, code, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    wall = time.perf_counter() - began
    seen, seconds, peak = json.loads(done.stdout)
    if seen != tensors:
        raise RuntimeError(f"saw {seen} tensors of {tensors}: {code}")
    return seconds, wall, peak


def measure(rounds: int) -> dict[tuple[float, int], dict[str, list[tuple[float, float, float]]]]:
    """Return, by scale and number of tensors, what each call took in each round.

    Every call is a process of its own; each round runs all, beginning with another one. One more round goes first and
    is not counted: it brings the headers into the page cache.
    """
    found = {}
    names = list(_CALLS)
    with tempfile.TemporaryDirectory() as folder:
        for scale in SCALES:
            path = Path(folder) / f"{scale:g}"
            # Not in this process: its children would inherit its peak memory.
            command = [sys.executable, str(ROOT / "bench" / "make_checkpoint.py"), str(path), "--scale", str(scale)]
            tensors = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
            for number in range(-1, rounds):
                shift = number % len(names)
                for name in (*names[shift:], *names[:shift]):
                    row = _one(_CALLS[name], path, tensors)
                    if number >= 0:
                        rows[name].append(row)
            found[scale, tensors] = rows
    return found


def report(found: Mapping[tuple[float, int], Mapping[str, Sequence[tuple[float, float, float]]]]) -> str:
    """Return the tables."""
    rows = []
    for (scale, tensors), calls in found.items():
        listing = [seconds for seconds, _, _ in calls[_LISTING]]
        for name, values in calls.items():
            seconds = [value[0] for value in values]
            ratios = [one / other for one, other in zip(seconds, listing, strict=True)]
            rows.append(
                (
                    f"{tensors} ({scale:g}x)",
                    name,
                    spread([value * 1000 for value in seconds], ".0f"),
                    "1" if name == _LISTING else spread(ratios, ".2f"),
                    f"{min(seconds) / tensors * 1e6:.2f}",
                    spread([wall * 1000 for _, wall, _ in values], ".0f"),
                    f"{max(peak for _, _, peak in values):.0f}",
                )
            )
    head = (
        "tensors",
        "what",
        "CPU ms",
        "times `safe_open`, same round",
        "least us a tensor",
        "process, wall ms",
        "peak MiB",
    )
    count = len(next(iter(next(iter(found.values())).values())))
    return (
        f"{table(head, rows)}\n\n"
        f"Median (min to max) of {count} processes each. The call is timed in CPU time: it only computes, for the "
        "headers are in the page cache, and what else the machine does is not counted. Targets at 1x, some 211,000 "
        "tensors: the library call below the `safe_open` listing, peak memory below "
        f"{PEAK_TARGET_MIB} MiB; time linear in the number of tensors."
    )


def main() -> int:
    """Print the table, and put it into RESULTS.md if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="processes of each kind (default: 9)")
    parser.add_argument("--write", action="store_true", help="rewrite the table in RESULTS.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    block = f"{report(measure(arguments.rounds))}\nLoad average before: {load:.2f} (of {os.cpu_count()})."
    if arguments.write:
        rewrite_results({"headers": block})
    print(block)
    return 0


if __name__ == "__main__":
    sys.exit(main())

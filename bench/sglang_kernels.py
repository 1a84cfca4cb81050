"""What share of SGLang's work on a CPU goes into the reference kernels, by sampling the scheduler with py-spy.

The kernels hold no timers. py-spy looks at the scheduler's Python stack from outside while canaries are decoded; what
counts is samples below `run_batch`, and of those the ones with a frame of the reference kernels in them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from common import ROOT, add_engine_options, engine, table, tell

from harness import pairs
from harness.engines.base import EngineIdentity, Launch
from harness.engines.sglang import SglangAdapter
from harness.engines.sglang_kernels import FOLDER
from harness.errors import EvidenceError
from harness.gate.case import prepare
from harness.measure.endpoint import Prompt
from harness.report.record import RunFolder
from harness.servers.server import Server, start

_CANARIES = {"small": 256, "heavy": 48}
"""Output tokens per prompt, by canary."""

_SCHEDULER = "sglang::scheduler"
"""What SGLang calls the process that runs the models (srt/managers/scheduler.py, 0.5.23)."""

_WORK = "Scheduler.run_batch ("
"""How a frame of the method begins that runs a batch, prefill or decode (srt/managers/scheduler.py, 0.5.23)."""

_KERNELS = str(FOLDER / "sgl_kernel")
_HERTZ = 100
_LEAST = 500
"""Samples below which a share says too little."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Samples of one server: all below `run_batch`, and by kernel those within one."""

    work: int
    kernels: Mapping[str, int]
    tokens_per_second: float


def _measure(name: str, identity: EngineIdentity, folder: Path, cache: Path) -> Shares:
    [pair] = pairs.find([name], [])
    found, adapter = prepare(pair, cache, identity.python, tell), SglangAdapter()
    if found.oracle is None:
        raise EvidenceError(f"{name} is not a canary")
    launch = Launch(
        label=name,
        target=found.target.folder,
        drafter=found.drafter.folder,
        method=pair.method,
        k=pair.k,
        dtype=pair.dtype,
        runner=adapter.default_runner("cpu"),
        device="cpu",
        tokenizer=found.tokenizer,
        args=pair.launch(adapter.name).args,
        env=pair.launch(adapter.name).env,
        startup_s=pair.expect.startup_s,
        version=identity.version,
    )
    tell(f"starting {name}")
    with start(adapter.spec(identity, launch), folder / name, lambda url: adapter.ready(launch, url)) as server:
        endpoint = adapter.endpoint(launch, server.base_url)
        drawn = found.oracle.prompts(pair.workload.throughput_count, pair.workload.length, pair.workload.seed)
        prompts = [Prompt(f"p{index:02d}", token_ids=tuple(ids)) for index, ids in enumerate(drawn)]
        endpoint.generate(prompts[0], _CANARIES[name])
        stacks = folder / f"{name}.stacks"
        tell(f"sampling {name}")
        with _sampled(server, stacks):
            answers = [endpoint.generate(prompt, _CANARIES[name]) for prompt in prompts]
    shares = _count(stacks.read_text(encoding="utf-8").splitlines())
    speed = sum(len(each.token_ids) for each in answers) / sum(each.seconds for each in answers)
    return dataclasses.replace(shares, tokens_per_second=speed)


@contextlib.contextmanager
def _sampled(server: Server, stacks: Path) -> Iterator[None]:
    """Have py-spy write the scheduler's stacks to `stacks` meanwhile. Raises EvidenceError if it cannot."""
    named = [process for process in server.processes() if _SCHEDULER in " ".join(process.cmdline())]
    if len(named) != 1:
        raise EvidenceError(f"{len(named)} processes are called {_SCHEDULER}, not one")
    command = [
        Path(sys.executable).with_name("py-spy"),
        *("record", "--pid", named[0].pid, "--output", stacks, "--format", "raw", "--full-filenames"),
        *("--nonblocking", "--rate", _HERTZ, "--duration", 3600),
    ]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as spy:
        try:
            yield
        finally:
            spy.send_signal(signal.SIGINT)
            said = spy.communicate()[0]
    if spy.returncode or not stacks.exists():
        raise EvidenceError(f"py-spy could not sample the scheduler: {said.strip()[-400:]}")


def _count(lines: Iterable[str]) -> Shares:
    """Count samples: each line is frames, outermost first, "function (file:line)" joined by ";", and how often."""
    work, kernels = 0, collections.Counter[str]()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if any(frame.startswith(_WORK) for frame in frames):
            work += int(count)
            kernel = next((frame.partition(" ")[0] for frame in frames if _KERNELS in frame), None)
            if kernel is not None:
                kernels[kernel] += int(count)
    if work < _LEAST:
        raise EvidenceError(f"only {work} samples of a scheduler at work")
    return Shares(work, kernels, 0.0)


def main() -> int:
    """Print the table: a row for each kernel that was seen, a column for each canary."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--pair", action="append", choices=sorted(_CANARIES), help="only this canary (repeatable)")
    arguments = parser.parse_args()
    identity, folder = engine(arguments), RunFolder.create(ROOT / "runs").path
    names = arguments.pair or list(_CANARIES)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        found = {name: _measure(name, identity, folder, Path(cache)) for name in names}
    seen = {kernel for shares in found.values() for kernel in shares.kernels}
    order = sorted(seen, key=lambda kernel: -max(each.kernels.get(kernel, 0) / each.work for each in found.values()))
    rows = [
        ("all", *(f"{sum(each.kernels.values()) / each.work:.1%}" for each in found.values())),
        *((kernel, *(f"{each.kernels.get(kernel, 0) / each.work:.1%}" for each in found.values())) for kernel in order),
        ("samples", *(str(each.work) for each in found.values())),
        ("tokens/s while sampled", *(f"{each.tokens_per_second:.1f}" for each in found.values())),
    ]
    print(table(("share of `run_batch`", *found), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a record says of a case: the facts that a baseline keeps of it, and the counts.

A case that is running has the same facts in its folder, so that blessing and comparing read them in one way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from harness.baseline.model import SCHEMA, Acceptance, Baseline, CaseFacts, Provenance, Throughput
from harness.errors import EvidenceError, UsageError
from harness.measure.throughput import ThroughputRun
from harness.report.record import device_class

__all__ = ["accept_counts", "baseline_of", "case_facts", "log_ratios", "measurements", "provenance", "throughput_work"]

_PACKAGES = (
    "compressed-tensors",
    "flash-attn",
    "flash-attn-4",
    "flashinfer-python",
    "numpy",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "sgl-kernel",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "xformers",
)
"""The packages beside the engine that compute, or decide what is computed. The run's record has all."""


class _Launch(msgspec.Struct):
    args: list[str] = []
    env: list[tuple[str, str]] = []


class _Workload(msgspec.Struct):
    max_tokens: int
    throughput_count: int
    throughput_tokens: int


class _Pair(msgspec.Struct):
    name: str
    method: str
    k: int
    dtype: str
    workload: _Workload
    canary: str | None = None
    engines: dict[str, _Launch] = {}
    side_by_side: bool = True


class _Engine(msgspec.Struct):
    engine: str
    distribution: str
    version: str
    python_version: str
    packages: dict[str, str]


class _Digest(msgspec.Struct):
    digest: str


class _Prompts(_Digest):
    count: int


class _Judgement(msgspec.Struct):
    suite: str
    measurements: dict[str, Any]


class _Case(msgspec.Struct):
    id: str
    pair: _Pair
    engine: _Engine
    runner_asked: str
    device: str
    target: _Digest
    drafter: _Digest
    prompts: _Prompts


class _PromptCounts(msgspec.Struct):
    name: str
    drafts: int
    per_position: list[int]


class _Acceptance(msgspec.Struct):
    prompts: list[_PromptCounts]


class _Judged(msgspec.Struct):
    judgements: list[_Judgement]


class _Device(msgspec.Struct):
    """What `device_class` asks of a machine; it says itself what is missing."""

    cpu: str = ""
    cpu_flags: list[str] | None = None
    cores: int | float | None = None
    gpus: list[str] | None = None
    driver: str = ""


class _Machine(msgspec.Struct):
    cpu: str
    cores: int | float
    memory_bytes: int
    system: str
    gpus: list[str] | None
    driver: str


class _Run(msgspec.Struct):
    run: str
    draftgate: str
    finished: str
    machine: dict[str, Any]


def _read(kind: Any, data: Any, where: str) -> Any:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{where}: {str(error).replace('$.', '')}", remedy="it is no record that this draftgate wrote: run again"
        ) from error


def case_facts(case: Mapping[str, Any], machine: Mapping[str, Any]) -> CaseFacts:
    """Return what identifies a case. `case` and `machine` are a record's.

    Raises:
        UsageError: a key is missing or wrong.
        EvidenceError: the device is not known.

    """
    found: _Case = _read(_Case, case, f"case {case.get('id')}")
    _read(_Device, machine, f"the machine of case {case.get('id')}")
    return CaseFacts(
        pair=found.pair.name,
        engine=found.engine.engine,
        runner=found.runner_asked,
        device=device_class(machine, found.device),
        method=found.pair.method,
        k=found.pair.k,
        dtype=found.pair.dtype,
        target=found.target.digest,
        drafter=found.drafter.digest,
        prompts=found.prompts.digest,
        max_tokens=found.pair.workload.max_tokens,
    )


def _measured_by(record: Mapping[str, Any], case: Mapping[str, Any], run: str) -> tuple[str, Mapping[str, Any]]:
    """Return the run that measured a case of the run `run`: its name, and its draftgate, times and machine.

    Of a merged run that is the one of those it was made of which the case names: what the merged record says of the
    machine is only what they have in common. Raises UsageError if the record does not say.
    """
    runs: list[_Run] = _read(list[_Run], record.get("merged", []), "merged")
    if not runs:
        return run, record
    for each in runs:
        if each.run == case.get("run"):
            return each.run, msgspec.structs.asdict(each)
    raise UsageError(
        f"case {case.get('id')}: run is {case.get('run')!r}, and merged has {', '.join(each.run for each in runs)}",
        remedy="merge the runs again: `draftgate merge OUT RUN...`",
    )


def provenance(record: Mapping[str, Any], case: Mapping[str, Any], run: str) -> Provenance:
    """Return where the figures of a case come from; `run` and `record` are the run that measured it.

    Raises UsageError as `case_facts` does.
    """
    found: _Case = _read(_Case, case, f"case {case.get('id')}")
    machine: _Machine = _read(_Machine, record["machine"], f"the machine of case {case.get('id')}")
    launch = found.pair.engines.get(found.engine.engine, _Launch())
    cuda = found.device == "cuda"
    return Provenance(
        run=run,
        finished=str(record.get("finished") or "not finished"),
        draftgate=str(record["draftgate"]),
        distribution=found.engine.distribution,
        version=found.engine.version,
        python=found.engine.python_version,
        cpu=machine.cpu,
        cores=machine.cores,
        memory_gib=round(machine.memory_bytes / 2**30),
        system=machine.system,
        gpus=machine.gpus or [] if cuda else [],
        driver=machine.driver if cuda else "none used",
        arguments=[_without_folders(word) for word in launch.args],
        environment=[f"{name}={_without_folders(value)}" for name, value in sorted(launch.env)],
        packages={name: found.engine.packages[name] for name in _PACKAGES if name in found.engine.packages},
    )


def _without_folders(text: str) -> str:
    """Return an argument with each absolute path cut to its last part: where it lies is a fact of one machine."""
    return re.sub(r"(?<![\w.:/])~?/(?:[^\s/,:=]+/)*([^\s/,:=]+)", r"\1", text)


def measurements(case: Mapping[str, Any], suite: str) -> Mapping[str, Any] | None:
    """Return what a suite of a record's case measured, None if it did not."""
    judged: _Judged = _read(_Judged, case, f"case {case.get('id')}")
    return next((each.measurements for each in judged.judgements if each.suite == suite and each.measurements), None)


def accept_counts(measured: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return [verify steps, steps that accepted each position] of each prompt, from the acceptance suite's record.

    Raises UsageError if it is not such a record.
    """
    found: _Acceptance = _read(_Acceptance, measured, "acceptance")
    return {each.name: [each.drafts, *each.per_position] for each in found.prompts}


def log_ratios(measured: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return the log speed-up of each pair of rounds, by concurrency, from the throughput suite's record.

    Raises UsageError if it is not such a record, EvidenceError if a round has lost its partner.
    """
    run: ThroughputRun = _read(ThroughputRun, measured, "throughput")
    return {load: [pair.log_ratio for pair in run.pairs(load)] for load in run.concurrencies}


def throughput_work(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a round of the throughput suite asks of the servers, as `Throughput.of` takes it."""
    found: _Case = _read(_Case, case, f"case {case.get('id')}")
    return {
        "prompts": min(found.pair.workload.throughput_count, found.prompts.count),
        "tokens": found.pair.workload.throughput_tokens,
        "interleaved": found.pair.side_by_side,
    }


def baseline_of(record: Mapping[str, Any], case: Mapping[str, Any], run: str) -> Baseline:
    """Return what one case of a run's record measured, as a baseline. `run` is the run's name.

    Raises:
        UsageError: the record lacks a key.
        EvidenceError: acceptance was not measured on two prompts at least, the device is not known, or a round has lost
            its partner.

    """
    acceptance, throughput = measurements(case, "acceptance"), measurements(case, "throughput")
    counts = {} if acceptance is None else accept_counts(acceptance)
    if sum(row[0] > 0 for row in counts.values()) < 2:
        raise EvidenceError(
            "no acceptance was measured, or on a single prompt", remedy="run the acceptance suite on several prompts"
        )
    found: _Case = _read(_Case, case, f"case {case['id']}")
    run, origin = _measured_by(record, case, run)
    return Baseline(
        schema=SCHEMA,
        case=case_facts(case, origin["machine"]),
        provenance=provenance(origin, case, run),
        acceptance=Acceptance.of(counts, exact=found.pair.canary is not None),
        throughput=None if throughput is None else Throughput.of(log_ratios(throughput), **throughput_work(case)),
    )

"""Symptoms in a server's log: which engine and method it runs, how many tokens it drafts, how many are accepted.

Lines are those of SGLang 0.4.6.post5 to 0.5.23 (`Decode batch`, printed in `managers/scheduler.py`, later
`managers/scheduler_metrics_mixin.py`, `observability/scheduler_metrics_mixin.py` and
`managers/scheduler_components/metrics_reporter.py`; `server_args=`, `managers/tokenizer_manager.py` or
`entrypoints/engine.py`) and of vLLM 0.11.2 to 0.32.0 (`SpecDecoding metrics`, `v1/spec_decode/metrics.py`;
`Initializing a V1 LLM engine (v...)`, `v1/engine/core.py`). SGLang does not print its version.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from harness.diagnose.symptoms import OFF, Fact, Symptoms, release
from harness.errors import UsageError

__all__ = ["read"]

_DECODE = re.compile(r"Decode batch\b.*#running-req: \d+")
_SGLANG = re.compile(r"\baccept len: (?P<length>\d+\.\d+)(?:, accept rate: (?P<rate>\d+\.\d+))?")
_VLLM = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: (?P<length>\d+\.\d+|nan),.*?"
    r"Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens, "
    r"Per-position acceptance rate: (?P<positions>[\d., ]+?), Avg"
)
_VLLM_VERSION = re.compile(r"Initializing a V1 LLM engine \(v(?P<version>[^)]+)\)")
_VLLM_METHOD = re.compile(r"(?<!\w)speculative_config=(?:(?P<none>None)|SpeculativeConfig\((?P<body>[^)]*)\))")
_ARGUMENTS = re.compile(r"(?<!\w)server_args=(?:ServerArgs\(|\{)")
_ARGUMENT = re.compile(
    r"(?<!\w)'?(?P<name>speculative_algorithm|speculative_num_draft_tokens|disable_cuda_graph|device)'?\s*[=:]\s*"
    r"(?P<value>None|True|False|-?\d+|'[^']*'|\"[^\"]*\")"
    r"|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
)
"""An argument of its own; or any other quoted text, which is passed over: it may spell arguments of something else."""
_METHOD = re.compile(r"(?<!\w)method='(?P<name>[^']+)'")
_TOKENS = re.compile(r"(?<!\w)num_spec(?:ulative)?_tokens=(?P<count>\d+)")
_SYNTHETIC = re.compile(
    r"(?<!\w)rejection_sample_method'?[=:]\s*'synthetic'"
    r"|(?<!\w)(?:SGLANG_)?SIMULATE_ACC_LEN=['\"]?(?=[\d.]*[1-9])[\d.]+"
)

_LINE_LIMIT = 1 << 16
"""Characters of a line that are looked at: `server_args=` takes some 20,000."""

_CONSTANT = 10
"""Intervals after which one and the same accept length in each, neither 1 nor all, looks simulated."""


@dataclasses.dataclass
class _Seen:
    """What the lines so far have said."""

    engine: str = ""
    version: str = ""
    algorithm: str = ""
    flag_tokens: int | None = None
    graphs: bool | None = None
    simulated: str = ""
    lengths: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    weighted: float = 0.0
    plain_batches: int = 0


def read(path: Path) -> Symptoms:
    """Return what a log says.

    Averages over SGLang's intervals are plain ones, for its lines have no counts; vLLM's go by drafted tokens.

    Raises:
        UsageError: the file cannot be read, or has not one line that is known.

    """
    seen = _Seen()
    try:
        with path.open(encoding="utf-8", errors="replace") as handle:
            for line in handle:
                _look(line[:_LINE_LIMIT], seen)
    except OSError as error:
        raise UsageError(
            f"--log {path}: {error.strerror}", remedy="give the file the server's output went to"
        ) from error
    if not seen.engine:
        raise UsageError(
            f"--log {path}: not one line of SGLang's or vLLM's is in it that tells of speculation",
            remedy="give the server's whole log, from its start: `server_args=` and `Decode batch` lines of SGLang, "
            "`Initializing a V1 LLM engine` and `SpecDecoding metrics` lines of vLLM",
        )
    return _symptoms(seen, path.name)


def _look(line: str, seen: _Seen) -> None:
    if _DECODE.search(line):
        _sglang_decode(line, seen)
    elif match := _VLLM.search(line):
        _vllm_metrics(match, seen)
    elif match := _VLLM_VERSION.search(line):
        seen.engine, seen.version = "vllm", match["version"]
        _vllm_method(line, seen)
    elif match := _ARGUMENTS.search(line):
        seen.engine = "sglang"
        _sglang_arguments(line[match.end() :], seen)
    if match := _SYNTHETIC.search(line):
        seen.simulated = match[0]


def _sglang_decode(line: str, seen: _Seen) -> None:
    seen.engine = "sglang"
    accept = _SGLANG.search(line)
    if accept is None:
        seen.plain_batches += 1
        return
    seen.lengths.append(float(accept["length"]))
    if accept["rate"]:
        seen.rates.append(float(accept["rate"]))


def _vllm_metrics(match: re.Match[str], seen: _Seen) -> None:
    seen.engine = "vllm"
    if match["length"] == "nan":
        return
    seen.accepted += int(match["accepted"])
    seen.drafted += int(match["drafted"])
    seen.weighted += int(match["drafted"]) * float(match["length"])
    seen.lengths.append(float(match["length"]))
    seen.flag_tokens = match["positions"].count(",") + 1


def _vllm_method(line: str, seen: _Seen) -> None:
    match = _VLLM_METHOD.search(line)
    if match is None:
        return
    if match["none"]:
        seen.algorithm = OFF
    else:
        method, tokens = _METHOD.search(match["body"]), _TOKENS.search(match["body"])
        seen.algorithm = method["name"].lower() if method else ""
        seen.flag_tokens = int(tokens["count"]) if tokens else seen.flag_tokens


def _sglang_arguments(text: str, seen: _Seen) -> None:
    given = {match["name"]: match["value"].strip("'\"") for match in _ARGUMENT.finditer(text) if match["name"]}
    if "speculative_algorithm" in given:
        name = given["speculative_algorithm"].lower()
        seen.algorithm = OFF if name == "none" else name
    if given.get("speculative_num_draft_tokens", "None").isdigit():
        seen.flag_tokens = int(given["speculative_num_draft_tokens"])
    if given.get("device") == "cpu" or given.get("disable_cuda_graph") == "True":
        seen.graphs = False
    elif given.get("disable_cuda_graph") == "False":
        seen.graphs = True


def _symptoms(seen: _Seen, name: str) -> Symptoms:
    count = len(seen.lengths)
    source = f"{name}, {count} interval{'s' if count != 1 else ''}"
    length = rate = steps = None
    if seen.engine == "vllm" and seen.drafted:
        length = Fact(seen.weighted / seen.drafted, source)
        rate = Fact(seen.accepted / seen.drafted, source)
        steps = Fact(seen.drafted // (seen.flag_tokens or 1), source)
    elif seen.lengths:
        length = Fact(sum(seen.lengths) / count, source)
        rate = Fact(sum(seen.rates) / len(seen.rates), source) if seen.rates else None
    algorithm = Fact(seen.algorithm, f"{name}, the server's arguments") if seen.algorithm else None
    if algorithm is None and not seen.lengths and seen.plain_batches:
        algorithm = Fact(OFF, f"{name}, {seen.plain_batches} `Decode batch` lines, none of them with an accept length")
    simulated = Fact(seen.simulated, name) if seen.simulated else None
    if simulated is None and count >= _CONSTANT and len(set(seen.lengths)) == 1:
        value = seen.lengths[0]
        top = (seen.flag_tokens or 0) + (1 if seen.engine == "vllm" else 0)
        if value > 1.05 and abs(value - top) > 0.01 and top:
            simulated = Fact(f"accept length {value} in each of {count} intervals", name)
    return Symptoms(
        engine=Fact(seen.engine, name),
        version=release(seen.version, name),
        algorithm=algorithm,
        flag_tokens=Fact(seen.flag_tokens, name) if seen.flag_tokens else None,
        accept_length=length,
        steps=steps,
        accept_rate=rate,
        simulated=simulated,
        graphs=None if seen.graphs is None else Fact(seen.graphs, name),
    )

"""The SGLang adapter: its command line, its readiness, its acceptance figures and what contradicts them.

Facts were read in the wheels of SGLang 0.5.1 to 0.5.23 (sglang_evidence.toml names them), and run on 0.5.23.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import threading
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from harness.engines import sglang_kernels
from harness.engines.base import BadSign, EngineIdentity, Launch, LogFigures, server_spec
from harness.engines.http import POLL_S, HttpEndpoint, prove
from harness.engines.surface import WARM_UP_TOKENS, Surface, about_acceptance
from harness.errors import EnvironmentFault, EvidenceError, UsageError
from harness.measure.endpoint import SEVERAL, Counters, Generation, Prompt, Said, TokenLogit, Witness
from harness.servers.spec import Phase, ServerSpec

__all__ = ["DISTRIBUTIONS", "SglangAdapter", "SglangEndpoint"]

DISTRIBUTIONS = ("sglang",)

_ALGORITHMS = {"eagle3": "EAGLE3"}
"""Our methods in SGLang's words (speculative/spec_info.py, 0.5.23)."""

_PHASES = (
    Phase(r"server_args=", "reading the checkpoints' configs"),
    Phase(r"Init torch distributed begin", "starting the scheduler"),
    Phase(r"Load weight begin", "loading the target"),
    Phase(r"Load weight end", "loading the drafter"),
    Phase(r"KV Cache is allocated", "allocating the KV cache"),
    Phase(r"Capture .*graph begin", "capturing CUDA graphs"),
    Phase(r"Application startup complete", "warming up"),
    Phase(r"The server is fired up", "waiting for the first drafted tokens"),
)

_VERIFY_CALLS = "sglang:spec_verify_calls_total"
"""Counter of verify steps, added when a request ends (observability/metrics_collector.py, 0.5.15 to 0.5.23)."""

_GAUGES = ("sglang:spec_accept_length", "sglang:spec_accept_rate")
"""What dashboards show of speculation (observability/metrics_collector.py, 0.5.23); set every few verify steps."""

_GENERATED = "sglang:generation_tokens_total"
"""observability/metrics_collector.py (0.5.23)."""

_LOG_INTERVAL = 10
"""Decode steps between two updates of the scheduler's average (40 by default: a short run would never see one)."""

_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
"""Above 0, verification is bypassed and this length reported (environ.py, speculative/eagle_utils.py, 0.5.23)."""

_SETTLE_S = 3.0

_INFO_REMEDY = "the server must answer its own information page"

_METRICS_REMEDY = "check that --enable-metrics reaches the server and that nothing filters /metrics"


@dataclasses.dataclass(frozen=True)
class _Names:
    """What one range of releases calls its figures; see sglang_evidence.toml."""

    first: str
    last: str
    verify: str
    accepted: str
    proposed: str
    histogram: str
    info: str

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in (self.verify, self.accepted, self.proposed, self.histogram) if name)

    def covers(self, version: str) -> bool:
        try:
            return Version(self.first) <= Version(version) <= Version(self.last)
        except InvalidVersion:
            return False


@functools.cache
def _table() -> tuple[_Names, ...]:
    rows = tomllib.loads(Path(__file__).with_name("sglang_evidence.toml").read_text(encoding="utf-8"))["names"]
    return tuple(_Names(**row) for row in rows)


@dataclasses.dataclass(frozen=True)
class SglangAdapter:
    """SGLang through its HTTP server.

    Runners: "overlap" prepares the next batch while one runs; "sync" does not, and is all that there is on a CPU
    (arg_groups/speculative_hook.py, 0.5.23). Up to 0.5.12, EAGLE runs "sync" by default.
    """

    name: str = "sglang"
    bad_signs: tuple[BadSign, ...] = (
        BadSign(
            r"(?i)failed to (?:load|apply|register) (?:plugin|hook)",
            "a plugin of the engine failed to load",
            "read the traceback that follows it",
        ),
        BadSign(
            r"(?i)simulat\w* acc",
            "acceptance is simulated, so its figures mean nothing",
            f"unset {_SIMULATED}",
        ),
        BadSign(
            r"not found in params_dict|Some weights .* not (?:initialized|used)",
            "weights did not land",
            "see the weights suite for names",
        ),
        BadSign(
            r"(?i)speculative decoding is (?:disabled|not supported)|disabl\w+ speculative",
            "the engine turned speculation off",
            "remove the flag that the line names",
        ),
        BadSign(r"(?i)detected errors during sampling|\bnan\b.*(?:logits|hidden)", "NaN", "check dtype and checkpoint"),
        BadSign(
            r"KV cache pool is full|Retract requests",
            "the scheduler takes requests back for lack of room, which costs speed",
            "give the KV cache more room",
            fatal=False,
        ),
    )

    def spec(self, identity: EngineIdentity, launch: Launch) -> ServerSpec:
        """Return the command line of `sglang.launch_server`.

        The radix cache is off, or repeated prompts would skip the work that is being timed.
        `--speculative-num-draft-tokens` counts the root: K + 1 (topk 1).

        Raises:
            UsageError: acceptance would be simulated, or the method is none that SGLang has.
            EnvironmentFault: on a CPU, the installed SGLang calls an operator that the reference kernels lack.

        """
        environment = {**os.environ, **dict(launch.env)}
        if _positive(environment.get(_SIMULATED)):
            raise UsageError(
                f"{_SIMULATED}={environment[_SIMULATED]}: SGLang would report a simulated acceptance",
                remedy="unset it in the shell, and in the pair's engine.sglang.env",
            )
        argv = [
            str(identity.python),
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(launch.target),
            "--served-model-name",
            "target",
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
            "--dtype",
            launch.dtype,
            "--disable-radix-cache",
            "--enable-metrics",
            "--decode-log-interval",
            str(_LOG_INTERVAL),
        ]
        if not launch.tokenizer:
            argv.append("--skip-tokenizer-init")
        if launch.runner == "sync":
            argv.append("--disable-overlap-schedule")
        if launch.drafter is not None:
            if launch.method not in _ALGORITHMS:
                raise UsageError(f"SGLang has no method {launch.method!r} here", remedy=f"known: {sorted(_ALGORITHMS)}")
            argv += ["--speculative-algorithm", _ALGORITHMS[launch.method]]
            argv += ["--speculative-draft-model-path", str(launch.drafter)]
            argv += ["--speculative-num-steps", str(launch.k), "--speculative-eagle-topk", "1"]
            argv += ["--speculative-num-draft-tokens", str(launch.k + 1)]
        env, on_path = {}, []
        if launch.device == "cpu":
            argv += _CPU_ARGS
            env = _CPU_ENV
            on_path = [_kernels(identity.version, identity.site_packages)]
        return server_spec(launch, argv, env=env, phases=_PHASES, on_path=on_path)

    def endpoint(self, launch: Launch, base_url: str) -> SglangEndpoint:
        """Return the measuring side of a running server."""
        return SglangEndpoint(
            base_url, launch.label, speculative=launch.drafter is not None, version=launch.version, k=launch.k
        )

    def ready(self, launch: Launch, base_url: str) -> Mapping[str, object] | None:
        """Return proof that a generation went through the draft-and-verify loop; None while the server is not up.

        `/health` alone proves nothing: it answers while drafts are never made.

        Raises:
            ServerError: the server generates but does not draft although it was asked to, or drafts unasked.

        """
        remedy = "look in the log for why speculation is off, and whether --speculative-algorithm reached it"
        return prove(self.endpoint(launch, base_url), k=launch.k, not_on=remedy, idle=remedy)

    def surface(self, identity: EngineIdentity, launch: Launch, base_url: str) -> Surface:  # noqa: ARG002 -- protocol
        """Return the metrics, the keys of an answer's `meta_info` and those of the server's information page.

        The information page lists the launch arguments by their names, and what each scheduler says of itself.

        Raises:
            HarnessError: a page cannot be had.

        """
        endpoint = self.endpoint(launch, base_url)
        endpoint.generate(Prompt("surface", token_ids=(1, 2, 3, 5)), WARM_UP_TOKENS)
        expected = (_VERIFY_CALLS, *_GAUGES) if endpoint.speculative else ()
        return Surface(endpoint.metrics(expected, remedy=_METRICS_REMEDY), endpoint.names())

    def log_figures(self, launch: Launch) -> LogFigures:
        """Return the lines of decode batches, one every `--decode-log-interval` (scheduler_components, 0.5.23)."""
        words = [word for arg in launch.args for word in arg.split("=", 1)]
        given = [value for name, value in itertools.pairwise(words) if name == "--decode-log-interval"]
        return LogFigures("Decode batch", every=int(given[-1]) if given and given[-1].isdecimal() else _LOG_INTERVAL)

    def default_runner(self, device: str) -> str:
        """Return "sync" on a CPU, where there is no other, else "overlap"."""
        return "sync" if device == "cpu" else "overlap"

    def runner_in_force(self, log: str) -> str:
        """Return "sync" or "overlap", from the resolved arguments that the server logs (entrypoints/engine.py, 0.5.23).

        Raises:
            EvidenceError: the log does not say.

        """
        found = re.findall(r"disable_overlap_schedule'?[=:] ?(True|False)", log)
        if not found:
            raise EvidenceError("the log does not hold the resolved server arguments")
        return "sync" if found[-1] == "True" else "overlap"

    def timing_is_meaningful(self, runner: str, device: str) -> str:  # noqa: ARG002 -- the protocol's signature
        """Return "": speed can be judged under either runner, and with the reference kernels (bench/RESULTS.md)."""
        return ""


_CPU_ARGS = [
    "--device", "cpu",
    # The split flags choose this backend on any CPU; `--attention-backend` alone wants AMX, and torch_native refuses
    # EAGLE (server_args.py and arg_groups, 0.5.20 to 0.5.23). The operators behind it are the reference kernels.
    "--prefill-attention-backend", "intel_amx",
    "--decode-attention-backend", "intel_amx",
    "--max-total-tokens", "4096",
    "--max-running-requests", "8",
    "--mem-fraction-static", "0.3",
    # An idle scheduler polls without a pause, and would take a core from the server that is measured.
    "--sleep-on-idle",
]  # fmt: skip

_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}


def _positive(text: str | None) -> bool:
    try:
        return float(text or 0) > 0
    except ValueError:
        return True  # SGLang would fail on it; better here, by name


@functools.cache
def _kernels(version: str, site_packages: Path) -> str:
    """Return the folder of the reference kernels, after a look at what the installed SGLang calls."""
    lacking = sglang_kernels.missing(site_packages)
    if lacking:
        named = "; ".join(f"{name} ({where})" for name, where in sorted(lacking.items()))
        raise EnvironmentFault(
            f"SGLang {version} on a CPU calls what the reference kernels lack: {named}",
            remedy="use a release they cover (docs/sglang-cpu.md), or --device cuda on a machine with a GPU",
        )
    return str(sglang_kernels.FOLDER)


class SglangEndpoint(HttpEndpoint):
    """One running SGLang server, as the measuring code sees it.

    SGLang counts acceptance per request (`meta_info` of an answer); its gauges show the last interval only. What is
    summed here therefore covers the requests of this object, and is held against the server's own totals (`witnesses`).
    """

    def __init__(self, base_url: str, label: str, *, speculative: bool, version: str, k: int) -> None:
        super().__init__(base_url, label, speculative=speculative)
        self._version = version
        self._k = k
        self._lock = threading.Lock()
        self._names: _Names | None = next((row for row in _table() if row.covers(version)), None)
        self._known = self._names is not None
        self._answers = self._flights = self._widest = 0
        self._drafts = self._proposed = self._accepted = 0
        self._positions: list[int] = []
        self._contradiction = ""
        self._meta: set[str] = set()
        self._last_meta: Mapping[str, Any] = {}
        self._calls_before: float | None = None
        self._begun = False

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        """Answer greedily through `/generate` (token ids, text) or `/v1/chat/completions` (messages)."""
        self._begin()
        with self._lock:
            self._flights += 1
            self._widest = max(self._widest, self._flights)
        try:
            return self._generate(prompt, max_tokens)
        finally:
            with self._lock:
                self._flights -= 1

    def _generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        stops = {"stop_token_ids": list(prompt.stop_token_ids)} if prompt.stop_token_ids else {}
        if prompt.messages is None:
            sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": prompt.ignore_eos, **stops}
            asked = {"text": prompt.text} if prompt.token_ids is None else {"input_ids": list(prompt.token_ids)}
            path = "/generate"
            answer = self._post(path, {**asked, "sampling_params": sampling})
            token_ids, meta = answer.json.get("output_ids"), answer.json.get("meta_info")
            prompt_ids = prompt.token_ids
        else:
            path = "/v1/chat/completions"
            body = {
                "model": "target",
                "messages": [{"role": role, "content": content} for role, content in prompt.messages],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": prompt.ignore_eos,
                "return_token_ids": True,
                "return_meta_info": True,
                **stops,
            }
            answer = self._post(path, body)
            choice = answer.json["choices"][0]
            token_ids, meta = choice.get("response_token_ids"), choice.get("meta_info")
            prompt_ids = choice.get("prompt_token_ids")
        if token_ids is None or meta is None:
            raise EvidenceError(
                f"{self.label}: the answer of {path} has no {'token ids' if token_ids is None else 'meta_info'}",
                remedy="this SGLang does not return them; give the pair prompts of token ids, or use a newer release",
            )
        self._count(meta, len(token_ids))
        reason = meta.get("finish_reason")
        return Generation(
            token_ids=tuple(token_ids),
            seconds=answer.seconds,
            finish_reason=str(reason.get("type") if isinstance(reason, dict) else reason),
            prompt_tokens=int(meta.get("prompt_tokens", 0)),
            prompt_token_ids=None if prompt_ids is None else tuple(prompt_ids),
            send_s=answer.send_s,
            receive_s=answer.receive_s,
        )

    def counters(self) -> Counters:
        """Return the sums over the requests of this object, from `meta_info`.

        Raises:
            EvidenceError: no answer carried acceptance figures, or one whose figures contradict each other.

        """
        with self._lock:
            if self._contradiction:
                raise EvidenceError(self._contradiction, remedy="this release's figures do not mean what they say")
            if not self._drafts and not self.speculative:
                raise EvidenceError(f"{self.label}: no answer carries acceptance figures (meta_info.spec_*)")
            if self._answers and self._names is None:
                raise EvidenceError(
                    f"{self.label}: SGLang {self._version or 'of an unknown version'}: meta_info has no set of "
                    "acceptance figures that is known here",
                    remedy="check that speculation is on; add the release's names to sglang_evidence.toml",
                )
            return Counters(
                drafts=self._drafts,
                draft_tokens=self._proposed,
                accepted=self._accepted,
                per_position=tuple(self._positions) if self._answers else (0,) * self._k,
                source=self._source(),
                at=time.monotonic(),
            )

    def witnesses(self) -> tuple[Witness, ...]:
        """Return the server's own totals beside what they must be, given the sums of this object.

        The counter of verify steps must have grown by exactly ours. The scheduler's average is brought up to date every
        few decode steps and was reset when this object began, so it may lack the newest steps.
        """
        if not self.speculative or not self._drafts:
            return ()
        deadline = time.monotonic() + _SETTLE_S
        while True:
            seen = tuple(each for each in (self._verify_calls(), self._average()) if each is not None)
            if all(each.agrees for each in seen) or time.monotonic() > deadline:
                return seen
            time.sleep(POLL_S)

    def figures(self) -> dict[str, Said]:
        """Return those of the last answer (`meta_info`), of the metrics page and of the server's information page.

        The scheduler's own stand in `internal_states`, one entry a rank; where there are several, they are named so.
        """
        said = self._shown((_GENERATED,), remedy=_METRICS_REMEDY)
        path = self._info()
        states = self._read(path, remedy=_INFO_REMEDY).json().get("internal_states") or []
        with self._lock:
            pages: list[tuple[str, str, Mapping[str, Any]]] = [("meta_info", "", self._last_meta)]
        pages += [(path, SEVERAL if len(states) > 1 else "", state) for state in states[:1]]
        for place, suffix, page in pages:
            for name, value in page.items():
                if about_acceptance(name) and (figure := _figure(value)) is not None:
                    said[f"{place} {name}{suffix}"] = figure
        return said

    def next_token_logits(self, prompt_token_ids: tuple[int, ...], top: int) -> list[TokenLogit]:  # noqa: ARG002
        """Raise EvidenceError: SGLang returns log-probabilities, from which the size of a logit cannot be had."""
        raise EvidenceError(
            f"{self.label}: SGLang gives no logits, so a near-tie cannot be told from a fault",
            remedy="judge losslessness in float32 (dtype of the pair), where outputs must be equal",
        )

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the keys that answers had in `meta_info`, and those of the server's information page, by their place.

        Raises EvidenceError if the page cannot be had.
        """
        page = self._read(self._info(), remedy=_INFO_REMEDY).json()
        states = page.get("internal_states") or [{}]
        keys = {*page, *(f"internal_states.{name}" for state in states for name in state)}
        with self._lock:
            return {"meta_info": tuple(sorted(self._meta)), "server_info": tuple(sorted(keys))}

    def _info(self) -> str:
        return self._names.info if self._names is not None else "/server_info"

    def _begin(self) -> None:
        """Note where the server's own totals stand, and reset what can be reset, before the first request."""
        if not self.speculative:
            return
        with self._lock:
            if self._begun:
                return
            self._begun = True
            self._calls_before = self._calls()
            # Resets the scheduler's average (managers/scheduler_components, 0.5.23). Refused while requests run.
            self._session().post(f"{self.base_url}/flush_cache", timeout=(5, 30))

    def _count(self, meta: Mapping[str, Any], tokens: int) -> None:
        with self._lock:
            self._answers += 1
            self._meta.update(meta)
            self._last_meta = meta
            names = self._names
            if names is None and any(name.startswith("spec_") for name in meta):
                names = self._names = next((row for row in _table() if set(row.fields) <= set(meta)), None)
            if names is None or names.verify not in meta:
                return
            lacking = [name for name in names.fields if name not in meta]
            if lacking:
                self._contradiction = self._contradiction or (
                    f"{self.label}: meta_info has {names.verify} but no {', '.join(lacking)}"
                )
                return
            verify, accepted, proposed = (int(meta[each]) for each in (names.verify, names.accepted, names.proposed))
            histogram = [int(count) for count in meta[names.histogram]] if names.histogram else []
            self._contradiction = self._contradiction or _contradiction(meta, names, histogram, tokens)
            self._drafts += verify
            self._accepted += accepted
            self._proposed += proposed
            reached = [sum(histogram[position + 1 :]) for position in range(max(self._k, len(histogram) - 1))]
            if names.histogram:
                self._positions += [0] * (len(reached) - len(self._positions))
                self._positions = [was + now for was, now in zip(self._positions, reached, strict=False)]

    def _source(self) -> str:
        if self._names is None:
            return "meta_info"
        looked = "" if self._known else f" (names found by looking: SGLang {self._version or '?'} is not in the table)"
        return f"meta_info {self._names.verify}, {self._names.accepted}, {self._names.histogram}{looked}"

    def _calls(self) -> float | None:
        samples = self._samples(remedy=_METRICS_REMEDY)
        found = [sample.value for sample in samples if sample.name == _VERIFY_CALLS]
        return sum(found) if found else None

    def _verify_calls(self) -> Witness | None:
        calls = self._calls()
        if calls is None:
            return None
        with self._lock:
            drafts = float(self._drafts)
        return Witness(f"/metrics {_VERIFY_CALLS}", "verify steps", calls - (self._calls_before or 0.0), drafts, drafts)

    def _average(self) -> Witness | None:
        path = self._info()
        answer = self._read(path, remedy=_INFO_REMEDY).json()
        states = answer.get("internal_states") or [{}]
        says = [state["avg_spec_accept_length"] for state in states if state.get("avg_spec_accept_length") is not None]
        with self._lock:
            drafts, accepted, lag = self._drafts, self._accepted, _LOG_INTERVAL * max(1, self._widest)
        if len(says) != 1 or drafts <= lag:
            return None  # several ranks have several averages; a short run may be over before the first update
        # Of the newest `lag` verify steps, between none and all are missing; each accepts 0 to K.
        low, high = (accepted - self._k * lag) / (drafts - lag), accepted / (drafts - lag)
        return Witness(
            f"{path} avg_spec_accept_length", "accept length", float(says[0]), 1 + max(0.0, low), 1 + min(self._k, high)
        )


def _figure(value: object) -> Said | None:
    """Return a JSON value as a figure, None if it is none."""
    if isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value):
        return Said(tuple(map(float, value)))
    return Said(float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _contradiction(meta: Mapping[str, Any], names: _Names, histogram: list[int], tokens: int) -> str:
    """Return the first two figures of one answer that cannot both be right, or ""."""
    verify, accepted, proposed = meta[names.verify], meta[names.accepted], meta[names.proposed]
    rules: list[tuple[str, float, str, float]] = []
    if names.histogram:
        rules += [
            (f"the sum of {names.histogram}", sum(histogram), names.verify, verify),
            (f"what {names.histogram} weighs", sum(i * n for i, n in enumerate(histogram)), names.accepted, accepted),
        ]
    if "completion_tokens" in meta:
        rules.append(("meta_info completion_tokens", meta["completion_tokens"], "the tokens that came", tokens))
    if "spec_accept_rate" in meta and proposed:
        rules.append(("spec_accept_rate", meta["spec_accept_rate"], "accepted / proposed", accepted / proposed))
    if "spec_accept_length" in meta and verify:
        rules.append(("spec_accept_length", meta["spec_accept_length"], "tokens / verify steps", tokens / verify))
    for first, one, second, other in rules:
        if abs(one - other) > 1e-6 * max(1.0, abs(other)):
            return f"meta_info contradicts itself: {first} is {one:g}, {second} {other:g}"
    return ""

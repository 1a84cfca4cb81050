"""The command `draftgate load`: put a load on a server and say what it showed, and whether the client let it."""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ServerError, UsageError

if TYPE_CHECKING:
    from harness.measure.endpoint import Prompt

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `load` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "load",
        help="put a closed or open loop of requests on a running server",
        description="Sends requests to any server that speaks OpenAI's API, and prints tokens/s, latencies, and how "
        "near the client itself came to setting the pace. Exit status: 0 the figures are the server's, 2 bad input, 3 "
        "answers were cut, the figures may be the client's, or the server failed.",
    )
    parser.add_argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", default="", metavar="NAME", help="its model (default: the first that it names)")
    arrival = parser.add_mutually_exclusive_group()
    arrival.add_argument(
        "--concurrency", type=int, default=1, metavar="N",
        help="closed loop: N requests at a time, each following the last (default: 1)",
    )  # fmt: skip
    arrival.add_argument(
        "--rate", type=float, metavar="R",
        help="open loop: requests arrive at random (Poisson), R a second on average, whatever the server does",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="output tokens of each (default: 64)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help='lines of {"prompt": "..."}, sent as chats in turn (default: random token ids)',
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, metavar="N", help="random token ids a prompt (default: 128)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=1000, metavar="N", help="random token ids are below N (default: 1000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and random prompts (default: 0)")
    parser.add_argument("--stream", action="store_true", help="stream the answers, to time first tokens")
    parser.add_argument(
        "--stop-at-eos", action="store_true",
        help="let answers end early; otherwise `ignore_eos` is sent, which vLLM and SGLang know",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything, each request too (docs/load.md)")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed `load` command and return the exit status. Raises HarnessError."""
    import requests  # noqa: PLC0415 -- keeps other commands quick

    from harness.load.openai import OpenAiEndpoint  # noqa: PLC0415 -- as above
    from harness.load.report import Report  # noqa: PLC0415 -- as above
    from harness.measure.load import ClosedLoop, OpenLoop, drive  # noqa: PLC0415 -- as above
    from harness.verdict import Verdict  # noqa: PLC0415 -- as above

    for name in ("requests", "max_tokens", "prompt_tokens", "vocabulary"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}", remedy="give 1 or more")
    if not re.fullmatch(r"http://[^/\s]+(/v1)?/?", arguments.url):
        raise UsageError(
            f"{arguments.url!r} is not http://HOST:PORT",
            remedy="give a port without TLS: through TLS it cannot be told when an answer had come",
        )
    arrival = ClosedLoop(arguments.concurrency) if arguments.rate is None else OpenLoop(arguments.rate, arguments.seed)
    work = _work(arguments)
    endpoint = OpenAiEndpoint(arguments.url, model=arguments.model, stream=arguments.stream)
    try:
        load = drive(endpoint, work, arguments.max_tokens, arrival)
    except requests.RequestException as error:
        raise ServerError(
            f"{arguments.url}: {error}", remedy="see the server's log: it is gone or overloaded"
        ) from error
    report = Report(arguments.url, endpoint.model, arrival, arguments.max_tokens, not arguments.stop_at_eos, load)
    print(json.dumps(report.as_data(), indent=1) if arguments.json else report.as_text(), end="")
    return 0 if report.verdict is Verdict.PASS else 3


def _work(arguments: argparse.Namespace) -> list[Prompt]:
    from harness.gate.case import prompt_texts  # noqa: PLC0415 -- keeps other commands quick
    from harness.measure.endpoint import Prompt  # noqa: PLC0415 -- as above

    ignore_eos = not arguments.stop_at_eos
    if arguments.prompts is not None:
        if not arguments.prompts.is_file():
            raise UsageError(f"--prompts {arguments.prompts}: no such file", remedy='lines of {"prompt": "..."}')
        made = [
            Prompt(f"p{number:02d}", messages=(("user", text),), ignore_eos=ignore_eos)
            for number, text in enumerate(prompt_texts(arguments.prompts))
        ]
        return [made[number % len(made)] for number in range(arguments.requests)]
    drawn = random.Random(arguments.seed)  # noqa: S311 -- a workload, not a secret
    return [
        Prompt(
            f"r{number:04d}",
            token_ids=tuple(drawn.choices(range(arguments.vocabulary), k=arguments.prompt_tokens)),
            ignore_eos=ignore_eos,
        )
        for number in range(arguments.requests)
    ]

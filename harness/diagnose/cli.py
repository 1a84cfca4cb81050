"""The command `draftgate diagnose`: which known cause explains what is seen."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.diagnose.symptoms import Symptoms

__all__ = ["add_parser", "run"]

_OPTIONS = "the command line"


def add_parser(subparsers: Any) -> None:
    """Add `diagnose` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "diagnose",
        help="say which known cause explains a drafter that is not accepted or does not pay",
        description="Takes what is known, in any mixture, and walks the known causes in order: confirmed, likely, "
        "remaining, excluded, each with its evidence, and the next cheapest test. Starts nothing. Exit status: 0 "
        "nothing is wrong by these figures, 1 a cause is named, 2 bad input, 3 not decided.",
    )
    seen = parser.add_argument_group("symptoms")
    seen.add_argument("--log", type=Path, metavar="FILE", help="a server's log, SGLang's or vLLM's, from its start")
    seen.add_argument(
        "--record", type=Path, metavar="FILE", help="record.json of a `draftgate run`: the strongest evidence"
    )
    seen.add_argument("--case", default="", metavar="ID", help="which case of the record, if it has several")
    seen.add_argument(
        "--accept-length", type=float, metavar="X", help="tokens per verify step; 1.00 is zero drafts accepted"
    )
    seen.add_argument("--accept-rate", type=float, metavar="Y", help="as the engine prints it, a fraction")
    seen.add_argument(
        "--draft-tokens", type=int, metavar="N",
        help="as the engine's own flag says: SGLang's --speculative-num-draft-tokens counts the root (5 is K = 4), "
        "vLLM's num_speculative_tokens does not",
    )  # fmt: skip
    seen.add_argument(
        "--tokens-per-second", type=float, metavar="WITH", help="output tokens per second with speculation"
    )
    seen.add_argument("--plain-tokens-per-second", type=float, metavar="WITHOUT", help="the same without it")
    seen.add_argument(
        "--training-accuracy", type=float, metavar="P", help="step-0 accuracy in training, a fraction: 0.745"
    )
    seen.add_argument(
        "--trained-on-states-of", action="append", default=[], metavar="ENGINE",
        help="sglang, vllm or another, whose hidden states the drafter was trained on; again for a retraining that "
        "changed nothing",
    )  # fmt: skip
    served = parser.add_argument_group("what is served")
    served.add_argument(
        "--engine", default="", metavar="RELEASE", help="sglang==V or vllm==V; sglang or vllm if V is unknown"
    )
    served.add_argument(
        "--algorithm", default="", metavar="NAME", help="as the engine's flag says: EAGLE3, EAGLE, ..., none"
    )
    served.add_argument("--drafter", metavar="PATH", help="the drafter's checkpoint, as `draftgate inspect` takes it")
    served.add_argument("--target", metavar="PATH", help="the target's checkpoint")
    parser.add_argument("--json", action="store_true", help="the document that docs/diagnose.md describes")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed `diagnose` command and return the exit status. Raises `UsageError`."""
    from harness.checkpoint.read import read  # noqa: PLC0415 -- keeps other commands quick
    from harness.diagnose import acceptance, record, server_log, show, static  # noqa: PLC0415 -- as above
    from harness.diagnose.diagnosis import diagnose  # noqa: PLC0415 -- as above
    from harness.diagnose.symptoms import Symptoms, merge  # noqa: PLC0415 -- as above
    from harness.diagnose.verdicts import Case  # noqa: PLC0415 -- as above

    parts: list[Symptoms] = [_given(arguments)]
    where: dict[str, str | Path | None] = {"drafter": arguments.drafter, "target": arguments.target}
    recorded: record.Recorded | None = None
    others: tuple[str, ...] = ()
    if arguments.log is not None:
        parts.append(server_log.read(arguments.log))
    if arguments.record is not None:
        recorded = record.read(arguments.record, arguments.case)
        where = {role: path or recorded.folders[role] for role, path in where.items()}
    elif arguments.case:
        raise UsageError("--case names a case of a record", remedy="give --record FILE with it")
    if arguments.target and not where["drafter"]:
        raise UsageError("--target is compared with a drafter", remedy="give --drafter PATH with it")
    drafter = read(where["drafter"], config_optional=True) if where["drafter"] else None
    target = read(where["target"]) if where["drafter"] and where["target"] else None
    if recorded is not None:
        found, others = recorded.of(drafter=drafter, target=target)
        parts.append(found)
    symptoms, contradictions = merge(parts)
    if symptoms == Symptoms() and not contradictions and not drafter:
        raise UsageError(
            "no symptom is given",
            remedy="give --log, --record, or --accept-length with --draft-tokens; see draftgate diagnose --help",
        )
    figures = acceptance.read(symptoms)
    looked = static.look(drafter, target, symptoms, figures) if drafter else None
    case = Case(symptoms, figures, looked)
    diagnosis = diagnose(case, (*others, *contradictions), log=str(arguments.log or ""))
    try:
        (show.write_json if arguments.json else show.write_text)(diagnosis, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`; the interpreter would complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return diagnosis.exit_status


def _given(arguments: argparse.Namespace) -> Symptoms:
    """Return what the options say. Raises UsageError for a figure that cannot be."""
    from harness.diagnose.symptoms import OFF, Fact, Symptoms, release  # noqa: PLC0415 -- keeps other commands quick

    engine, version = _engine(arguments.engine)
    limits = (
        ("accept_length", 0.995, math.inf, "tokens per verify step, at least 1, for the target adds one itself"),
        ("accept_rate", 0.0, 1.0, "a fraction: 0.2, not 20"),
        ("training_accuracy", 0.0, 1.0, "a fraction: 0.745, not 74.5"),
        ("tokens_per_second", 1e-9, math.inf, "output tokens per second, above 0"),
        ("plain_tokens_per_second", 1e-9, math.inf, "output tokens per second, above 0"),
        ("draft_tokens", 1, 1000, "as the engine's flag says, at least 1"),
    )
    for name, low, high, remedy in limits:
        value = getattr(arguments, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} {value:g} cannot be", remedy=remedy)
    if engine == "sglang" and arguments.draft_tokens == 1:
        raise UsageError(
            "--draft-tokens 1 on SGLang leaves no draft, for its flag counts the root",
            remedy="give what --speculative-num-draft-tokens says: K + 1",
        )
    trained = tuple(name.strip().lower() for name in arguments.trained_on_states_of)
    return Symptoms(
        engine=Fact(engine, "--engine") if engine else None,
        version=release(version, "--engine"),
        algorithm=Fact(arguments.algorithm.lower() or OFF, "--algorithm") if arguments.algorithm else None,
        flag_tokens=_fact(arguments.draft_tokens, "--draft-tokens"),
        accept_length=_fact(arguments.accept_length, "--accept-length"),
        accept_rate=_fact(arguments.accept_rate, "--accept-rate"),
        tokens_per_second=_fact(arguments.tokens_per_second, "--tokens-per-second"),
        plain_tokens_per_second=_fact(arguments.plain_tokens_per_second, "--plain-tokens-per-second"),
        training_accuracy=_fact(arguments.training_accuracy, "--training-accuracy"),
        trained_on=Fact(trained, "--trained-on-states-of") if trained else None,
    )


def _fact(value: Any, source: str) -> Any:
    from harness.diagnose.symptoms import Fact  # noqa: PLC0415 -- keeps other commands quick

    return None if value is None else Fact(value, source)


def _engine(text: str) -> tuple[str, str]:
    from harness.contracts.environment import ENGINES, engine_release  # noqa: PLC0415 -- keeps other commands quick

    if text in ("", *ENGINES):
        return text, ""
    engine, release = engine_release(text)
    return engine, release.version

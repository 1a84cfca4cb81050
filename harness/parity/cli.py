"""The command `draftgate parity`: whether each engine feeds the drafter the target's own states."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError, ServerError, UsageError, described

if TYPE_CHECKING:
    from harness.gate.case import Case
    from harness.parity.capture import Captured
    from harness.parity.compare import Measured
    from harness.parity.reference import Reference
    from harness.report.record import RunFolder
    from harness.servers.pool import ServerPool
    from harness.verdict import Finding

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `parity` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "parity",
        help="compare the states that each engine feeds the drafter with the target's own, and with each other",
        description="Starts each engine with the pair, keeps the auxiliary hidden states that reach the drafter, runs "
        "the target once by transformers, and says layer by layer and position by position how far they are apart. "
        "Exit status: 0 all agree within the dtype, 1 they do not, 2 bad input, 3 not decided.",
    )
    add = parser.add_argument
    add("--pair", required=True, metavar="NAME", help="the pair; `draftgate pairs` lists them")
    add("--pairs-file", action="append", default=[], type=Path, metavar="FILE", help="TOML file with pairs of your own")
    add("--engine", action="append", default=[], metavar="NAME", help="vllm or sglang (repeatable; default: both)")
    add("--engine-env", action="append", default=[], metavar="RELEASE", help="make and use an environment (repeatable)")
    add("--engine-python", action="append", default=[], type=Path, metavar="PYTHON", help="one that has an engine")
    add("--engines-root", type=Path, default=Path(".tox/engines"), metavar="DIR", help="where environments are made")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="what engines and reference run on (default: cpu)")
    add("--runner", action="append", default=[], metavar="RUNNER", help="overrides the pair's (repeatable)")
    add("--prompts", type=int, default=4, metavar="N", help="so many of the pair's prompts (default: 4)")
    add("--tokens", type=int, default=16, metavar="N", help="tokens to generate for each (default: 16)")
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are made (default: runs)")
    add("--cache", type=Path, metavar="DIR", help="canaries and rebuilt targets (default: $XDG_CACHE_HOME/draftgate)")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed `parity` command and return the exit status.

    Raises:
        HarnessError: the pair or an engine cannot be had. What goes wrong later is a finding.

    """
    from harness import pairs  # noqa: PLC0415 -- keeps other commands quick
    from harness.report.record import RunFolder, exit_status, machine  # noqa: PLC0415 -- as above
    from harness.servers.history import History  # noqa: PLC0415 -- as above
    from harness.servers.pool import ServerPool  # noqa: PLC0415 -- as above
    from harness.servers.progress import Progress  # noqa: PLC0415 -- as above
    from harness.verdict import Verdict  # noqa: PLC0415 -- as above

    for name, least in (("prompts", 1), ("tokens", 2)):
        if getattr(arguments, name) < least:
            raise UsageError(f"--{name} {getattr(arguments, name)} is too few", remedy=f"give at least {least}")
    (pair,) = pairs.find([arguments.pair], arguments.pairs_file)
    pool = ServerPool(Progress(sys.stderr, History()))
    folder = RunFolder.create(arguments.runs)
    try:
        cases = _cases(arguments, pair, folder, pool)
        asked = {case.id: ["parity"] for case in cases}
        folder.write_run(started=_now(), command=shlex.join(sys.argv), machine=machine(), asked=asked)
        folder.assemble(complete=False)
        _judge(arguments, cases, folder)
    finally:
        pool.close()
    folder.write_run(finished=_now())
    record = folder.assemble(complete=True)
    print(f"{record['verdict']}: parity of {pair.name}\nrecord: {folder.path / 'record.json'}")
    return exit_status(Verdict(record["verdict"]))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _tell(text: str) -> None:
    print(f"draftgate: {text}", file=sys.stderr, flush=True)


def _cases(arguments: argparse.Namespace, pair: Any, folder: RunFolder, pool: ServerPool) -> list[Case]:
    """Return a case for each engine and model runner, in order, none of them started."""
    from harness.engines.adapters import ADAPTERS, engine_of  # noqa: PLC0415 -- keeps other commands quick
    from harness.engines.choose import choose  # noqa: PLC0415 -- as above
    from harness.engines.releases import EngineRelease  # noqa: PLC0415 -- as above
    from harness.gate.case import Case, prepare  # noqa: PLC0415 -- as above
    from harness.pairs.load import ENGINES  # noqa: PLC0415 -- as above

    releases = [EngineRelease.parse(text) for text in arguments.engine_env]
    names = list(dict.fromkeys(arguments.engine or [engine_of(release) for release in releases] or ADAPTERS))
    if unknown := [name for name in names if name not in ADAPTERS]:
        raise UsageError(f"--engine {unknown[0]} is not known", remedy=f"one of: {', '.join(ADAPTERS)}")
    cache = arguments.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftgate"
    cases = []
    for name in names:
        identity = choose(
            name,
            releases=releases,
            pythons=arguments.engine_python,
            device=arguments.device,
            root=arguments.engines_root,
            progress=_tell,
        )
        adapter = ADAPTERS[name][0]
        checkpoints = prepare(pair, cache.resolve(), identity.python, _tell)
        if unknown := [runner for runner in arguments.runner if runner not in ENGINES[name]]:
            raise UsageError(f"--runner {unknown[0]}: {name} has {', '.join(ENGINES[name])}")
        runners = arguments.runner or pair.launch(name).runners or (adapter.default_runner(arguments.device),)
        for runner in runners:
            key = f"{pair.name}-{name}-{runner}"
            case = Case(
                key,
                pair,
                adapter,
                identity,
                runner,
                arguments.device,
                folder.case(key),
                checkpoints,
                pool,
                keep_features=True,
            )
            folder.write_case(key, **case.facts())
            cases.append(case)
    return cases


def _judge(arguments: argparse.Namespace, cases: list[Case], folder: RunFolder) -> None:
    """Capture on each engine in turn, run the reference once, and write and print a judgement of each case."""
    from harness.parity import reference  # noqa: PLC0415 -- keeps other commands quick
    from harness.parity.judge import nothing, unusable  # noqa: PLC0415 -- as above

    first = cases[0]
    captured: dict[str, Captured] = {}
    findings: dict[str, list[Finding]] = {case.id: [] for case in cases}
    seconds: dict[str, float] = {}
    prompts = first.prompts[: arguments.prompts]
    for case in cases:
        start = time.monotonic()
        found = _captured(case, arguments)
        seconds[case.id] = time.monotonic() - start
        if isinstance(found, HarnessError):
            # The log and the stacks of a server that did not start are printed once; the record has the message.
            _tell(described(found))
            findings[case.id].append(nothing(found.message, found.remedy))
        else:
            captured[case.id] = found
    made: Reference | None = None
    if captured:
        _tell("running the target by transformers")
        try:
            made = reference.run(
                first.identity.python,
                first.checkpoints.target.folder,
                sequences=[rows.token_ids for found in captured.values() for rows in found.rows],
                prompts=prompts,
                dtype=first.pair.dtype,
                device=arguments.device,
                folder=folder.path / "reference",
                trust_remote_code="--trust-remote-code" in first.pair.launch(first.adapter.name).args,
            )
        except HarnessError as error:
            for case_id in captured:
                findings[case_id].append(unusable(error.message, error.remedy))
    done: list[tuple[Case, Captured, Measured]] = []
    for case in cases:
        measurements: dict[str, Any] = {}
        if made is not None and case.id in captured:
            measurements = _compare(case, captured[case.id], made, done, findings[case.id])
        _conclude(folder, case, findings[case.id], measurements, seconds[case.id])


def _captured(case: Case, arguments: argparse.Namespace) -> Captured | HarnessError:
    from harness.parity.capture import capture  # noqa: PLC0415 -- keeps other commands quick

    try:
        return capture(case, case.prompts[: arguments.prompts], arguments.tokens)
    except ExceptionGroup as group:
        return ServerError("; ".join(str(error) for error in group.exceptions), remedy="see the server's log")
    except HarnessError as error:
        return error


def _compare(
    case: Case,
    found: Captured,
    made: Reference,
    done: list[tuple[Case, Captured, Measured]],
    findings: list[Finding],
) -> dict[str, Any]:
    """Add the findings on one case, against the reference and against the first case, and return the numbers."""
    from harness.errors import EvidenceError  # noqa: PLC0415 -- beside its only use
    from harness.parity import judge, show  # noqa: PLC0415 -- keeps other commands quick
    from harness.parity.compare import between, measure  # noqa: PLC0415 -- as above

    want, dtype = case.expected_aux(), case.pair.dtype
    tokens = judge.judge_tokens(found.asked, made.tokens, case.adapter.name)
    findings += tokens
    if any(finding.verdict != "PASS" for finding in tokens):
        return {}
    try:
        measured = measure(found.rows, made.forwards, want.layers, dtype)
    except EvidenceError as error:
        findings.append(judge.nothing(error.message, error.remedy))
        return {}
    findings += judge.judge_engine(case.adapter.name, case.identity.version, measured, want, found, dtype)
    numbers: dict[str, Any] = {"reference": dict(made.made_with), **show.numbers(measured)}
    if done:
        other, theirs, before = done[0]
        names = (_name(other), _name(case))
        hidden = next(iter(made.forwards.values())).wide.shape[2]
        try:
            both = between(theirs.rows, found.rows, hidden)
        except EvidenceError as error:
            findings.append(judge.incomparable(names, error.message))
        else:
            findings += judge.judge_between(names, (before, measured), both)
            numbers["against"] = {"case": other.id, **show.between_numbers(*both)}
    done.append((case, found, measured))
    show.write_table(case.id, measured, sys.stdout)
    return numbers


def _name(case: Case) -> str:
    return f"{case.adapter.name} {case.identity.version} ({case.runner})"


def _conclude(
    folder: RunFolder, case: Case, findings: list[Finding], measurements: dict[str, Any], seconds: float
) -> None:
    from harness.verdict import Judgement  # noqa: PLC0415 -- keeps other commands quick

    judgement = Judgement("parity", tuple(findings), measurements)
    folder.write_judgement(case.id, "parity", judgement, seconds=seconds)
    folder.assemble(complete=False)
    print(f"{judgement.verdict}: {case.id}\n{judgement.as_text()}\n")

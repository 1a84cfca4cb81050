"""The command `draftgate convert`: write a drafter as another engine or trainer wants it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.verdict import Verdict

if TYPE_CHECKING:
    from harness.convert.plan import Plan

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `convert` to argparse's subparsers."""
    parser = subparsers.add_parser(
        "convert",
        help="rewrite a drafter's names and config for another engine or trainer",
        description="Tensors are copied byte for byte. Exit status: 0 done, 1 done but the release would not load all "
        "of it, 2 refused and nothing written, 3 done but not known to be right, or it could not be written.",
    )
    parser.add_argument("source", metavar="SRC", help="the drafter, as `draftgate inspect` takes it")
    parser.add_argument("destination", metavar="DST", type=Path, help="a folder that does not exist")
    parser.add_argument("--to", required=True, choices=("sglang", "vllm", "speculators", "specforge", "modelopt"))
    parser.add_argument("--engine-version", metavar="V", help="release of the engine (default: the tested one)")
    parser.add_argument(
        "--contract", type=Path, metavar="FILE", help="the release's contract, by `draftgate contract derive`"
    )
    parser.add_argument("--target", metavar="PATH", help="the target's checkpoint: which layers, which verifier")
    parser.add_argument(
        "--aux-ids-are", choices=("inputs", "outputs"),
        help="what the source's auxiliary layer ids count, where its dialect does not say",
    )  # fmt: skip
    parser.add_argument(
        "--lossy", action="append", default=[], metavar="KEY", help="accept the loss of KEY; may be given again"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the whole plan and write nothing")


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed `convert` command and return the exit status. Raises `HarnessError`."""
    from harness.checkpoint.read import read  # noqa: PLC0415 -- keeps other commands quick
    from harness.contracts import check, model, show  # noqa: PLC0415 -- as above
    from harness.convert import plan, write  # noqa: PLC0415 -- as above

    contract = model.load(arguments.contract) if arguments.contract else None
    target = read(arguments.target) if arguments.target else None
    lossy = tuple(dict.fromkeys(arguments.lossy))
    request = plan.Request(arguments.to, arguments.engine_version, lossy, arguments.aux_ids_are, target, contract)
    made = plan.make(read(arguments.source), request)
    where = Path(arguments.source).expanduser()
    write.require_place(made, where, arguments.destination)
    for line in _lines(made, every=arguments.dry_run):
        print(line)
    if arguments.dry_run:
        for name, size in write.files(made, where):
            print(f"file     {name}  {size:,} bytes")
        written = made.preview
    else:
        print(f"written  {write.write(made, where, arguments.destination)}", flush=True)
        written = read(arguments.destination)
    if not made.release:
        return 0
    if made.contract is None:
        report = check.unknown_release(made.release, model.versions(made.to))
    else:
        report = check.check(written, target, made.contract)
    print(show.render([report], str(arguments.destination), "text"), end="")
    return {Verdict.PASS: 0, Verdict.FAIL: 1}.get(report.verdict, 3)


def _lines(made: Plan, *, every: bool) -> Iterator[str]:
    yield f"from     {made.drafter.checkpoint.folder} ({made.drafter.about.dialect or 'no known dialect'})"
    yield f"to       {made.release or made.to}"
    if every:
        yield from (f"rename   {_safe(old)} -> {new}" for old, new in made.renames.items())
        yield from (f"config   {_safe(str(edit))}" for edit in made.edits)
    else:
        yield f"changes  {len(made.renames)} of {len(made.names)} names, {len(made.edits)} values of the config"
    for name, (dtype, shape, _) in made.added.items():
        yield f"add      {name} {dtype} {list(shape)}, made from d2t"
    for loss in made.lost:
        gone = f" (tensors: {', '.join(loss.tensors)})" if loss.tensors else ""
        yield f"lost     {_safe(loss.key)}: {loss.why}{gone}"
    yield from (f"note     {note}" for note in made.notes)


def _safe(text: str) -> str:
    """Return a text of the checkpoint's as it may be printed."""
    return text if text.isprintable() else ascii(text)

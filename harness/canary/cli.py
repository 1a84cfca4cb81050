"""The command `draftgate canary`: build a pair, list what ships, inject a fault."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from harness.canary.spec import SHIPPED, CanarySpec, Dialect
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `canary` and its actions to argparse's subparsers."""
    canary = subparsers.add_parser("canary", help="pairs whose acceptance is known by arithmetic")
    actions = canary.add_subparsers(dest="canary_action", required=True)

    make = actions.add_parser("build", help="write a pair to a folder, or leave it if it is there")
    make.add_argument("shipped", nargs="?", default="small", help="the shipped pair to start from (default: small)")
    make.add_argument("folder", type=Path)
    make.add_argument("--name", help="the new pair's name (default: the shipped one's)")
    for field in dataclasses.fields(CanarySpec):
        if field.name in _NUMBERS:
            make.add_argument(f"--{field.name.replace('_', '-')}", type=_NUMBERS[field.name])
        elif field.name in _FLAGS:
            make.add_argument(f"--{field.name.replace('_', '-')}", action="store_true", default=None)
    make.add_argument("--aux-layers", type=int, nargs=3, metavar="LAYER", help="inputs of these layers")
    make.add_argument("--aux-ids", choices=("none", "top-level", "nested"))
    make.add_argument("--aux-ids-are", choices=("inputs", "outputs"))
    make.add_argument("--dtype", choices=("bfloat16", "float32"))
    make.add_argument("--dialect", choices=get_args(Dialect))

    actions.add_parser("list", help="the shipped pairs and the faults")

    fault = actions.add_parser("fault", help="write a copy of a canary's drafter with one fault")
    fault.add_argument("canary", type=Path, help="a folder that `canary build` wrote")
    fault.add_argument("fault")
    fault.add_argument("into", type=Path)
    fault.add_argument("arguments", nargs="*", help="what the fault takes, see `canary list`")
    fault.add_argument("--seed", type=int, default=0)


_NUMBERS: dict[str, type] = {
    **dict.fromkeys(
        ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "classes", "vocab", "seed"), int
    ),
    "max_positions": int,
    "wrong_fraction": float,
}
_FLAGS = (
    "own_embed_tokens",
    "full_draft_vocab",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "attention_bias",
)


def run(args: argparse.Namespace) -> int:
    """Carry out a parsed `canary` command and return the exit status. Raises `UsageError`."""
    actions = {"build": _build, "list": _list, "fault": _fault}
    for line in actions[args.canary_action](args):
        sys.stdout.write(line + "\n")
    return 0


def _build(args: argparse.Namespace) -> list[str]:
    from harness.canary.build import build  # noqa: PLC0415 -- other commands do without it

    if args.shipped not in SHIPPED:
        raise UsageError(f"no shipped canary {args.shipped!r}", remedy=f"choose from {', '.join(SHIPPED)}")
    names = ("name", *_NUMBERS, *_FLAGS, "aux_layers", "aux_ids", "aux_ids_are", "dtype", "dialect")
    chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "layers" in chosen:
        chosen.setdefault("aux_layers", None)
    if chosen.get("aux_layers"):
        chosen["aux_layers"] = tuple(chosen["aux_layers"])
    canary = build(dataclasses.replace(SHIPPED[args.shipped], **chosen), args.folder)
    return [f"{canary.spec.name}: {canary.folder} (fingerprint {canary.spec.fingerprint[:12]})"]


def _list(_args: argparse.Namespace) -> list[str]:
    from harness.canary.faults import FAULTS  # noqa: PLC0415 -- numpy, only when asked for

    width = max(map(len, (*SHIPPED, *FAULTS)))
    pairs = [
        f"  {name:{width}}  hidden {spec.hidden}, {spec.layers} layers, aux {spec.aux}, {spec.wrong_fraction:.0%} wrong"
        for name, spec in SHIPPED.items()
    ]
    faults = [
        f"  {name:{width}}  {' '.join([*map(str.upper, fault.arguments), fault.summary])}"
        for name, fault in FAULTS.items()
    ]
    return ["pairs", *pairs, "faults", *faults]


def _fault(args: argparse.Namespace) -> list[str]:
    from harness.canary.build import load  # noqa: PLC0415 -- as above
    from harness.canary.faults import apply  # noqa: PLC0415 -- numpy, only when asked for

    into = apply(args.fault, load(args.canary).drafter, args.into, *args.arguments, seed=args.seed)
    return [f"{args.fault}: {into}"]

"""Whether `d2t` and `t2d` map a draft vocabulary onto the target's: in range, rising, one with the other.

`d2t` holds offsets: draft token *i* is target token `i + d2t[i]` (vLLM 0.32.0 `models/llama_eagle3.py`, in
`compute_logits`; SGLang 0.5.23 `models/llama_eagle3.py`, `hot_token_id`). Some exporters write the target token itself,
which every engine then takes for an offset. `t2d` says for each target token whether the draft vocabulary has it; no
engine reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.checkpoint.findings import Finding, Severity
from harness.checkpoint.read import Checkpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.checkpoint.recognise import Recognition

__all__ = ["READ_LIMIT", "Mapping", "judge"]

READ_LIMIT = 16 << 20
"""Bytes. A `d2t` of 160,000 tokens takes 1.3 MB; what is larger is not read."""

_INTEGERS = ("I64", "I32", "I16", "U64", "U32", "U16")


@dataclasses.dataclass(frozen=True)
class Mapping:
    """What was read: how many draft tokens `d2t` maps, and how many target tokens `t2d` marks. None: not there."""

    d2t: int | None
    t2d: int | None
    first_targets: tuple[int, ...] = ()


def judge(checkpoint: Checkpoint, about: Recognition) -> tuple[Mapping | None, tuple[Finding, ...]]:
    """Read `d2t` and `t2d`, where there are any, and judge them. Codes: INS201 to INS208, see docs/inspect.md."""
    if about.method in ("model", "unknown"):
        return None, ()
    names = {role: _name(checkpoint, about, role) for role in ("d2t", "t2d")}
    if not any(names.values()):
        return None, tuple(_absent(checkpoint, about))
    findings: list[Finding] = []
    d2t = _read(checkpoint, names["d2t"], _INTEGERS, findings)
    t2d = _read(checkpoint, names["t2d"], ("BOOL", "U8"), findings)
    if d2t is not None:
        findings += _judge_d2t(checkpoint, about, names["d2t"], d2t, t2d)
    if t2d is not None:
        findings += _judge_t2d(about, names["t2d"], t2d, None if d2t is None else len(d2t))
    mapping = Mapping(
        None if d2t is None else len(d2t),
        None if t2d is None else int((t2d != 0).sum()),
        () if d2t is None else tuple(int(index + offset) for index, offset in enumerate(d2t[:3].tolist())),
    )
    return mapping, tuple(findings)


def _name(checkpoint: Checkpoint, about: Recognition, role: str) -> str:
    return next((name for name in (f"{about.wrapper}{role}", role) if checkpoint.find(name) is not None), "")


def _read(checkpoint: Checkpoint, name: str, dtypes: tuple[str, ...], findings: list[Finding]) -> NDArray[Any] | None:
    tensor = checkpoint.find(name) if name else None
    if tensor is None:
        return None
    if tensor.dtype not in dtypes or len(tensor.shape) != 1:
        findings.append(
            Finding(
                "INS201",
                Severity.ERROR,
                name,
                f"is {tensor.dtype} {list(tensor.shape)}, not one row of {' or '.join(dtypes)}",
                "export the mapping again",
            )
        )
        return None
    if tensor.nbytes > READ_LIMIT:
        findings.append(
            Finding("INS202", Severity.WARNING, name, f"takes {tensor.nbytes} bytes, above {READ_LIMIT}: not read")
        )
        return None
    from harness.checkpoint.data import whole  # noqa: PLC0415 -- numpy, only where there is a mapping

    return whole(checkpoint.shard_of(name), name)


def _absent(checkpoint: Checkpoint, about: Recognition) -> Iterator[Finding]:
    if about.method not in ("eagle3", "p-eagle") or about.draft_vocab is None or about.vocab is None:
        return
    if about.draft_vocab != about.vocab:
        yield Finding(
            "INS203",
            Severity.ERROR,
            str(checkpoint.folder),
            f"no d2t, though the draft vocabulary of {about.draft_vocab} is not the target's of {about.vocab}: draft "
            "tokens would be taken for target tokens of the same number",
            "export the drafter with its d2t",
        )


def _judge_d2t(
    checkpoint: Checkpoint, about: Recognition, name: str, d2t: NDArray[Any], t2d: NDArray[Any] | None
) -> Iterator[Finding]:
    import numpy as np  # noqa: PLC0415 -- as above

    head = checkpoint.find(f"{about.wrapper}lm_head.weight") or checkpoint.find("lm_head.weight")
    # An lm_head without any dimension has no row.
    rows = None if head is None else head.shape[0] if head.shape else 0
    lengths = {"the config's draft vocabulary": about.draft_vocab, "lm_head": rows}
    for what, length in lengths.items():
        if length is not None and length != len(d2t):
            yield Finding(
                "INS204",
                Severity.ERROR,
                name,
                f"maps {len(d2t)} draft tokens, {what} has {length}",
                "export d2t, lm_head and draft_vocab_size from one and the same run",
            )
            break
    values = d2t.astype(np.int64)
    vocab = len(t2d) if t2d is not None else about.vocab
    as_offsets = _Reading(values + np.arange(len(values)), vocab, t2d)
    as_ids = _Reading(values, vocab, t2d)
    if not as_offsets.right and as_ids.right:
        yield Finding(
            "INS205",
            Severity.ERROR,
            name,
            "holds the target tokens themselves, not offsets: as tokens they rise and stay in range, as offsets "
            + as_offsets.wrong,
            "subtract the row number: d2t - arange(len(d2t))",
        )
    elif not as_offsets.right:
        yield Finding("INS206", Severity.ERROR, name, f"as offsets, {as_offsets.wrong}", "export the mapping again")
    elif t2d is None and len(values) > 1 and as_ids.right:
        yield Finding(
            "INS207",
            Severity.WARNING,
            name,
            "no two of its target tokens are neighbours, whether it is read as offsets or as tokens: there is no t2d "
            "to say which it is",
            "compare with the exporter; engines read offsets",
        )
    elif not values.any() and vocab is not None and len(values) < vocab:
        yield Finding(
            "INS208",
            Severity.WARNING,
            name,
            f"is all zero: the draft vocabulary would be the first {len(values)} of {vocab} target tokens",
            "export the mapping again, unless the drafter was trained so",
        )


class _Reading:
    """One way to read `d2t`: what would be wrong with its targets, or `right`."""

    def __init__(self, targets: NDArray[Any], vocab: int | None, t2d: NDArray[Any] | None) -> None:
        import numpy as np  # noqa: PLC0415 -- as above

        self.wrong = ""
        beyond = np.flatnonzero((targets < 0) | (targets >= vocab if vocab is not None else False))
        falling = np.flatnonzero(np.diff(targets) <= 0) + 1
        if len(beyond):
            row = int(beyond[0])
            self.wrong = (
                f"{len(beyond)} rows leave the target's vocabulary of {vocab}: row {row} is token {int(targets[row])}"
            )
        elif len(falling):
            row = int(falling[0])
            self.wrong = (
                f"tokens do not rise strictly in {len(falling)} rows: row {row - 1} is token {int(targets[row - 1])}, "
                f"row {row} token {int(targets[row])}"
            )
        elif t2d is not None and not np.array_equal(np.flatnonzero(t2d), targets):
            marked = t2d[targets] != 0
            where = (
                f"row {int(np.argmin(marked))} is token {int(targets[np.argmin(marked)])}, which" if len(marked) else ""
            )
            self.wrong = (
                f"t2d disagrees: {where} t2d does not mark" if not marked.all() else "t2d marks tokens that d2t lacks"
            )
        self.right = not self.wrong


def _judge_t2d(about: Recognition, name: str, t2d: NDArray[Any], mapped: int | None) -> Iterator[Finding]:
    if about.vocab is not None and len(t2d) != about.vocab:
        yield Finding(
            "INS209",
            Severity.ERROR,
            name,
            f"has {len(t2d)} rows, the target's vocabulary is {about.vocab}",
            "export the mapping again, for this target",
        )
    if (t2d > 1).any():
        yield Finding("INS210", Severity.ERROR, name, "holds bytes other than 0 and 1", "export the mapping again")
    marks = int((t2d != 0).sum())
    wanted = mapped if mapped is not None else about.draft_vocab
    if wanted is not None and marks != wanted:
        yield Finding(
            "INS211",
            Severity.ERROR,
            name,
            f"marks {marks} target tokens, the draft vocabulary has {wanted}",
            "export the mapping again",
        )

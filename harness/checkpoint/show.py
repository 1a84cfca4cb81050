"""How an inspection is printed: a table in a terminal, aligned text elsewhere, or JSON."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import IO, Any, BinaryIO

from harness.checkpoint.findings import Finding, Severity
from harness.checkpoint.inspection import Inspection
from harness.checkpoint.recognise import METHODS

__all__ = ["write_json", "write_table"]

_LISTED = 100
"""Above this many tensors, those that differ only in numbers are one line."""
_SAME_CODE = 10
"""Findings of one code that are printed; the rest is counted."""

_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_RIGHT = ("count", "bytes", "nan", "inf", "constant rows")


def write_json(found: Inspection, file: BinaryIO) -> None:
    """Write the document that docs/inspect.md describes. What JSON has no number for (NaN in a config) is null."""
    import msgspec  # noqa: PLC0415 -- only for this

    file.write(msgspec.json.format(msgspec.json.encode(found.as_json()), indent=1) + b"\n")


def write_table(found: Inspection, file: IO[str], *, every_tensor: bool = False) -> None:
    """Write facts, tensors or their families, and findings."""
    facts = list(_facts(found))
    head, rows = _rows(found, every_tensor=every_tensor)
    findings = list(_findings(found.findings))
    if file.isatty():
        _write_rich(facts, head, rows, findings, file)
        return
    width = max(len(label) for label, _ in facts)
    for label, text in facts:
        file.write(f"{label:{width}}  {text}\n")
    file.write("\n")
    for line in _aligned(head, rows):
        file.write(line + "\n")
    for _, text in findings:
        file.write(text + "\n")


def _write_rich(
    facts: Sequence[tuple[str, str]],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    findings: Sequence[tuple[Severity, str]],
    file: IO[str],
) -> None:
    from rich.console import Console  # noqa: PLC0415 -- 60 ms at import
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(file=file, highlight=False)
    grid = Table.grid(padding=(0, 2))
    for label, text in facts:
        grid.add_row(Text(label, style="bold"), Text(text))
    console.print(grid)
    table = Table()
    for name in head:
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    for severity, text in findings:
        console.print(Text(text, style=_STYLE[severity]))


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def printable(text: str) -> str:
    """Return a text that cannot move the cursor or change colours: a name in a header may hold anything."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def human(size: int) -> str:
    """Return bytes for people."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    checkpoint, about, totals = found.checkpoint, found.recognition, found.totals()
    files = checkpoint.files
    yield "checkpoint", printable(str(files.folder))
    if files.repository:
        yield "repository", f"{printable(files.repository)} at {printable(files.revision)}"
    index = f" by {files.index_file.name}" if files.index_file else ""
    what = (
        printable(checkpoint.shards[0].path.name) if len(checkpoint.shards) == 1 else f"{len(checkpoint.shards)} files"
    )
    yield "weights", f"{what}{index}, {human(checkpoint.size)}"
    kinds = ", ".join(
        f"{dtype} {row['tensors']} ({human(row['bytes'])})"
        for dtype, row in sorted(totals["by_dtype"].items(), key=lambda item: -item[1]["bytes"])
    )
    yield "tensors", f"{totals['tensors']} of {totals['elements']:,} elements: {kinds}"
    mtp = "; has MTP / NextN layers" if about.contains_mtp else ""
    yield "method", f"{METHODS[about.method]}{mtp} [{printable(about.method_source)}]"
    if about.dialect or about.layer:
        named = f", layers named {about.wrapper}{about.layer}*" if about.layer else ""
        yield "dialect", f"{about.dialect or 'not recognised'}{printable(named)}"
    if checkpoint.files.config:
        yield "config", printable(_config(checkpoint.config, about.architectures))
    if about.aux_count is not None or about.aux_layers:
        yield "auxiliary", printable(_auxiliary(found))
    if about.draft_vocab is not None:
        yield "vocabulary", _vocabulary(found)


def _config(config: Any, architectures: tuple[str, ...]) -> str:
    body = config.get("transformer_layer_config") or config.get("text_config") or config
    keys = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    parts = [f"{key} {body[key]}" for key in keys if isinstance(body, dict) and isinstance(body.get(key), int | str)]
    return ", ".join([*architectures, *parts]) or "no key that is known"


def _auxiliary(found: Inspection) -> str:
    about = found.recognition
    width = f"{about.aux_count} hidden states of {about.target_hidden}" if about.aux_count else "unknown width"
    ids = "; ".join(f"{aux.key} {list(aux.ids)}" for aux in about.aux_layers)
    return f"{width}, layers: {ids or 'not named, the engine takes its default'}"


def _vocabulary(found: Inspection) -> str:
    about, mapping = found.recognition, found.mapping
    text = f"draft {about.draft_vocab}" + (f" of {about.vocab}" if about.vocab else "")
    if mapping is None:
        return f"{text}, no d2t or t2d"
    parts = [f"d2t maps {mapping.d2t}" if mapping.d2t is not None else "no d2t"]
    parts.append(f"t2d marks {mapping.t2d}" if mapping.t2d is not None else "no t2d")
    return f"{text}: {', '.join(parts)}"


def _rows(found: Inspection, *, every_tensor: bool) -> tuple[list[str], list[list[str]]]:
    chosen = found.checkpoint.shards if not found.only else None
    count = sum(len(shard.tensors) for shard in chosen) if chosen else sum(1 for _ in found.tensors())
    if not (every_tensor or found.statistics) and count > _LISTED:
        return _family_rows(found)
    several = len(found.checkpoint.shards) > 1
    head = ["tensor", "dtype", "shape", "bytes", *(["file"] if several else [])]
    if found.statistics:
        head += ["nan", "inf", "all zero", "constant rows"]
    rows = []
    for name, tensor, shard in found.tensors():
        row = [printable(name), tensor.dtype, _shape(tensor.shape), str(tensor.nbytes)]
        row += [printable(shard.path.name)] if several else []
        if found.statistics:
            seen = found.statistics[name]
            zero = "yes" if seen.all_zero else ""
            row += [str(seen.nan or ""), str(seen.inf or ""), zero, str(seen.constant_rows or "")]
        rows.append(row)
    return head, rows


def _family_rows(found: Inspection) -> tuple[list[str], list[list[str]]]:
    families = found.checkpoint.families
    if found.only:
        from harness.checkpoint.families import group  # noqa: PLC0415 -- only when filtered

        families = group([{name: tensor for name, tensor, _ in found.tensors()}])
    rows = [
        [printable(family.pattern), str(family.count), family.dtype, _shape(family.shape), str(family.nbytes)]
        for family in families
    ]
    return ["tensors that differ in numbers (--all lists each)", "count", "dtype", "shape", "bytes"], rows


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _findings(findings: Sequence[Finding]) -> Iterator[tuple[Severity, str]]:
    """Yield what is to be printed, errors first, at most `_SAME_CODE` of a code."""
    ranks = list(Severity)
    seen: collections.Counter[str] = collections.Counter()
    ordered = sorted(findings, key=lambda finding: ranks.index(finding.severity))
    for finding in ordered:
        seen[finding.code] += 1
        if seen[finding.code] <= _SAME_CODE:
            text = f"{finding.severity} [{finding.code}] {printable(finding.where)}: {printable(finding.summary)}"
            yield finding.severity, text + (f"\n    remedy: {printable(finding.remedy)}" if finding.remedy else "")
    for code, count in seen.items():
        if count > _SAME_CODE:
            severity = next(finding.severity for finding in ordered if finding.code == code)
            yield severity, f"{severity} [{code}] {count - _SAME_CODE} more; --json lists them"

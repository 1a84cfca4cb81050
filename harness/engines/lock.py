"""Locks: every distribution of an environment at one version, as a requirements file with hashes."""

from __future__ import annotations

import dataclasses
import hashlib
import re

from packaging.requirements import InvalidRequirement, Requirement

from harness.engines.releases import canonical
from harness.errors import UsageError

__all__ = ["Locked", "digest", "read"]


@dataclasses.dataclass(frozen=True)
class Locked:
    """One distribution of a lock: at `version` from the package index, or from `url`; the other is "".

    `text` is its entry in the lock, hashes included.
    """

    name: str
    version: str
    url: str
    text: str


def digest(text: str) -> str:
    """Return the sha256 of a lock, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def read(text: str, origin: str) -> dict[str, Locked]:
    """Return the entries of a lock by canonical name. `origin` is its file, for errors.

    Raises UsageError naming the line if an entry is anything but NAME==VERSION or NAME @ URL, with or without hashes.
    """
    found: dict[str, Locked] = {}
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        entry = [line]
        while entry[-1].rstrip().endswith("\\"):
            entry.append(next(lines, (0, ""))[1])
        plain = re.sub(r"(^|\s)#.*", "", " ".join(part.rstrip().rstrip("\\") for part in entry)).strip()
        if not plain:
            continue
        locked = _entry(re.split(r"\s--hash[=\s]", plain)[0], "\n".join(entry), f"{origin}, line {number}")
        if locked.name in found:
            raise UsageError(f"{origin}, line {number}: a second entry of {locked.name}", remedy="keep one of them")
        found[locked.name] = locked
    return found


def _entry(requirement: str, text: str, where: str) -> Locked:
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement as error:
        raise UsageError(
            f"{where}: {requirement!r} is no entry of a lock: {str(error).splitlines()[0]}",
            remedy="a lock has NAME==VERSION or NAME @ URL on each line; `draftgate env RELEASE` writes one",
        ) from error
    pins = [each.version for each in parsed.specifier if each.operator == "==" and "*" not in each.version]
    if not parsed.url and (len(pins) != 1 or len(parsed.specifier) != 1):
        raise UsageError(f"{where}: {requirement!r} is not at one version", remedy="write NAME==VERSION")
    return Locked(canonical(parsed.name), pins[0] if pins else "", parsed.url or "", text)

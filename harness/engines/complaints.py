"""What uv and pip say when a requirement cannot be installed, in one sentence that names the requirement.

Both print prose (read from uv 0.9.8 to 0.13.9 and pip 23.2 to 25.3). What is not recognised here is not lost: whoever
asks has the last lines of the output beside it.
"""

from __future__ import annotations

import re

__all__ = ["explain"]

_NAME = r"[A-Za-z0-9][\w.-]*"
_CHANGED = "its content does not have the hash that the lock or the package index gives"
_ABSENT = "the package index does not have it"

_UNREACHABLE = re.compile(
    r"error sending request|tcp connect error|dns error|operation timed out|connection reset|connection closed"
    r"|connection broken by|Network is unreachable|Connection refused",
    re.IGNORECASE,
)
_OFFLINE = re.compile(r"the network (?:was|is) disabled")
_NAMES = (
    re.compile(r"`(?P<name>[A-Za-z0-9][\w.-]*==[^`\s]+)`"),
    re.compile(rf"/simple/(?P<name>{_NAME})/"),
    re.compile(rf"(?P<name>{_NAME}) was not found in"),
)

_SAID = (
    (re.compile(r"No space left on device"), "the disk is full"),
    (re.compile(r"Hash\s+mismatch\s+for\s+`(?P<name>[^`]+)`"), f"{{name}}: {_CHANGED}"),
    (re.compile(r"DO NOT MATCH THE HASHES[\s\S]*?\n\s+(?P<name>[\w.-]+==\S+)"), f"{{name}}: {_CHANGED}"),
    (re.compile(r"metadata\s+name\s+`(?P<is>[^`]+)`\s+does\s+not\s+match\s+given\s+name\s+`(?P<name>[^`]+)`"),
     "{name}: it is {is}"),
    (re.compile(r"failed to fetch [a-z ]+ `(?P<name>[^`]+)`[\s\S]*?fatal: (?P<why>[^\n]+)"),
     "revision {name}: git cannot fetch it: {why}"),
    (re.compile(r"status (?:client|server) error \((?P<status>[^)]+)\)[^\n]*/simple/(?P<name>[\w.-]+)/"),
     "{name}: the package index answers {status}"),
)  # fmt: skip
_UNMATCHED = re.compile(r"No matching distribution found for (?P<name>\S+)")
_MISSING = re.compile(
    rf"(?P<name>{_NAME}) was not found in|there (?:is|are) no versions? of (?P<pinned>{_NAME}[^\s,]*)", re.IGNORECASE
)
_FAILED = re.compile(r"Failed to (?P<what>[a-z ]+) `(?P<name>[^`]+)`(?:\n\s*(?:cause: |├─▶ |╰─▶ )(?P<why>[^\n]+))?")

_NEEDS = re.compile(
    rf"(?:all versions of )?(?P<who>{_NAME})(?:[=<>!][^\s,]*)? depends? on (?P<what>{_NAME}(?:[=<>!~][^\s,]*)?)"
)
_ASKED = re.compile(rf"you require (?P<what>{_NAME}(?:[=<>!~][^\s,]*)?)")
_ONLY = re.compile(rf"only (?P<what>{_NAME}(?:[=<>!~][^\s,]*)?) (?:is|are) available")


def explain(output: str) -> str:
    """Return which requirement stood in the way, and how; "" if the output says nothing that is known."""
    # uv breaks its sentences where the terminal, or COLUMNS, says.
    prose = " ".join(output.split())
    for pattern, sentence in _SAID:
        if match := pattern.search(output):
            return sentence.format(**match.groupdict())
    # After those: an installer that was cut off and tried again may have failed of something else.
    if unreachable := _UNREACHABLE.search(prose) or _OFFLINE.search(prose):
        name = next((match["name"] for pattern in _NAMES if (match := pattern.search(prose))), "")
        how = (
            "it is not in the cache, and the network is disabled"
            if unreachable.re is _OFFLINE
            else "the package index is unreachable"
        )
        return f"{name}: {how}{_asker(name, prose)}" if name else how
    if match := _UNMATCHED.search(output):
        return f"{match['name']}: {_ABSENT}"
    if "No solution found" in prose and (unsolved := _missing(prose) or _contradiction(prose)):
        return unsolved
    if match := _FAILED.search(output):
        return f"{match['name']}: failed to {match['what']} it" + (f": {match['why']}" if match["why"] else "")
    return ""


def _missing(prose: str) -> str:
    """Return the requirement that nothing meets, and who asks for it."""
    if not (match := _MISSING.search(prose)):
        return ""
    missing = match["name"] or match["pinned"]
    how = _ABSENT if match["name"] else "there is no such version to take"
    return f"{missing}: {how}{_asker(missing, prose)}"


def _asker(requirement: str, prose: str) -> str:
    for each in _NEEDS.finditer(prose):
        if _distribution(each["what"]) == _distribution(requirement):
            return f", and {each['who']} needs {each['what']}"
    return ""


def _distribution(requirement: str) -> str:
    return re.split(r"[=<>!~]", requirement)[0]


def _contradiction(prose: str) -> str:
    """Return the requirements of one distribution that cannot hold together, each with who asks for it."""
    # What uv concludes repeats what it rests on.
    premises = re.sub(r"we can conclude that .*?(?=\. |\.?$)", "", prose)
    asked: dict[str, dict[str, str]] = {}
    for pattern, who in ((_NEEDS, "{who} needs {what}"), (_ASKED, "{what} is asked for"), (_ONLY, "there is {what}")):
        for match in pattern.finditer(premises):
            what = match["what"].rstrip(".")
            asked.setdefault(_distribution(what), {})[what] = who.format(who=match.groupdict().get("who"), what=what)
    for name, each in asked.items():
        if len(each) > 1:
            return f"the requirements of {name} contradict each other: {', '.join(each.values())}"
    return ""

"""Workflow commands of GitHub Actions: lines on a job's output that the runner takes for orders.

Escaping as in the runner's own toolkit (actions/toolkit, packages/core/src/command.ts): what comes from outside cannot
end its line and begin another order.
"""

from __future__ import annotations

__all__ = ["command"]


def command(name: str, message: str, **properties: str) -> str:
    """Return one line such as `::error title=...::message`; properties that are empty are left out."""
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items() if value)
    return f"::{name}{' ' + given if given else ''}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

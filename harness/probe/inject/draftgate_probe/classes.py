"""Find an engine's classes by what they have, not by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def family(cls: type) -> Iterator[type]:
    """Yield a class and all classes derived from it."""
    yield cls
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield from family(child)


def imported(*prefixes: str) -> list[type]:
    """Return the classes defined in the modules that are imported in this process and have one of these prefixes."""
    found: dict[int, type] = {}
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if name.startswith(prefixes) and module is not None:
            names: dict[str, Any] = vars(module)
            classes = [item for item in names.values() if isinstance(item, type)]
            found |= {id(cls): cls for cls in classes if cls.__module__.startswith(prefixes)}
    return list(found.values())

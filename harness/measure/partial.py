"""Measurements that take hours are made in steps, and one that breaks off keeps the steps before."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from harness.errors import HarnessError
from harness.servers.errors import ServerFault
from harness.verdict import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["broken_off", "in_steps"]

T = TypeVar("T")


def in_steps(steps: Iterable[object], so_far: Callable[[str], T], keep: Callable[[T], None]) -> T:
    """Take all `steps`, each of which adds to what is measured, and return what there is then.

    `so_far` returns the measurement as it is, given why it was broken off ("" = it was not). `keep` is handed it after
    each step, so that a process that is killed loses the step it was at. Should a server fail after the first step,
    what there is is returned, with the reason.

    Raises what the first step raises, and what is neither a HarnessError nor an OSError (Ctrl-C) at any step.
    """
    whole = 0
    try:
        for whole, _ in enumerate(steps, start=1):  # noqa: B007 -- read where it breaks off
            keep(so_far(""))
    except (HarnessError, OSError) as error:
        if not whole:
            raise
        return so_far(_reason(error))
    return so_far("")


def _reason(error: HarnessError | OSError) -> str:
    """Return in a line what ended it. The scene of a server's end is in its log."""
    if isinstance(error, ServerFault):
        cause = f", likely cause: {error.cause}" if error.cause else ""
        return f"server {error.scene.name!r}: {error.message}{cause}; its log: {error.log_path}"
    return error.message if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"


def broken_off(code: str, what: str, why: str, *, expected: str, actual: str, source: str) -> Finding:
    """Return the finding that `what` was broken off: nothing is shown by what there is so far."""
    return Finding(
        code,
        Verdict.INVALID,
        f"{what} were broken off: {why}",
        expected=expected,
        actual=actual,
        source=source,
        remedy="mend what ended it; what was measured so far is in the record, and a retry is a new run",
    )

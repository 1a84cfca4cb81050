"""What was measured before a server failed is kept, whichever step it failed at; Ctrl-C is no failure of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ServerError
from harness.measure.partial import in_steps
from harness.servers.errors import Scene, ServerDied


def measured(steps, *, fails=None, error=None, keep=lambda _: None):
    done = []

    def run():
        for step in range(steps):
            if step == fails:
                raise error
            done.append(step)
            yield

    return in_steps(run(), lambda why: (tuple(done), why), keep)


def test_each_step_is_kept_and_the_whole_is_returned():
    kept = []
    assert measured(3, keep=kept.append) == ((0, 1, 2), "")
    assert kept == [((0,), ""), ((0, 1), ""), ((0, 1, 2), "")]


DIED = ServerDied(
    "it exited with status 9", Scene("p-spec", (), Path("spec/server.log")), returncode=9, cause="out of memory"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ServerError("it is gone", remedy="start it"), ("it is gone",)),
        (ConnectionError("reset"), ("ConnectionError: reset",)),
        (DIED, ("server 'p-spec': it exited with status 9", "out of memory", "spec/server.log")),
    ],
)
def test_a_failure_after_the_first_step_keeps_the_steps_and_says_why(error, words):
    done, why = measured(3, fails=2, error=error)
    assert done == (0, 1)
    assert all(each in why for each in words)
    assert "\n" not in why
    with pytest.raises(type(error)):
        measured(3, fails=0, error=error)


def test_a_disk_that_is_full_costs_nothing_of_what_was_measured():
    def full(_):
        raise OSError(28, "No space left on device")

    done, why = measured(3, keep=full)
    assert done == (0,)
    assert "No space left" in why


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_an_interrupt_and_a_fault_of_the_harness_are_raised(error):
    kept = []
    with pytest.raises(type(error)):
        measured(3, fails=2, error=error, keep=kept.append)
    assert len(kept) == 2

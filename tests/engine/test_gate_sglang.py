"""The gate on the real SGLang: the same release twice is fine; one that has regressed is not, and it is said why."""

import functools

import pytest

from tests.engine.regressions import names, regressed
from tests.engine.support import red

pytestmark = pytest.mark.engine

NAMED = {
    "sglang_dropped_tensors": ("o_proj",),
    "sglang_shifted_rows": ("AUX008", "chunk 2 holds row 0 instead of row 1"),
}


@pytest.fixture
def gate(hold_against, sglang_python):
    """Return a function that holds a release, its Python given, against the one under test, on a canary."""
    return functools.partial(hold_against, "sglang", "sync", sglang_python)


def test_the_same_release_may_be_upgraded(gate, sglang_python):
    result = gate(sglang_python)
    assert result.status == 0, result.output
    assert "may be upgraded" in result.output
    tests = {item["test"] for item in result.record["cases"][0]["judgements"] if item["suite"] == "upgrade"}
    assert tests == {"test_upgrade_record", "test_upgrade_acceptance"}


@pytest.mark.parametrize("name", names("sglang"))
def test_a_regression_is_named(gate, sglang_python, tmp_path, name):
    result = gate(regressed(sglang_python, name, tmp_path / "regressed"))
    assert result.status == 1, result.output
    assert "do not upgrade" in result.output
    for words in NAMED[name]:
        assert words in red(result), red(result)

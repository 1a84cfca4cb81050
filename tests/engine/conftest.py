"""Tests on real engines: those that the options name, else the releases this version was tested with."""

from pathlib import Path

import pytest

from fixtures import options
from harness.errors import HarnessError


def _python(config: pytest.Config, name: str) -> Path:
    try:
        return options.engine_python(config, name, print)
    except HarnessError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def vllm_python(pytestconfig):
    return _python(pytestconfig, "vllm")


@pytest.fixture(scope="session")
def sglang_python(pytestconfig):
    return _python(pytestconfig, "sglang")

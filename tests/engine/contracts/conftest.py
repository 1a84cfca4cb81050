"""Derivations need no server: no engine has to be named."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _engine_python():
    """Take the place of the fixture that demands one."""

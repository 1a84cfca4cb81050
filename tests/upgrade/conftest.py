"""Healthy records to break."""

import copy

import pytest

from tests.upgrade import records


@pytest.fixture(scope="session")
def _record(tmp_path_factory):
    return records.record(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def old(_record):
    """The old version's record."""
    return copy.deepcopy(_record)


@pytest.fixture
def new(_record):
    """The new version's record: the same but for the version."""
    made = copy.deepcopy(_record)
    made["cases"][0]["engine"]["version"] = "0.32.0"
    made["cases"][0]["engine"]["packages"] |= {"vllm": "0.32.0", "torch": "2.10.0", "requests": "2.33.0"}
    return made

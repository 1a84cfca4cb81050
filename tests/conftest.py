"""For every test: what it runs must not write into the job that runs the tests."""

import pytest


@pytest.fixture(autouse=True)
def _no_job_on_github(monkeypatch):
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)

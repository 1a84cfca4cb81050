"""Fixtures of the tests of engine environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheel_index import Index, offline_index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return offline_index(tmp_path, monkeypatch)

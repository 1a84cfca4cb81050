"""A small release with SGLang's shape, and what runs inside an engine's interpreter put on the path."""

import shutil
import sys
from pathlib import Path

import pytest

import harness.contracts
import harness.probe
from harness.contracts.environment import Workplace
from harness.engines.releases import EngineRelease

for package in (harness.probe, harness.contracts):
    sys.path.insert(0, str(Path(package.__file__).parent / "inject"))

RELEASE = Path(__file__).parent / "release"


def small_release(folder):
    """Return a place with a copy of the small release."""
    site = folder / "site"
    shutil.copytree(RELEASE, site)
    return Workplace("sglang", EngineRelease("sglang", "9.9.9"), Path(sys.executable), site, folder)


@pytest.fixture
def release(tmp_path):
    """Return a place with a copy of the small release, whose files a test may change."""
    return small_release(tmp_path / "place")

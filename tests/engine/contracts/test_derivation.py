"""The shipped contracts against the releases themselves: each is derived anew and must say the same."""

import dataclasses
import os
from pathlib import Path

import pytest

from harness.canary.build import build
from harness.canary.spec import CanarySpec
from harness.checkpoint.read import read
from harness.contracts import environment, model
from harness.contracts.check import check
from harness.contracts.derive import derive
from harness.verdict import Verdict

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
ENGINES = Path(os.environ.get("DRAFTGATE_ENGINES_ROOT", ROOT / ".tox" / "engines"))


def derived(release):
    return derive(release, engines_root=ENGINES, root=environment.default_root(), progress=print)


@pytest.mark.parametrize(
    "release", [f"{engine}=={v}" for engine in environment.ENGINES for v in model.versions(engine)]
)
def test_the_shipped_contract_is_what_the_release_does(release):
    engine, _, version = release.partition("==")
    fresh, shipped = derived(release), model.shipped(engine, version)
    for field in dataclasses.fields(fresh):
        if field.name != "made_with":
            assert getattr(shipped, field.name) == getattr(fresh, field.name), field.name


@pytest.mark.parametrize(("release", "fate"), [("sglang==0.5.1", "dropped"), ("sglang==0.5.12", "used")])
def test_the_founding_incident_on_the_release_itself(release, fate, tmp_path):
    """A drafter in speculators' naming, whose config was brought to what SGLang reads, as it was served then."""
    spec = CanarySpec("incident", dialect="modelopt")  # `layers.0.*` under SGLang's architecture
    report = check(read(build(spec, tmp_path / "pair").drafter), None, derived(release))
    layer = {key: seen.fate for key, seen in report.fates.items() if key.startswith("layers.0.")}
    assert len(layer) == 10
    assert set(layer.values()) == {fate}
    assert report.verdict is (Verdict.FAIL if fate == "dropped" else Verdict.PASS)

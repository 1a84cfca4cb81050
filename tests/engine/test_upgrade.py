"""A real run records all that a comparison of two versions needs, and equals itself."""

import copy

import pytest

from harness.upgrade.compare import compare_records
from harness.verdict import Verdict

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_real_record_compared_with_itself(request, judge_pair, engine):
    python = request.getfixturevalue(f"{engine}_python")
    arguments = 'engine.vllm = { args = ["--max-model-len", "1024"] }'
    result = judge_pair(python, engine, 'canary = "small"', arguments, select="suites")
    assert result.status == 0, result.output
    new = copy.deepcopy(result.record)
    (judgement,) = compare_records(result.record, new).values()
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    assert judgement.measurements["changes"] == []

    servers = next(item for item in new["cases"][0]["judgements"] if item["suite"] == "startup")["measurements"][
        "servers"
    ]
    shown = next(facts["surface"] for facts in servers.values() if "surface" in facts)
    gone = next(name for name in shown["metrics"] if ":spec_" in name)
    shown["metrics"][f"{gone}_renamed"] = shown["metrics"].pop(gone)
    (judgement,) = compare_records(result.record, new).values()
    (found,) = [each for each in judgement.findings if each.verdict is not Verdict.PASS]
    assert (found.code, found.verdict) == ("UPG050", Verdict.FAIL)
    assert gone in found.summary
    assert f"{gone}_renamed" in found.actual

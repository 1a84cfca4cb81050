"""Known issues are named, stay red unless accepted by code, and match only where they hold."""

import pytest

from harness.errors import UsageError
from harness.gate import known_issues
from harness.verdict import Finding, Judgement, Verdict, worst

CODE = "VLLM-V2-AUX-IDS"
RED = Judgement(
    "aux_hidden", (Finding("AUX005", Verdict.FAIL, "wrong layers"), Finding("AUX002", Verdict.PASS, "width"))
)


def annotate(judgement=RED, version="0.32.0", runner="v2", engine="vllm", accepted=()):
    return known_issues.annotate(judgement, engine=engine, version=version, runner=runner, accepted=accepted)


def test_named_and_still_red():
    named = annotate()
    assert named.verdict is Verdict.FAIL
    assert CODE in named.findings[0].known_issue
    assert not named.findings[1].known_issue


def test_accepted_by_code():
    named = annotate(accepted=[CODE])
    assert named.verdict is Verdict.PASS
    assert "accepted" in named.findings[0].known_issue


@pytest.mark.parametrize(
    "where", [{"version": "0.99.0"}, {"runner": "v1"}, {"engine": "sglang"}, {"version": "not-a-version"}]
)
def test_elsewhere_it_is_not_known(where):
    named = annotate(**where, accepted=[CODE])
    assert named.verdict is Verdict.FAIL
    assert not named.findings[0].known_issue


def test_another_finding_is_not_excused():
    other = Judgement("aux_hidden", (Finding("AUX004", Verdict.FAIL, "other layers"),))
    assert annotate(other, accepted=[CODE]).verdict is Verdict.FAIL


def test_missing_evidence_is_never_accepted():
    blind = Judgement("aux_hidden", (Finding("AUX005", Verdict.INVALID, "nothing seen"),))
    assert annotate(blind, accepted=[CODE]).verdict is Verdict.INVALID


def test_an_incomplete_entry_is_refused(tmp_path):
    path = tmp_path / "k.toml"
    path.write_text('[X-1]\ntitle = "t"\n')
    with pytest.raises(UsageError, match="engine"):
        known_issues.load(path)


def test_worst():
    assert worst([]) is Verdict.INVALID
    assert worst([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert worst([Verdict.INVALID, Verdict.FAIL, Verdict.PASS]) is Verdict.FAIL


def accept(code, finding, actual, *, known):
    """Say that the owner accepts a defect of SGLang, and look whether a finding that saw `actual` is it."""
    red = Judgement("a suite", (Finding(finding, Verdict.FAIL, "it is wrong", actual=actual),))
    named = annotate(red, version="0.5.23", runner="sync", engine="sglang", accepted=[code])
    assert (code in named.findings[0].known_issue) is known
    assert named.verdict is (Verdict.PASS if known else Verdict.FAIL)


BIASES = "dropped: midlayer.self_attn.q_proj.bias, midlayer.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("actual", "known"),
    [
        (BIASES, True),
        (f"{BIASES} (1 ignored by design: t2d)", True),
        (f"{BIASES}, fc.weight", False),
        (f"fc.weight, {BIASES}", False),
        (f"{BIASES} and 3 more", False),
    ],
)
def test_a_finding_that_saw_more_than_the_defect_is_not_the_defect(actual, known):
    accept("SGLANG-ATTENTION-BIAS", "WGT003", actual, known=known)


GONE = "internal_states.speculative_skip_dp_mlp_sync: {}, nearest to speculative_skip_dp_mlp_sync: {}"


@pytest.mark.parametrize(
    ("actual", "known"),
    [
        (f"nearest to {GONE.format('internal_states.speculative_token_map', 'nothing like it')}", True),
        (f"nearest to {GONE.format('nothing like it', 'nothing like it')}", True),
        (f"nearest to {GONE.format('nothing like it', 'nothing like it')}, nearest to spec_x: spec_y", False),
        (f"nearest to avg_spec_accept_length: nothing like it, nearest to {GONE.format('a', 'b')}", False),
        ("nearest to speculative_skip_dp_mlp_sync: nothing like it", False),
    ],
)
def test_a_gate_in_which_more_than_the_known_name_is_gone_is_red(actual, known):
    accept("SGLANG-SKIP-DP-MLP-SYNC-GONE", "UPG051", actual, known=known)

"""What convert writes for a release passes that release's own contract, or is refused as a loss beforehand."""

import dataclasses

import pytest
from packaging.version import Version

from harness.canary.dialects import DIALECTS
from harness.checkpoint.read import read
from harness.contracts import check, model
from harness.convert import plan
from harness.errors import UsageError
from harness.verdict import Verdict
from tests.convert.support import OPTIONS, write_drafter, write_target

RELEASES = [(engine, version) for engine in plan.ENGINES for version in model.versions(engine)]

NEVER = "999"
SINCE = {
    "sglang": {
        "norm-before-residual": NEVER,
        "attention-bias": NEVER,
        "norm-before-fc": "0.5.20",
        "fc-norm": "0.5.12",
        "aux-layers": "0.5.1",
        "own-embeddings": "0.5.1",  # that drafter names layers, too
    },
    "vllm": {"attention-bias": "0.17.1", "norm-before-fc": "0.21.0", "fc-norm": "0.25.1"},
}
"""Engine, option -> the first release that ships a contract and has it."""


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return {
        (dialect, option): read(write_drafter(folder / f"{dialect}-{option}", dialect, **fields))
        for dialect in DIALECTS
        for option, fields in OPTIONS.items()
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "target")


def convert(drafter, engine, version, target, lossy=()):
    request = plan.Request(engine, version, lossy, "inputs", target)
    return plan.make(drafter, request)


@pytest.mark.parametrize(("engine", "version"), RELEASES)
def test_each_release_takes_every_dialect(drafters, target, engine, version):
    refused = set()
    for (dialect, option), drafter in drafters.items():
        try:
            made = convert(drafter, engine, version, target)
        except UsageError as error:
            assert "would lose" in error.message  # noqa: PT017 -- which ones are refused is asked below
            refused.add((dialect, option))
            continue
        report = check.check(made.preview, target, made.contract)
        broken = [finding for finding in report.findings if finding.verdict is not Verdict.PASS]
        # 0.4.6.post5 builds fc with a bias that no exporter writes.
        assert not broken or {finding.names for finding in broken} == {("model.fc.bias",)}, (dialect, option, broken)
        assert not broken or version == "0.4.6.post5"
        assert not [finding for finding in report.findings if finding.code in ("CHK401", "CHK402")]
    # The same of every dialect: what is lost hangs on the release, not on how it was written.
    assert refused == {(dialect, option) for dialect in DIALECTS for _, option in refused}
    expected = {option for option, since in SINCE[engine].items() if Version(version) < Version(since)}
    assert {option for _, option in refused} == expected


@pytest.mark.parametrize("version", ["0.5.1", "0.5.3", "0.5.10.post1"])
def test_the_incident(drafters, target, version):
    """`layers.0.*` is dropped as it is, and used as it is converted."""
    drafter, contract = drafters["modelopt", "plain"], model.shipped("sglang", version)
    before = check.check(drafter, target, contract)
    assert before.verdict is Verdict.FAIL
    assert "CHK201" in {finding.code for finding in before.findings}
    made = convert(drafter, "sglang", version, target)
    assert check.check(made.preview, target, contract).verdict is Verdict.PASS


@pytest.mark.parametrize("option", ["norm-before-residual", "attention-bias"])
def test_what_is_lost_is_gone(drafters, target, option):
    key = option.replace("-", "_")
    made = convert(drafters["specforge", option], "sglang", "0.5.23", target, [key])
    assert [loss.key for loss in made.lost] == [key]
    assert check.check(made.preview, target, made.contract).verdict is Verdict.PASS


def test_a_map_left_at_zero_is_right_for_a_full_vocabulary_only(drafters, target):
    contract = model.shipped("vllm", "0.28.0")
    full = convert(drafters["specforge", "full-vocabulary"], "vllm", "0.28.0", target).preview
    assert check.check(full, target, contract).verdict is Verdict.PASS
    smaller = convert(drafters["specforge", "plain"], "vllm", "0.28.0", target)
    smaller = dataclasses.replace(
        smaller, names={old: new for old, new in smaller.names.items() if new != "d2t"}
    ).preview
    found = check.check(smaller, target, contract)
    assert ("draft_id_to_target_id",) in [finding.names for finding in found.findings if finding.code == "CHK301"]

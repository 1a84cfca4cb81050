"""What ships: which releases, and the founding incident in them."""

import pytest

from harness.contracts import model
from harness.contracts.environment import ENGINES
from harness.contracts.trials import LAYER_NAMES, NATIVE, NEEDED, TOP_NAMES

SGLANG = {
    "0.4.6.post5": "raises", "0.5.1": "dropped", "0.5.3": "dropped", "0.5.5.post3": "dropped", "0.5.8": "dropped",
    "0.5.9": "dropped", "0.5.10.post1": "dropped", "0.5.12": "used", "0.5.15": "used", "0.5.20": "used",
    "0.5.23": "used",
}  # fmt: skip
VLLM = ("0.11.2", "0.14.1", "0.17.1", "0.21.0", "0.25.1", "0.28.0", "0.30.0", "0.32.0")
ALL = [("sglang", version) for version in SGLANG] + [("vllm", version) for version in VLLM]


def fates(contract, prefix):
    return {
        name: (row.fate, row.told)
        for row in contract.keys
        if (row.of, row.prefix) == ("layer", prefix)
        for name in row.names
    }


def test_every_file_is_of_a_release_that_is_listed_here():
    assert {(engine, version) for engine in ENGINES for version in model.versions(engine)} == set(ALL)


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_a_contract_is_whole(engine, version):
    contract = model.shipped(engine, version)
    assert (contract.engine, contract.version) == (engine, version)
    assert contract.asked == {"layer": tuple(sorted(LAYER_NAMES)), "top": tuple(sorted(TOP_NAMES))}
    native = fates(contract, NATIVE)
    assert {native[name] for name in NEEDED[NATIVE]} == {("used", False)}
    assert contract.files
    assert contract.made_with["imported"]


@pytest.mark.parametrize(("version", "fate"), SGLANG.items())
def test_the_incident_in_sglang(version, fate):
    """`layers.0.*`: dropped without a record by 0.5.1 to 0.5.10.post1, used from 0.5.12."""
    found = fates(model.shipped("sglang", version), "layers.0.")
    # 0.4.6.post5 warns of some and raises at others.
    expected = {("dropped", True), ("raises", True)} if fate == "raises" else {(fate, False)}
    assert {found[name] for name in NEEDED[NATIVE]} == expected


@pytest.mark.parametrize("version", VLLM)
def test_vllm_uses_both_names(version):
    found = fates(model.shipped("vllm", version), "layers.0.")
    assert {found[name] for name in NEEDED[NATIVE]} == {("used", False)}


@pytest.mark.parametrize(("engine", "version"), ALL)
def test_an_unknown_prefix_is_never_used(engine, version):
    found = fates(model.shipped(engine, version), "decoder.")
    assert {found[name][0] for name in NEEDED[NATIVE]} <= {"dropped", "raises"}

"""`draftgate canary`: what is typed becomes a spec, a pair, a fault."""

import argparse
import json

import pytest

from harness.canary.build import load
from harness.canary.cli import add_parser, run
from harness.canary.faults import FAULTS
from harness.canary.spec import SHIPPED
from harness.errors import HarnessError


def call(*argv):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    return run(parser.parse_args(["canary", *map(str, argv)]))


def test_build_a_shipped_pair(tmp_path, capsys):
    assert call("build", "small", tmp_path / "pair") == 0
    assert load(tmp_path / "pair").spec == SHIPPED["small"]
    assert str(tmp_path / "pair") in capsys.readouterr().out
    assert call("build", "small", tmp_path / "pair") == 0


def test_build_one_of_your_own(tmp_path):
    argv = ["--hidden", 128, "--layers", 12, "--wrong-fraction", 0.5, "--dialect", "speculators", "--norm-output"]
    call("build", tmp_path / "pair", *argv)
    spec = load(tmp_path / "pair").spec
    assert (spec.hidden, spec.layers, spec.aux) == (128, 12, (2, 6, 9))
    assert (spec.wrong_fraction, spec.dialect, spec.norm_output, spec.fc_norm) == (0.5, "speculators", True, False)


def test_build_refuses_a_name_that_does_not_ship(tmp_path):
    with pytest.raises(HarnessError, match="no shipped canary 'nonsense'"):
        call("build", "nonsense", tmp_path / "pair")


def test_layers_of_its_own(tmp_path):
    call("build", tmp_path / "pair", "--aux-layers", 1, 3, 6, "--aux-ids", "nested")
    assert load(tmp_path / "pair").spec.aux == (1, 3, 6)
    with pytest.raises(HarnessError, match="aux_ids"):
        call("build", tmp_path / "other", "--aux-layers", 1, 3, 6)


def test_list_names_every_pair_and_fault(capsys):
    assert call("list") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*SHIPPED, *FAULTS))


def test_fault(tmp_path, capsys):
    call("build", "small", tmp_path / "pair")
    assert call("fault", tmp_path / "pair", "zero-tensor", tmp_path / "broken", "fc.weight", "--seed", 4) == 0
    assert json.loads((tmp_path / "broken" / "fault.json").read_text())["seed"] == 4
    with pytest.raises(HarnessError, match=r"oracle\.json"):
        call("fault", tmp_path / "broken", "dead", tmp_path / "more")

"""Canaries for the tests of this folder, each built once per session."""

import dataclasses

import pytest

from harness.canary.build import build
from harness.canary.spec import SHIPPED


@pytest.fixture(scope="session")
def make_canary(tmp_path_factory):
    """Return a function that builds (once) the shipped `small` with some fields changed."""
    made = {}

    def make(**changes):
        if "layers" in changes:
            changes.setdefault("aux_layers", None)
        spec = dataclasses.replace(SHIPPED["small"], **changes)
        if spec.fingerprint not in made:
            made[spec.fingerprint] = build(spec, tmp_path_factory.mktemp("canary") / "pair")
        return made[spec.fingerprint]

    return make


@pytest.fixture(scope="session")
def one_thread():
    """Keep torch to one thread: tiny matrices on a shared machine are slower on many."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

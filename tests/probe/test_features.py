"""What reaches the drafter is kept as it was, row by row; what cannot be kept or read is an error, never a gap."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from draftgate_probe import features as recording
from draftgate_probe.features import FeatureRecorder
from draftgate_probe.serving import ENOUGH
from safetensors.torch import save_file

from harness.errors import EvidenceError
from harness.probe import evidence, features
from tests.probe.test_attach import vllm  # noqa: F401 -- a fixture
from tests.probe.test_attach_sglang import server  # noqa: F401 -- a fixture


@pytest.fixture
def kept(tmp_path, monkeypatch):
    folder = tmp_path / "evidence" / evidence.FEATURES
    monkeypatch.setenv("DRAFTGATE_PROBE_FEATURES", str(folder))
    return folder


@pytest.mark.parametrize("target", ["Target", "Old"])
def test_every_real_proposal_of_sglang_is_kept(server, kept, target):  # noqa: F811
    server.start(target)
    server.answer(ENOUGH + 4)
    evidence.read(server.evidence)
    found = features.read(kept)
    assert len(found) == len(server.worker.passes) == ENOUGH + 4
    for each, (start, ids, states) in zip(found, server.worker.passes, strict=True):
        assert each.token_ids.tolist() == ids, "the target's tokens, not the drafter's, which are one on"
        assert each.positions.tolist() == list(range(start, start + len(ids)))
        assert np.array_equal(each.features, states.numpy())


def test_every_real_proposal_of_vllm_is_kept(vllm, kept):  # noqa: F811
    vllm.start()
    vllm.step(dummy=True)
    for tokens in (4, 2, 3, 5, 1):
        vllm.step(tokens)
    evidence.read(vllm.folder)
    found = features.read(kept)
    assert [each.token_ids.tolist() for each in found] == [list(range(tokens)) for tokens in (4, 2, 3, 5, 1)]
    for each, states in zip(found, vllm.handed[1:], strict=True):
        assert np.array_equal(each.features, states.numpy())


def test_features_that_are_not_asked_for_cost_nothing(server, tmp_path):  # noqa: F811
    server.run()
    assert not (tmp_path / "evidence" / evidence.FEATURES).exists()
    with pytest.raises(EvidenceError, match="no features at all"):
        features.read(tmp_path / "evidence" / evidence.FEATURES)


def test_once_the_bound_is_reached_the_probe_lets_go_and_says_so(server, kept, monkeypatch):  # noqa: F811
    monkeypatch.setattr(recording.FeatureRecorder.__init__, "__defaults__", (4 * 24 * 4 * (ENOUGH + 2),))
    before = server.hooked()
    server.start()
    server.answer(ENOUGH + 1)
    assert server.hooked() != before, "it still looks"
    server.answer(ENOUGH + 1)
    assert server.hooked() == before
    evidence.read(server.evidence)
    with pytest.raises(EvidenceError, match="bound on the size"):
        features.read(kept)


@pytest.mark.parametrize(
    ("break_it", "what"),
    [
        (lambda batch: setattr(batch, "positions", batch.positions * 0), "4 tokens at 1 positions: several requests"),
        (lambda batch: setattr(batch, "positions", batch.positions[:-1]), "4 tokens at 3 positions"),
        (lambda batch: delattr(batch, "positions"), "AttributeError"),
        (lambda batch: setattr(batch, "input_ids", batch.input_ids[:-1]), "3 tokens at 4 positions"),
    ],
)
def test_rows_that_cannot_be_named_make_the_evidence_invalid(server, kept, monkeypatch, break_it, what):  # noqa: F811
    server.start()
    runner = type(server.worker.target).__mro__[1]
    forward = runner.forward

    def broken(self, forward_batch, **kwargs):
        break_it(forward_batch)
        return forward(self, forward_batch, **kwargs)

    monkeypatch.setattr(runner, "forward", broken)
    monkeypatch.setattr(type(server.worker.target), "forward", broken)
    server.answer(ENOUGH + 1)
    with pytest.raises(EvidenceError, match=what):
        evidence.read(server.evidence)


def test_rows_of_which_the_engine_says_nothing_are_an_error(tmp_path):
    with pytest.raises(LookupError, match="does not say which tokens"):
        FeatureRecorder(tmp_path).take([torch.zeros(2, 3)], None, None)


def test_a_disk_that_takes_nothing_makes_the_evidence_invalid(server, kept):  # noqa: F811
    server.start()
    kept.write_text("in the way")
    server.answer(ENOUGH + 1)
    with pytest.raises(EvidenceError, match=r"before a forward pass: .*Error"):
        evidence.read(server.evidence)


@pytest.fixture
def written(tmp_path):
    recorder = FeatureRecorder(tmp_path)
    for start in (0, 4, 6):
        places = torch.arange(start, start + 2)
        recorder.take([torch.full((2, 3), 1.5, dtype=torch.bfloat16)] * 2, places + 10, places)
    return tmp_path


def test_chunks_and_bfloat16_are_kept_as_they_are(written):
    first, second, _ = features.read(written)
    assert first.features.dtype == ml_dtypes.bfloat16
    assert first.features.shape == (2, 6)
    assert second.token_ids.tolist() == [14, 15]


def test_a_file_that_is_cut_short(written):
    file = sorted(written.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(EvidenceError, match=rf"{file.name}: cannot be read"):
        features.read(written)


def test_a_file_that_is_missing(written):
    sorted(written.glob("*.safetensors"))[1].unlink()
    with pytest.raises(EvidenceError, match="proposal 1 are missing"):
        features.read(written)


def test_files_of_two_processes(written):
    file = min(written.glob("*.safetensors"))
    file.with_name("features-1-000003.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(EvidenceError, match="2 processes"):
        features.read(written)


@pytest.mark.parametrize(
    ("tensors", "version", "what"),
    [
        ({"features": torch.zeros(2, 3), "token_ids": torch.zeros(2), "positions": torch.zeros(1)}, "1", "do not fit"),
        ({"features": torch.zeros(0, 3), "token_ids": torch.zeros(0), "positions": torch.zeros(0)}, "1", "do not fit"),
        ({"features": torch.zeros(2, 3), "token_ids": torch.zeros(2), "positions": torch.zeros(2)}, "2", "format 2"),
        ({"features": torch.zeros(2, 3)}, "1", "cannot be read"),
    ],
)
def test_files_that_do_not_hold_what_they_should(tmp_path, tensors, version, what):
    save_file(tensors, tmp_path / "features-1-000000.safetensors", metadata={"format": version})
    with pytest.raises(EvidenceError, match=what):
        features.read(tmp_path)

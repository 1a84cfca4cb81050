"""What is written: complete or not at all, the same bytes for the same spec, numbers that bfloat16 holds exactly."""

import dataclasses
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.canary.build import build, load
from harness.canary.layout import EPS, ballast, depth_tag
from harness.canary.spec import SHIPPED, CanarySpec
from harness.errors import CheckpointError, UsageError


def digest(folder):
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_the_folder_holds_the_pair_and_nothing_else(make_canary):
    canary = make_canary()
    assert set(digest(canary.folder)) == {
        "oracle.json",
        *(f"{part}/{file}" for part in ("target", "drafter") for file in ("config.json", "model.safetensors")),
    }
    assert list(canary.folder.parent.iterdir()) == [canary.folder]
    assert load(canary.folder) == canary


def test_the_same_spec_gives_the_same_bytes_and_is_left_alone(make_canary, tmp_path):
    canary = make_canary(wrong_fraction=0.25)
    again = build(canary.spec, tmp_path / "pair")
    assert digest(again.folder) == digest(canary.folder)
    before = (again.target / "model.safetensors").stat().st_mtime_ns
    assert build(canary.spec, again.folder) == again
    assert (again.target / "model.safetensors").stat().st_mtime_ns == before


def test_another_spec_or_folder_is_never_overwritten(make_canary, tmp_path):
    canary = make_canary()
    before = digest(canary.folder)
    with pytest.raises(UsageError, match="another spec"):
        build(dataclasses.replace(canary.spec, seed=8), canary.folder)
    assert digest(canary.folder) == before
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(UsageError, match="not a canary"):
        build(canary.spec, tmp_path)


def test_a_failed_build_leaves_nothing(monkeypatch, tmp_path):
    def full(*_args):
        raise OSError("no space left")

    monkeypatch.setattr("harness.canary.drafter.drafter_tensors", full)
    with pytest.raises(OSError, match="no space"):
        build(SHIPPED["small"], tmp_path / "pair")
    assert list(tmp_path.iterdir()) == []


def test_a_race_ends_with_one_pair(monkeypatch, make_canary, tmp_path):
    module = sys.modules["harness.canary.build"]
    write = module._write

    def overtaken(spec, made):
        monkeypatch.setattr(module, "_write", write)
        build(spec, tmp_path / "pair")
        write(spec, made)

    canary = make_canary()
    monkeypatch.setattr(module, "_write", overtaken)
    assert digest(build(canary.spec, tmp_path / "pair").folder) == digest(canary.folder)
    assert list(tmp_path.iterdir()) == [tmp_path / "pair"]


def test_no_canary_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"oracle\.json"):
        load(tmp_path)


def test_too_narrow_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="too narrow"):
        build(CanarySpec("narrow", hidden=96), tmp_path / "pair")
    assert list(tmp_path.iterdir()) == []


def significant_bits(values):
    """Return how many binary digits the widest of these numbers needs."""
    mantissa, _ = np.frexp(np.abs(values[values != 0]).astype(np.float64))
    bits = 0
    while mantissa.size and np.any(mantissa != np.floor(mantissa)):
        mantissa, bits = mantissa * 2, bits + 1
    return bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_weight_is_exact_in_bfloat16_but_for_the_rotary_phases(make_canary, dtype):
    canary = make_canary(dtype=dtype)
    for part in (canary.target, canary.drafter):
        for name, tensor in load_file(part / "model.safetensors").items():
            if "q_proj" not in name and tensor.dtype != np.int64:
                assert significant_bits(np.asarray(tensor, np.float64)) <= 8, name


@pytest.mark.parametrize("hidden", [128, 256, 1000, 1024, 7168])
@pytest.mark.parametrize("energy", [2, 13.5, 50])
def test_ballast_brings_the_mean_square_to_one(hidden, energy):
    values = ballast(energy, hidden)
    assert (energy + sum(value * value for value in values)) / hidden + EPS == pytest.approx(1, abs=2**-24)
    assert significant_bits(np.array(values)) <= 8


def test_ballast_refuses_what_does_not_fit():
    with pytest.raises(UsageError, match="no room"):
        ballast(128, 128)


@pytest.mark.parametrize("spec", SHIPPED.values(), ids=SHIPPED)
def test_depth_tags_are_far_apart(spec):
    tags = np.array([depth_tag(spec, layer) for layer in range(spec.layers + 1)])
    distance = np.linalg.norm(tags[:, None] - tags[None], axis=-1) + np.eye(len(tags)) * 1e9
    # At least a quarter of the whole vector's length, which is the square root of hidden.
    assert distance.min() >= 0.25 * np.sqrt(spec.hidden)


def test_norm_weights_are_far_from_the_default(make_canary):
    tensors = load_file(make_canary().drafter / "model.safetensors")
    for name, weight in tensors.items():
        if "norm" in name:
            assert np.mean(np.asarray(weight, np.float64) == 1) < 0.25, name


PEAK = """
import resource, sys
from pathlib import Path
from harness.canary.build import build
from harness.canary.spec import SHIPPED
build(SHIPPED[sys.argv[1]], Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_kimi_shape_is_what_its_name_says_in_bounded_memory(tmp_path):
    folder = tmp_path / "kimi"
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "kimi-shape", str(folder)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 6_000_000, "peak resident KiB"
    from safetensors import safe_open

    with safe_open(folder / "drafter" / "model.safetensors", framework="numpy") as file:
        assert file.get_slice("fc.weight").get_shape() == [7168, 21504]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size < 1_500_000_000


def test_heavy_has_the_size_where_decoding_is_bound_by_memory():
    from harness.canary.target import target_intermediate

    spec = SHIPPED["heavy"]
    attention = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    layer = attention + 3 * spec.hidden * target_intermediate(spec)
    assert 0.3e9 < spec.layers * layer + 2 * spec.vocab * spec.hidden < 1e9


def test_importing_the_package_is_light():
    code = "import sys, harness.canary; print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_configs_name_the_same_vocabulary(make_canary):
    canary = make_canary()
    target, drafter = (json.loads((part / "config.json").read_text()) for part in (canary.target, canary.drafter))
    for key in ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings"):
        assert target[key] == drafter[key]
    assert drafter["draft_vocab_size"] == 33

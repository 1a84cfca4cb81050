"""Each fault changes what its name says and nothing else, and says so in a file."""

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.canary.faults import FAULTS, apply, tensor_names
from harness.errors import UsageError

QUICK = {"hidden": 128}


def differences(before, after):
    """Return the names of tensors that differ, are gone, or are new."""
    one, two = (load_file(folder / "model.safetensors") for folder in (before, after))
    return {
        name
        for name in one.keys() | two.keys()
        if name not in one or name not in two or one[name].tobytes() != two[name].tobytes()
    }


def configs(*folders):
    return [json.loads((folder / "config.json").read_text()) for folder in folders]


@pytest.mark.parametrize("fault", ["remove-tensor", "zero-tensor", "default-tensor"])
def test_one_tensor_and_no_other(make_canary, tmp_path, fault):
    drafter = make_canary(**QUICK).drafter
    for name in tensor_names(drafter):
        into = apply(fault, drafter, tmp_path / name, name, seed=1)
        assert differences(drafter, into) == {name}
        assert json.loads((into / "fault.json").read_text())["arguments"] == [name]
    assert all(one == two for one, two in [configs(drafter, into)])


def test_defaults_are_what_an_engine_constructs(make_canary, tmp_path):
    drafter = make_canary(**QUICK).drafter
    norm = load_file(apply("default-tensor", drafter, tmp_path / "norm", "norm.weight") / "model.safetensors")
    assert (np.asarray(norm["norm.weight"], np.float32) == 1).all()
    fc = load_file(apply("default-tensor", drafter, tmp_path / "fc", "fc.weight", seed=5) / "model.safetensors")
    values = np.asarray(fc["fc.weight"], np.float64)
    assert values.std() == pytest.approx(0.02, rel=0.02)
    d2t = load_file(apply("zero-d2t", drafter, tmp_path / "d2t") / "model.safetensors")
    assert not d2t["d2t"].any()


@pytest.mark.parametrize("fault", ["dead", "default-tensor"])
def test_the_seed_decides_and_is_recorded(make_canary, tmp_path, fault):
    drafter = make_canary(**QUICK).drafter
    arguments = ["fc.weight"] if fault == "default-tensor" else []
    made = {
        label: apply(fault, drafter, tmp_path / label, *arguments, seed=seed)
        for label, seed in (("one", 1), ("same", 1), ("other", 2))
    }
    bytes_of = {k: hashlib.sha256((v / "model.safetensors").read_bytes()).hexdigest() for k, v in made.items()}
    assert bytes_of["one"] == bytes_of["same"] != bytes_of["other"]
    assert json.loads((made["other"] / "fault.json").read_text())["seed"] == 2


def test_chunks(make_canary, tmp_path):
    drafter = make_canary(**QUICK).drafter
    before = np.split(load_file(drafter / "model.safetensors")["fc.weight"], 3, axis=1)
    swapped = apply("swap-fc-chunks", drafter, tmp_path / "swapped", "0", "2")
    after = np.split(load_file(swapped / "model.safetensors")["fc.weight"], 3, axis=1)
    assert all((after[i] == before[j]).all() for i, j in ((0, 2), (1, 1), (2, 0)))
    dropped = apply("drop-fc-chunk", drafter, tmp_path / "dropped", "1")
    after = np.split(load_file(dropped / "model.safetensors")["fc.weight"], 3, axis=1)
    assert [bool(np.any(chunk)) for chunk in after] == [True, False, True]
    assert differences(drafter, dropped) == {"fc.weight"}


@pytest.mark.parametrize("aux_ids", ["none", "nested", "top-level"])
def test_shifted_ids_change_the_config_alone(make_canary, tmp_path, aux_ids):
    drafter = make_canary(aux_ids=aux_ids, **QUICK).drafter
    into = apply("shift-aux-ids", drafter, tmp_path / "shifted")
    assert differences(drafter, into) == set()
    from harness.canary.dialects import read_drafter_config

    assert read_drafter_config(into).aux_layers == (3, 5, 6)


@pytest.mark.parametrize("dialect", ["yuhuili", "modelopt"])
def test_a_renamed_prefix_moves_the_decoder_layer(make_canary, tmp_path, dialect):
    drafter = make_canary(dialect=dialect, **QUICK).drafter
    names = tensor_names(apply("rename-prefix", drafter, tmp_path / "renamed"))
    assert sum(name.startswith("decoder.") for name in names) == 10
    assert not any(name.startswith(("midlayer.", "layers.")) for name in names)
    assert len(names) == len(tensor_names(drafter))


def test_a_slow_drafter_has_more_neurons_that_do_nothing(make_canary, tmp_path):
    drafter = make_canary(dialect="speculators", **QUICK).drafter
    slow = apply("slow", drafter, tmp_path / "slow")
    gate = load_file(slow / "model.safetensors")["layers.0.mlp.gate_proj.weight"]
    assert json.loads((slow / "config.json").read_text())["transformer_layer_config"]["intermediate_size"] == len(gate)
    assert len(gate) % 64 == 0
    assert not np.any(gate[384:])


def test_a_wrong_vocabulary_keeps_the_same_tokens_in_other_places(make_canary, tmp_path):
    drafter = make_canary(**QUICK).drafter
    broken = apply("wrong-vocabulary", drafter, tmp_path / "broken")
    before, after = (load_file(folder / "model.safetensors")["d2t"] for folder in (drafter, broken))
    ids = np.arange(len(before))
    assert sorted(ids + before) == sorted(ids + after)
    assert not np.any(before == after)


@pytest.mark.parametrize(
    ("fault", "arguments", "why"),
    [
        ("nonsense", (), "no fault"),
        ("zero-tensor", (), "takes tensor"),
        ("zero-tensor", ("nonsense",), "no tensor 'nonsense'"),
        ("dead", ("extra",), "takes none"),
        ("swap-fc-chunks", ("0", "x"), "do not fit"),
        ("swap-fc-chunks", ("0", "3"), "do not fit"),
    ],
)
def test_misuse_is_named_and_leaves_nothing(make_canary, tmp_path, fault, arguments, why):
    with pytest.raises(UsageError, match=why):
        apply(fault, make_canary(**QUICK).drafter, tmp_path / "into", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(make_canary, tmp_path):
    with pytest.raises(UsageError, match="exists"):
        apply("dead", make_canary(**QUICK).drafter, tmp_path)


def test_every_fault_says_what_it_does():
    assert all(fault.summary.endswith((".", "parameters.")) for fault in FAULTS.values())

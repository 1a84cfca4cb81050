"""`draftgate convert`: what it prints, and its exit statuses."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness import cli
from harness.contracts import model
from tests.convert.support import edit_config, held, write_drafter, write_target


@pytest.fixture
def convert(capfd):
    """Return a function that runs the command and returns its exit status, output and error output."""

    def run(*argv):
        status = cli.main(["convert", *map(str, argv)])
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def source(tmp_path):
    return write_drafter(tmp_path / "source", "modelopt", aux_layers=(1, 3, 6), aux_ids="nested")


def test_a_dry_run_says_everything_and_writes_nothing(convert, source, tmp_path):
    arguments = (source, tmp_path / "made", "--to", "sglang", "--engine-version", "0.5.3", "--aux-ids-are", "inputs")
    status, out, err = convert(*arguments, "--dry-run")
    assert (status, err) == (0, "")
    assert not (tmp_path / "made").exists()
    for line in (
        "to       sglang==0.5.3",
        "rename   layers.0.hidden_norm.weight -> midlayer.hidden_norm.weight",
        "config   eagle_config.eagle_aux_hidden_state_layer_ids: [1, 3, 6] -> [0, 2, 5]",
        "config   eagle_config.norm_before_fc: false -> absent",
        "note     auxiliary layers are written as [0, 2, 5], layers' outputs",
    ):
        assert line in out.splitlines()
    assert f"file     model.safetensors  {(source / 'model.safetensors').stat().st_size:,}"[:32] in out


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("version", "target_hidden", "status", "text"),
    [
        ("0.5.3", 128, 0, "PASS         sglang==0.5.3"),
        ("0.5.3", 64, 1, "CHK502"),
        ("0.5.4", 128, 3, "nothing is known of sglang==0.5.4"),
    ],
)
def test_what_was_written_is_checked(convert, source, tmp_path, how, version, target_hidden, status, text):
    target = edit_config(write_target(tmp_path / "target").folder, hidden_size=target_hidden)
    arguments = ["--to", "sglang", "--engine-version", version, "--aux-ids-are", "inputs", "--target", target, *how]
    found, out, _ = convert(source, tmp_path / "made", *arguments)
    assert found == status
    assert text in out
    assert how or len(held(tmp_path / "made")) == len(held(source))


def test_what_no_contract_speaks_of_is_not_known_to_be_wrong(convert, tmp_path):
    """A Qwen3 drafter is a documented route to vLLM; the contracts are of Llama drafters."""
    source = write_drafter(tmp_path / "source", "modelopt")
    file = source / "model.safetensors"
    norms = {f"layers.0.self_attn.{each}_norm.weight": np.ones(32, np.float32) for each in "qk"}
    save_file(load_file(file) | norms, file)
    status, out, _ = convert(source, tmp_path / "made", "--to", "vllm", "--dry-run")
    assert (status, "CHK002" in out, "CHK203" in out) == (3, True, False)


def test_a_contract_of_ones_own(convert, source, tmp_path):
    arguments = [source, tmp_path / "made", "--to", "sglang", "--aux-ids-are", "inputs"]
    status, out, _ = convert(*arguments, "--contract", model.DATA / "sglang-0.5.8.json", "--dry-run")
    assert status == 0
    assert "to       sglang==0.5.8" in out
    status, _, err = convert(*arguments, "--contract", model.DATA / "vllm-0.32.0.json")
    assert status == 2
    assert "is that of vllm==0.32.0" in err


def test_a_trainers_dialect_has_no_release_to_check(convert, source, tmp_path):
    status, out, _ = convert(source, tmp_path / "made", "--to", "specforge", "--aux-ids-are", "outputs")
    assert status == 0
    assert "add      t2d BOOL [128], made from d2t" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "sglang"], "--aux-ids-are inputs"),
        (["--to", "sglang", "--engine-version", "new"], "'new' is no version"),
        (["--to", "modelopt", "--engine-version", "1"], "modelopt is no engine"),
        (["--to", "speculators", "--aux-ids-are", "inputs"], "give --target PATH"),
        (["--to", "vllm", "--aux-ids-are", "inputs", "--lossy", "t2d"], "nothing of that name would be lost"),
    ],
)
def test_refusals(convert, source, tmp_path, arguments, text):
    status, _, err = convert(source, tmp_path / "made", *arguments)
    assert status == 2
    assert text in err
    assert "remedy:" in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_checkpoint_cannot_write_to_the_terminal(convert, source, tmp_path):
    edit_config(source, **{"a\x1b[31m": "\x1b[31m", "eagle_config": None, "rope_parameters": {"rope_theta": 1.0}})
    edit_config(source, rope_theta=None)
    out = convert(source, tmp_path / "made", "--to", "vllm", "--dry-run")[1]
    assert "\x1b" not in out

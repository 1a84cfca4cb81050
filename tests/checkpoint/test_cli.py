"""`draftgate inspect`: what it prints, as text and as JSON, and its exit statuses."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness import cli
from harness.canary.build import build
from harness.canary.faults import apply
from harness.canary.spec import SHIPPED
from harness.checkpoint import inspection, show


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    return build(
        dataclasses.replace(SHIPPED["aux-layers"], dialect="yuhuili"), tmp_path_factory.mktemp("canary") / "pair"
    )


@pytest.fixture
def inspect(capfd):
    """Return a function that runs the command and returns its exit status, output and error output."""

    def run(*argv):
        status = cli.main(["inspect", *map(str, argv)])
        return status, *capfd.readouterr()

    return run


def test_a_drafter_as_text(inspect, canary):
    status, out, err = inspect(canary.drafter)
    assert (status, err) == (0, "")
    for text in (
        "EAGLE-3 [tensors midlayer.hidden_norm.weight]",
        "yuhuili, layers named midlayer.*",
        "3 hidden states of 256, layers: eagle_config.eagle_aux_hidden_state_layer_ids [1, 3, 6]",
        "draft 33 of 512: d2t maps 33, t2d marks 33",
        "LlamaForCausalLM, model_type llama, hidden_size 256",
    ):
        assert text in out
    row = next(line.split() for line in out.splitlines() if line.startswith("fc.weight"))
    assert row == ["fc.weight", "BF16", "[256,", "768]", str(256 * 768 * 2)]
    assert "\x1b" not in out


def test_json(inspect, canary):
    status, out, _ = inspect(canary.drafter, "--json", "--stats")
    found = json.loads(out)
    assert (status, found["schema"], found["failed"]) == (0, 1, False)
    # A canary's matrices are mostly zero.
    assert {finding["code"] for finding in found["findings"]} == {"INS304"}
    assert found["recognition"]["method"] == "eagle3"
    assert found["mapping"]["d2t"] == 33
    assert found["config"]["hidden_size"] == 256
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert len(tensors) == found["totals"]["tensors"] == found["files"][0]["tensors"]
    assert sum(tensor["bytes"] for tensor in tensors.values()) == found["totals"]["bytes"]
    fc = tensors["fc.weight"]
    assert fc["statistics"]["nan"] == 0
    file = canary.drafter / fc["file"]
    assert file.stat().st_size == found["files"][0]["bytes"] >= fc["offset"] + fc["bytes"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--key", "midlayer.*norm*"], {"hidden_norm", "input_layernorm", "post_attention_layernorm"}),
        (["--key", "d2t", "--key", "t2d"], {"d2t", "t2d"}),
        (["--dtype", "i64"], {"d2t"}),
        (["--dtype", "bf16", "--min-size", "384KiB"], {"fc"}),
        (["--key", "nothing"], set()),
    ],
)
def test_filters(inspect, canary, options, names):
    found = json.loads(inspect(canary.drafter, "--json", *options)[1])
    listed = {tensor["name"].removesuffix(".weight").rpartition(".")[2] for tensor in found["tensors"]}
    assert names <= listed if names == {"fc"} else listed == names
    assert found["totals"]["tensors"] > len(found["tensors"])


def test_stats_read_only_what_is_chosen(inspect, canary, tmp_path):
    broken = apply("zero-tensor", canary.drafter, tmp_path / "broken", "fc.weight")
    status, out, _ = inspect(broken, "--stats")
    assert status == 1
    assert "error [INS303] fc.weight: every element is zero" in out
    assert inspect(broken, "--stats", "--key", "lm_head*")[0] == 0
    assert inspect(broken)[0] == 0


def test_an_error_among_the_findings_is_status_1(inspect, canary, tmp_path):
    broken = apply("zero-d2t", canary.drafter, tmp_path / "broken")
    status, out, _ = inspect(broken)
    assert status == 1
    assert "error [INS206] d2t: as offsets, t2d disagrees" in out
    assert "remedy:" in out
    assert json.loads(inspect(broken, "--json")[1])["failed"]


def test_a_target_is_told_by_families(inspect, canary):
    out = inspect(canary.target)[1]
    assert "language model (a target, or a plain draft model)" in out
    assert "model.layers.0.mlp.down_proj.weight" in out
    save_file({f"layers.{n}.w{n % 2}": np.zeros(2, np.int8) for n in range(150)}, canary.folder / "many.safetensors")
    out = inspect(canary.folder / "many.safetensors")[1]
    row = next(line.split() for line in out.splitlines() if line.startswith("layers."))
    assert row == ["layers.*.w#", "150", "I8", "[2]", "300"]
    assert "warning [INS002]" in out
    assert "layers.149.w1" in inspect(canary.folder / "many.safetensors", "--all")[1]


def test_an_empty_checkpoint(inspect, tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    status, out, _ = inspect(tmp_path)
    assert status == 1
    assert "error [INS001]" in out


def test_left_overs_and_tensors_that_the_index_does_not_name(inspect, tmp_path):
    save_file({"a": np.zeros(1), "b": np.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"old": np.zeros(1)}, tmp_path / "2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    out = inspect(tmp_path)[1]
    assert "[INS003]" in out
    assert "2.safetensors" in out
    assert "[INS004]" in out


def test_names_cannot_write_to_the_terminal(inspect, tmp_path):
    save_file({"a\x1b[2Jb\nc": np.zeros(1)}, tmp_path / "model.safetensors")
    out = inspect(tmp_path)[1]
    assert "a\\x1b[2Jb\\nc" in out
    assert "\x1b" not in out


def test_many_findings_of_a_code_are_counted(inspect, tmp_path):
    save_file({f"w{n}": np.zeros((2, 2), np.float32) for n in range(14)}, tmp_path / "model.safetensors")
    out = inspect(tmp_path, "--stats")[1]
    assert out.count("every element is zero") == 10
    assert "error [INS303] 4 more" in out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["nowhere/at/all"], "no such file or folder"),
        ([".", "--dtype", "float7"], "no dtype 'FLOAT7'"),
        ([".", "--min-size", "large"], "'large' is no size"),
    ],
)
def test_usage(inspect, options, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = inspect(*options)
    assert (status, out) == (2, "")
    assert why in err
    assert "remedy:" in err


def test_a_damaged_file_is_status_2(inspect, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    status, out, err = inspect(tmp_path, "--json")
    assert (status, out) == (2, "")
    assert "model.safetensors: byte 0: a header of" in err


def test_a_reader_that_has_gone(canary):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "harness.cli", "inspect", canary.drafter]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_in_a_terminal_there_is_a_table(canary):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    show.write_table(inspection.inspect(canary.drafter), terminal)
    assert "━" in terminal.getvalue()
    assert "fc.weight" in terminal.getvalue()

"""A plain forward that did not do all of its work is no reference."""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.errors import EvidenceError, UsageError
from harness.measure.endpoint import Prompt
from harness.parity import reference
from tests.parity.world import HIDDEN, LAYERS, bfloat16

SEQUENCES = [(1, 2, 3), (4, 5)]


@pytest.fixture
def made(tmp_path):
    """Return the folder that a run of the program leaves."""
    for number, ids in enumerate(SEQUENCES):
        states = np.ones((LAYERS + 2, len(ids), HIDDEN), np.float32)
        save_file({"states": states}, tmp_path / f"float32-{number:04d}.safetensors")
        save_file({"states": bfloat16(states)}, tmp_path / f"bfloat16-{number:04d}.safetensors")
    (tmp_path / "tokens.json").write_text(json.dumps({"p00": [1, 2]}))
    (tmp_path / "made.json").write_text(json.dumps({"torch": "2"}))
    return tmp_path


def test_what_a_whole_run_leaves(made):
    found = reference.read(made, SEQUENCES, "bfloat16")
    assert set(found.forwards) == set(SEQUENCES)
    assert found.forwards[SEQUENCES[1]].own.shape == (LAYERS + 2, 2, HIDDEN)
    assert found.tokens == {"p00": (1, 2)}


def test_a_run_that_was_cut_short(made):
    (made / "made.json").unlink()
    with pytest.raises(EvidenceError, match="not complete"):
        reference.read(made, SEQUENCES, "bfloat16")


def test_a_file_that_is_missing_or_cut_short(made):
    file = made / "float32-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EvidenceError, match=r"float32-0001\.safetensors: cannot be read"):
        reference.read(made, SEQUENCES, "bfloat16")
    file.unlink()
    with pytest.raises(EvidenceError, match=r"float32-0001\.safetensors: cannot be read"):
        reference.read(made, SEQUENCES, "bfloat16")


def test_states_of_another_sequence(made):
    with pytest.raises(EvidenceError, match=r"states \[10, 3, 32\] for 4 tokens"):
        reference.read(made, [(1, 2, 3, 9)], "bfloat16")


def test_states_that_are_not_finite(made):
    states = np.ones((LAYERS + 2, 2, HIDDEN), np.float32)
    states[3, 1, 4] = np.nan
    save_file({"states": states}, made / "float32-0001.safetensors")
    with pytest.raises(EvidenceError, match="not finite"):
        reference.read(made, SEQUENCES, "bfloat16")


def run(tmp_path, dtype="bfloat16"):
    return reference.run(
        tmp_path / "python",
        tmp_path / "target",
        sequences=SEQUENCES,
        prompts=[Prompt("p00", messages=(("user", "hello"),))],
        dtype=dtype,
        device="cpu",
        folder=tmp_path / "reference",
    )


def test_a_program_that_fails_names_its_log(tmp_path):
    (tmp_path / "python").write_text(f"#!{sys.executable}\nimport sys\nsys.exit('cannot load ' + sys.argv[2])\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(EvidenceError, match="cannot load") as caught:
        run(tmp_path)
    assert "reference.log" in caught.value.message


def test_a_dtype_that_has_no_wider_one(tmp_path):
    with pytest.raises(UsageError, match="float8 cannot be compared"):
        run(tmp_path, "float8")

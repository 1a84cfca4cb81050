"""`d2t` and `t2d`: right ones pass, and each way to be wrong has its code."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.canary.build import build
from harness.canary.faults import apply
from harness.canary.spec import SHIPPED
from harness.checkpoint import read as checkpoint
from harness.checkpoint import vocabulary
from harness.checkpoint.recognise import recognise

VOCAB = 64
TARGETS = np.array([0, 1, 5, 6, 7, 20, 33, 63])


def offsets(*targets):
    return np.array(targets) - np.arange(len(targets))


OFFSETS = offsets(*TARGETS)


def marks(targets, length=VOCAB):
    found = np.zeros(length, bool)
    found[targets] = True
    return found


@pytest.fixture
def judge(tmp_path):
    """Return a function that writes a drafter with this mapping and returns what is said of it."""

    def write(rows=8, *, config=None, wrapper="", **mapping):
        tensors = {
            "fc.weight": np.zeros((16, 48), np.float32),
            "midlayer.hidden_norm.weight": np.zeros(16, np.float32),
            "midlayer.self_attn.q_proj.weight": np.zeros((16, 32), np.float32),
            "lm_head.weight": np.zeros((rows, 16), np.float32),
            **{name: value for name, value in mapping.items() if value is not None},
        }
        save_file({f"{wrapper}{name}": value for name, value in tensors.items()}, tmp_path / "model.safetensors")
        body = {"hidden_size": 16, "vocab_size": VOCAB, "draft_vocab_size": rows, **(config or {})}
        (tmp_path / "config.json").write_text(json.dumps(body))
        read = checkpoint.read(tmp_path)
        found, findings = vocabulary.judge(read, recognise(read)[0])
        return found, {finding.code: finding.summary for finding in findings}

    return write


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("t2d", [marks(TARGETS), marks(TARGETS).astype(np.uint8), None])
@pytest.mark.parametrize("wrapper", ["", "model."])
def test_right(judge, dtype, t2d, wrapper):
    found, codes = judge(d2t=OFFSETS.astype(dtype), t2d=t2d, wrapper=wrapper)
    assert codes == {}
    assert (found.d2t, found.t2d, found.first_targets) == (8, None if t2d is None else 8, (0, 1, 5))


def test_the_whole_vocabulary_needs_no_mapping(judge):
    assert judge(VOCAB) == (None, {})
    assert judge(VOCAB, d2t=np.zeros(VOCAB, np.int64), t2d=np.ones(VOCAB, bool))[1] == {}


WRONG = {
    "two dimensions": ({"d2t": OFFSETS.reshape(2, 4)}, "INS201", "not one row"),
    "floats": ({"d2t": OFFSETS.astype(np.float32)}, "INS201", "F32"),
    "t2d of integers": ({"d2t": OFFSETS, "t2d": marks(TARGETS).astype(np.int64)}, "INS201", "I64"),
    "too large": ({"d2t": np.zeros(vocabulary.READ_LIMIT // 8 + 1, np.int64)}, "INS202", "not read"),
    "missing": ({}, "INS203", "no d2t"),
    "no row in lm_head": ({"d2t": OFFSETS, "lm_head.weight": np.zeros((), np.float32)}, "INS204", "lm_head has 0"),
    "too short": ({"d2t": OFFSETS[:7], "t2d": marks(TARGETS[:7])}, "INS204", "maps 7"),
    "tokens, and t2d agrees": ({"d2t": TARGETS, "t2d": marks(TARGETS)}, "INS205", "target tokens themselves"),
    "tokens out of range as offsets": ({"d2t": TARGETS}, "INS205", "row 7 is token 70"),
    "beyond the vocabulary": ({"d2t": offsets(0, 1, 5, 6, 7, 20, 33, 64)}, "INS206", "row 7 is token 64"),
    "negative": ({"d2t": OFFSETS - 1}, "INS206", "row 0 is token -1"),
    "not rising": ({"d2t": offsets(0, 1, 6, 5, 7, 20, 33, 63)}, "INS206", "row 2 is token 6, row 3 token 5"),
    "the same token twice": ({"d2t": offsets(0, 0, 5, 6, 7, 20, 33, 63)}, "INS206", "row 0 is token 0, row 1 token 0"),
    "t2d marks another": ({"d2t": OFFSETS, "t2d": marks([0, 1, 5, 6, 7, 20, 34, 63])}, "INS206", "row 6 is token 33"),
    "t2d marks one more": ({"d2t": OFFSETS, "t2d": marks([*TARGETS, 40])}, "INS206", "d2t lacks"),
    "offsets or tokens": ({"d2t": np.arange(8) * 4}, "INS207", "no two"),
    "all zero": ({"d2t": np.zeros(8, np.int64)}, "INS208", "all zero"),
    "all zero beside t2d": ({"d2t": np.zeros(8, np.int64), "t2d": marks(TARGETS)}, "INS206", "t2d disagrees"),
    "t2d of another length": ({"d2t": OFFSETS, "t2d": marks(TARGETS, 80)}, "INS209", "80 rows"),
    "t2d of other bytes": ({"d2t": OFFSETS, "t2d": marks(TARGETS).astype(np.uint8) * 2}, "INS210", "0 and 1"),
    "t2d alone": ({"t2d": marks(TARGETS[:7])}, "INS211", "marks 7"),
}


@pytest.mark.parametrize(("mapping", "code", "why"), WRONG.values(), ids=WRONG)
def test_wrong(judge, mapping, code, why):
    codes = judge(**mapping)[1]
    assert why in codes[code]


def test_every_code_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    sources = Path(checkpoint.__file__).parent.glob("*.py")
    codes = {code for path in sources for code in re.findall(r'"(INS\d+)"', path.read_text())}
    assert codes
    assert {code for code in codes if f"| {code} |" not in text} == set()


@pytest.mark.parametrize("fault", ["zero-d2t", "wrong-vocabulary"])
def test_faults_of_the_canary(tmp_path, fault):
    canary = build(SHIPPED["small"], tmp_path / "pair")
    read = checkpoint.read(apply(fault, canary.drafter, tmp_path / "broken"))
    _, findings = vocabulary.judge(read, recognise(read)[0])
    assert [finding.code for finding in findings] == ["INS206"]

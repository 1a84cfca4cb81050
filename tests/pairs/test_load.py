"""Every wrong pair definition is refused with file, key and remedy, before anything starts."""

import json
from pathlib import Path

import pytest

from harness import pairs
from harness.canary.spec import SHIPPED
from harness.errors import PairError
from harness.pairs.load import SHIPPED_FILE

CONFIG = {"hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 512}


@pytest.fixture
def folders(tmp_path):
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


BASE = '[pairs.mine]\ntarget = "target"\ndrafter = "drafter"\n'


def test_shipped_pairs_are_valid():
    shipped = pairs.read_file(SHIPPED_FILE)
    assert {"small", "small-wrong", "aux-layers", "kimi-shape", "heavy", "smollm2-135m"} <= set(shipped)
    assert shipped["kimi-shape"].expect.aux_hidden_dim == 21504


def test_a_whole_definition(folders):
    text = (
        BASE
        + 'method = "eagle3"\nk = 3\ndtype = "float32"\naccept = ["KI-1"]\n'
        + "[pairs.mine.expect]\naux_hidden_dim = 192\naux_layers = [2, 4, 5]\naccept_length = 2.5\nstartup_s = 30\n"
        + 'throughput_ratio = { "1" = 1.5, "8" = 1 }\n'
        + '[pairs.mine.engine.vllm]\nargs = ["--x"]\nenv = { A = "b" }\nrunners = ["v2"]\n'
    )
    pair = pairs.read_file(write(folders, text))["mine"]
    assert pair.target == folders / "target"
    assert pair.expect.throughput_ratio == {1: 1.5, 8: 1.0}
    assert pair.expect.aux_layers == (2, 4, 5)
    assert pair.launch("vllm") == pairs.EngineLaunch(("--x",), (("A", "b"),), ("v2",))
    assert pair.launch("sglang") == pairs.EngineLaunch()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[pairs.mine\n", ["not valid TOML"]),
        ("[pair.mine]\n", ["file.pair", "'pairs'"]),
        ("pairs = 3\n", ["file.pairs", "expected dict"]),
        ("", ["defines no pairs"]),
        ("[pairs]\nmine = 3\n", ["pairs.mine", "not a table"]),
        (BASE + "kk = 3\n", ["pairs.mine.kk", "not a known key", "'k'"]),
        (BASE + "k = 0\n", ["pairs.mine.k", "between 1 and 32"]),
        (BASE + "k = true\n", ["pairs.mine.k", "expected int"]),
        (BASE + 'k = "4"\n', ["pairs.mine.k", "expected int"]),
        (BASE + 'method = "eagle4"\n', ["pairs.mine.method", "eagle3"]),
        (BASE + 'dtype = "int4"\n', ["pairs.mine.dtype", "bfloat16"]),
        (BASE + 'accept = "KI-1"\n', ["pairs.mine.accept", "expected list"]),
        (BASE + "accept = [1]\n", ["pairs.mine.accept", "list of strings"]),
        ('[pairs.mine]\ntarget = "target"\n', ["pairs.mine", "in one way"]),
        ("[pairs.mine]\nk = 4\n", ["pairs.mine", "in one way"]),
        (BASE + 'canary = "small"\n', ["pairs.mine", "in one way"]),
        ('[pairs.mine]\ncanary = "smal"\n', ["pairs.mine.canary", "small"]),
        ('[pairs.mine]\ntarget = "gone"\ndrafter = "drafter"\n', ["pairs.mine.target", "no such folder"]),
        ('[pairs.mine]\ntarget = "."\ndrafter = "drafter"\n', ["pairs.mine.target", "no config.json"]),
        (BASE + "expect = 3\n", ["pairs.mine.expect", "not a table"]),
        (BASE + "expect = { accept_lenght = 2 }\n", ["pairs.mine.expect.accept_lenght", "'accept_length'"]),
        (BASE + "expect = { accept_length = 5.5 }\n", ["expect.accept_length", "impossible with k = 4", "at most 5"]),
        (BASE + "expect = { accept_length = 1.0 }\n", ["expect.accept_length", "impossible"]),
        (BASE + "expect = { aux_hidden_dim = 100 }\n", ["expect.aux_hidden_dim", "hidden size 64", "192"]),
        (BASE + "expect = { aux_hidden_dim = -3 }\n", ["expect.aux_hidden_dim", "-3"]),
        (BASE + "expect = { aux_layers = [] }\n", ["expect.aux_layers"]),
        (BASE + "expect = { aux_layers = [5, 2] }\n", ["expect.aux_layers", "ascending"]),
        (BASE + "expect = { aux_layers = [2, 4, 9] }\n", ["expect.aux_layers", "8 layers"]),
        (
            BASE + "expect = { aux_layers = [2, 4, 5], aux_hidden_dim = 128 }\n",
            ["expect.aux_hidden_dim", "3 aux_layers"],
        ),
        (BASE + "expect = { startup_s = 0 }\n", ["expect.startup_s"]),
        (BASE + 'expect = { throughput_ratio = { "1" = 6.0 } }\n', ["throughput_ratio.1", "impossible", "5"]),
        (BASE + 'expect = { throughput_ratio = { "1" = 0 } }\n', ["throughput_ratio.1"]),
        (BASE + 'expect = { throughput_ratio = { "one" = 1.0 } }\n', ["throughput_ratio.one", "concurrency"]),
        (BASE + "workload = { count = 0 }\n", ["workload.count", "at least 1"]),
        (BASE + "workload = { rounds = 3 }\n", ["workload.rounds", "even"]),
        (BASE + "workload = { max_tokens = 1 }\n", ["workload.max_tokens", "2 or more"]),
        (BASE + 'workload = { prompts_file = "gone.jsonl" }\n', ["workload.prompts_file", "no such file"]),
        (BASE + "engine.vlm = {}\n", ["engine.vlm", "vllm"]),
        (BASE + "engine.vllm = { args = [1] }\n", ["engine.vllm.args", "list of strings"]),
        (BASE + 'engine.vllm = { runners = ["v3"] }\n', ["engine.vllm.runners", "v1, v2"]),
        (BASE + "engine.vllm = { env = { A = 1 } }\n", ["engine.vllm.env"]),
        ('[pairs.mine]\ncanary = "small"\nexpect = { accept_length = 2.0 }\n', ["accept_length", "equality"]),
        ('[pairs.mine]\ncanary = "small"\nexpect = { aux_hidden_dim = 512 }\n', ["aux_hidden_dim", "768"]),
        ('[pairs.mine]\ncanary = "small"\nexpect = { aux_layers = [1, 4, 5] }\n', ["aux_layers", "[2, 4, 5]"]),
    ],
)
def test_refusals(folders, text, names):
    path = write(folders, text)
    with pytest.raises(PairError) as caught:
        pairs.read_file(path)
    message = str(caught.value)
    assert str(path) in message
    for name in names:
        assert name in message


def test_a_canary_is_served_in_its_own_dtype(folders):
    text = '[pairs.mine]\ncanary = "heavy"\n[pairs.other]\ncanary = "small"\n'
    found = pairs.read_file(write(folders, text))
    assert (found["mine"].dtype, found["other"].dtype) == (SHIPPED["heavy"].dtype, "bfloat16")


def test_a_canary_with_a_drafter_of_its_own(folders):
    pair = pairs.read_file(write(folders, '[pairs.mine]\ncanary = "small"\ndrafter = "drafter"\n'))["mine"]
    assert (pair.canary, pair.drafter) == ("small", folders / "drafter")


def test_a_drafter_for_another_vocabulary(folders):
    (folders / "drafter" / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 999}))
    with pytest.raises(PairError, match="vocabulary of 999"):
        pairs.read_file(write(folders, BASE))


def test_a_speculators_drafter_for_another_vocabulary(folders):
    config = {"transformer_layer_config": CONFIG | {"vocab_size": 999}}
    (folders / "drafter" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairError, match="vocabulary of 999"):
        pairs.read_file(write(folders, BASE))


def test_broken_config_json(folders):
    (folders / "drafter" / "config.json").write_text("{")
    with pytest.raises(PairError, match=r"config\.json that cannot be read"):
        pairs.read_file(write(folders, BASE))


def test_missing_file(tmp_path):
    with pytest.raises(PairError, match="no such pairs file"):
        pairs.read_file(tmp_path / "gone.toml")


def test_find_names_the_nearest():
    with pytest.raises(PairError, match="did you mean 'kimi-shape'"):
        pairs.find(["kimi-shap"])


def test_find_refuses_a_name_defined_twice(folders):
    path = write(folders, BASE.replace("mine", "small"))
    with pytest.raises(PairError, match="already defined"):
        pairs.find(["small"], [path])


@pytest.mark.parametrize("name", ["a/b", "../x", "", ".", "-k", "a b", "a\\nb", "# x", "a[0]"])
def test_a_name_that_no_folder_can_have(tmp_path, name):
    path = tmp_path / "pairs.toml"
    path.write_text(f'[pairs."{name}"]\ncanary = "small"\n')
    with pytest.raises(PairError, match="cannot be a pair's name"):
        pairs.read_file(path)


def test_an_adhoc_pair_has_a_name_that_a_folder_can_have(folders, monkeypatch):
    odd = folders / "my target #1"
    (folders / "target").rename(odd)
    assert pairs.adhoc(odd, folders / "drafter", k=2, dtype="float32").name == "my_target__1+drafter"
    monkeypatch.chdir(odd)
    assert pairs.adhoc(Path(), folders / "drafter", k=2, dtype="float32").name == "my_target__1+drafter"


def test_adhoc(folders):
    pair = pairs.adhoc(folders / "target", folders / "drafter", k=2, dtype="float32")
    assert (pair.k, pair.dtype, pair.source) == (2, "float32", "command line")
    with pytest.raises(PairError, match="command line"):
        pairs.adhoc(folders / "gone", folders / "drafter", k=2, dtype="float32")

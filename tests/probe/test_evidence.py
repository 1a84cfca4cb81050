"""Evidence that is missing, partial, of a failed probe or contradictory raises; it never reads as 'nothing wrong'."""

from __future__ import annotations

import json

import pytest
from draftgate_probe import journal

from harness.errors import EvidenceError
from harness.probe import evidence
from harness.probe.evidence import Fate, Stray, environment, read, read_loads

PLACE = {"rank": 0, "world_size": 1, "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0}
PARAMETER = {
    "name": "fc.weight", "kind": "parameter", "shape": [2, 6], "dtype": "bfloat16", "elements": 12, "written": 12,
    "filled": 0, "writes": 1, "rewritten": 0, "keys": ["fc.weight"], "aliases": [], "exact": True,
    "unseen_change": False, "after": "same", "after_detail": "",
}  # fmt: skip
KEY = {
    "name": "fc.weight", "in_files": True, "shape": [2, 6], "dtype": "BF16", "offered": 1, "landed": ["fc.weight"],
    "read_as_values": False, "overwritten": False, "size": 24, "taken": [[24, 0, 1, 0, 24]],
}  # fmt: skip
CAPTURE = {"chunk": 0, "layers": [2], "final_norm": False, "exact": True, "distance": 0.0}


class Folder:
    """A folder of evidence that is right until a test makes it wrong."""

    def __init__(self, path, world=1):
        self.path = path
        self.files = {}
        for rank in range(world):
            pid, place = 10 + rank, PLACE | {"rank": rank, "tp_rank": rank, "world_size": world, "tp_size": world}
            self.put(f"process-{pid}", "process", pid, argv=[], attached=["model loaders"], faults=[])
            for role in ("target", "drafter"):
                self.put(
                    f"load-{role}-{pid}-1", f"load-{role}", pid, role=role, place=place, path=f"/{role}",
                    model_class="m.C", loader="L", tapped=True, error="", seconds=0.1, operations=3,
                    parameters=[dict(PARAMETER)], keys=[dict(KEY)], limits=[],
                )  # fmt: skip
            proposal = {
                "rows": 5, "feature_width": 6, "projection_widths": [6], "passes": 1, "pass_widths": [2],
                "layers_entered": 1, "decode": True, "captures": [dict(CAPTURE)], "compared": 5,
                "strays": [{"row": 1, "own": [1], "held": [[0]]}],
            }  # fmt: skip
            self.put(
                f"serving-{pid}", "serving", pid, place=place, runner="R", proposer="P", target_class="T",
                drafter_class="D", target_layers=8, target_hidden_size=2, requested=[2], declared=[2],
                projection={"module": "fc", "in_features": 6, "out_features": 2, "found_by": "key"},
                proposals=[proposal] * 3, dummy_proposals=1, shared=[["e", "e"]], unobserved=[], complete=True,
            )  # fmt: skip
            self.put(
                f"config-{pid}", "config", pid, file=[{"path": "hidden_size", "value": 2}], attributes=[], reads=[]
            )

    def put(self, name, stage, pid, **body):
        head = {
            "format": 1,
            "stage": stage,
            "pid": pid,
            "engine": "vllm",
            "engine_version": "0.32.0",
            "engine_path": "/e/vllm",
        }
        self.files[name] = {**head, "target": "/t", "drafter": "/d", **body}

    def write(self):
        for name, record in self.files.items():
            (self.path / f"{name}.json").write_text(json.dumps(record))
        return self.path


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_whole_evidence_is_read(folder):
    found = read(folder.write())
    assert (found.engine, found.engine_version, found.engine_path) == ("vllm", "0.32.0", "/e/vllm")
    assert [load.role for load in found.loads] == ["drafter", "target"]
    (serving,) = found.servings
    assert serving.proposals[0].layers() == ((2,),)
    assert serving.proposals[0].strays == (Stray(1, (1,), ((0,),)),)
    assert serving.went_around == 0
    assert serving.projection.in_features == 6
    assert found.of("drafter")[0].parameter("fc.weight").written == 12
    assert hash(found.loads[0].parameters[0])


def test_no_file_at_all_names_the_likely_reasons(tmp_path):
    with pytest.raises(EvidenceError, match=r"no evidence at all(.|\n)*VLLM_PLUGINS"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("load-target-10-1", "no process loaded a target"),
        ("load-drafter-10-1", "no process loaded a drafter"),
        ("serving-10", r"no serving-10\.json"),
        ("process-10", r"process-10\.json is missing"),
        ("config-10", "config"),
    ],
)
def test_a_missing_file_is_named(folder, name, text):
    del folder.files[name]
    with pytest.raises(EvidenceError, match=text):
        read(folder.write())


def test_a_missing_rank_is_named(tmp_path):
    folder = Folder(tmp_path, world=2)
    for name in [name for name in folder.files if name.endswith(("-11", "-11-1"))]:
        del folder.files[name]
    with pytest.raises(EvidenceError, match=r"ranks \[1\]"):
        read(folder.write())


def test_ranks_are_united(tmp_path):
    folder = Folder(tmp_path, world=2)
    folder.files["load-drafter-11-1"]["keys"][0]["landed"] = []
    found = read(folder.write())
    assert [load.place.rank for load in found.of("drafter")] == [0, 1]
    assert found.of("drafter")[1].key("fc.weight").fate is Fate.DROPPED
    assert found.fates("drafter") == {"fc.weight": Fate.USED}


def test_a_hook_that_failed_makes_everything_invalid_and_says_why(folder):
    folder.files["process-10"]["faults"] = ["cannot attach model loaders: ImportError: no module named x"]
    with pytest.raises(EvidenceError, match="cannot attach model loaders"):
        read(folder.write())
    with pytest.raises(EvidenceError, match="cannot attach model loaders"):
        read_loads(folder.path)


def test_an_unfinished_run_is_not_enough(folder):
    folder.files["serving-10"] |= {"complete": False, "proposals": []}
    with pytest.raises(EvidenceError, match="0 real proposals"):
        read(folder.write())


def test_a_load_that_raised_is_readable_on_its_own(folder):
    folder.files["load-drafter-10-1"]["error"] = "KeyError: 'midlayer'"
    del folder.files["serving-10"]
    with pytest.raises(EvidenceError, match="KeyError: 'midlayer'"):
        read(folder.write())
    assert [load.error for load in read_loads(folder.path)] == ["KeyError: 'midlayer'", ""]


def test_files_of_two_runs_are_not_mixed(folder):
    folder.files["config-10"]["engine_version"] = "0.31.0"
    with pytest.raises(EvidenceError, match=r"engine_version is 0\.31\.0 and 0\.32\.0"):
        read(folder.write())


def test_an_unknown_format_is_refused(folder):
    folder.files["config-10"]["format"] = 2
    with pytest.raises(EvidenceError, match="format 2"):
        read(folder.write())


def test_a_damaged_file_is_named(folder):
    (folder.write() / "serving-10.json").write_text('{"format": 1, "sta')
    with pytest.raises(EvidenceError, match=r"serving-10\.json"):
        read(folder.path)


def test_a_file_without_a_field_it_must_have_is_named(folder):
    del folder.files["serving-10"]["proposals"]
    with pytest.raises(EvidenceError, match=r"serving(.|\n)*proposals"):
        read(folder.write())


def test_more_written_than_there_is_contradicts_itself(folder):
    folder.files["load-target-10-1"]["parameters"][0]["written"] = 13
    with pytest.raises(EvidenceError, match="13 written"):
        read(folder.write())


def test_unwritten_and_partly_written_parameters_are_told_apart(folder):
    rows = folder.files["load-drafter-10-1"]["parameters"]
    rows.append(PARAMETER | {"name": "none", "written": 0, "keys": []})
    rows.append(PARAMETER | {"name": "part", "written": 6})
    rows.append(PARAMETER | {"name": "padded", "written": 6, "filled": 6})
    load = read(folder.write()).of("drafter")[0]
    assert (load.parameter("none").never_written, load.parameter("none").partly_written) == (True, False)
    assert (load.parameter("part").partly_written, load.parameter("part").untouched) == (True, 6)
    assert load.parameter("padded").untouched == 0


@pytest.mark.parametrize(
    ("change", "fate"),
    [
        ({}, Fate.USED),
        ({"landed": []}, Fate.DROPPED),
        ({"landed": [], "offered": 0}, Fate.NEVER_OFFERED),
        ({"landed": [], "read_as_values": True}, Fate.READ),
        ({"landed": [], "overwritten": True}, Fate.OVERWRITTEN),
    ],
)
def test_the_fate_of_a_key(folder, change, fate):
    folder.files["load-drafter-10-1"]["keys"][0] |= change
    assert read(folder.write()).of("drafter")[0].key("fc.weight").fate is fate


def test_a_proposal_that_went_around_the_projection_is_counted_and_one_that_was_not_seen_is_not(folder):
    proposals = folder.files["serving-10"]["proposals"]
    proposals[1] = proposals[1] | {"projection_widths": []}
    proposals[2] = proposals[2] | {"projection_widths": [], "layers_entered": 0}
    assert read(folder.write()).servings[0].went_around == 1


def test_config_reads_are_united_over_processes_and_names(folder):
    folder.files["config-10"]["file"] = [
        {"path": path, "value": 1}
        for path in (
            "hidden_size", "rope_theta", "torch_dtype", "transformer_layer_config.head_dim", "eagle_config.ids",
            "transformer_layer_config.hidden_size", "never",
        )
    ]  # fmt: skip
    folder.put("process-11", "process", 11, argv=[], attached=[], faults=[])
    folder.put("config-11", "config", 11, file=[], attributes=[], reads=[])

    def row(path, reader, *, there=True):
        return {"path": path, "readers": [reader], "seen": ["1"] if there else [], "there": there}

    folder.files["config-10"]["reads"] = [row("hidden_size", "a"), row("eagle_config.other", "a", there=False)]
    folder.files["config-11"]["reads"] = [
        row("hidden_size", "b"), row("rope_parameters.rope_theta", "b"), row("dtype", "b"), row("head_dim", "b"),
        row("fc_norm", "b", there=False),
    ]  # fmt: skip
    found = read(folder.write())
    assert found.config_key("hidden_size").readers == ("a", "b")
    read_paths = {key.path for key in found.config if key.read}
    assert read_paths == {"hidden_size", "rope_theta", "torch_dtype", "transformer_layer_config.head_dim"}
    assert [absent.path for absent in found.absent] == ["eagle_config.other", "fc_norm"]


def test_a_key_that_is_only_copied_into_the_config_object_is_not_read(folder):
    config = folder.files["config-10"]
    config["file"] = [{"path": path, "value": True} for path in (
        "norm_output", "fc_norm", "speculators_model_type", "norm_before_residual"
    )]  # fmt: skip
    config["attributes"] = ["norm_output", "fc_norm", "norm_before_residual"]
    config["reads"] = [
        {"path": path, "readers": [reader], "seen": ["True"], "there": True}
        for path, reader in (
            ("norm_output", "vllm.transformers_utils.configs.speculators.algos"),
            ("fc_norm", "vllm.model_executor.models.llama_eagle3"),
            ("speculators_model_type", "vllm.transformers_utils.configs.speculators.base"),
            ("norm_before_residual", "sglang.srt.utils.hf_transformers.config"),
        )
    ]
    found = read(folder.write())
    assert [key.path for key in found.config if not key.read] == ["norm_output", "norm_before_residual"]


def test_the_environment_is_for_a_fresh_folder_only(tmp_path):
    variables = environment(tmp_path / "new", "/t", "/d", engine="vllm")
    assert variables["DRAFTGATE_PROBE_DIR"] == str(tmp_path / "new")
    assert (variables["DRAFTGATE_PROBE_TARGET"], variables["DRAFTGATE_PROBE_DRAFTER"]) == ("/t", "/d")
    assert variables["PYTHONPATH"].endswith("inject")
    (tmp_path / "new" / "x").touch()
    with pytest.raises(EvidenceError, match="not empty"):
        environment(tmp_path / "new", "/t", "/d", engine="vllm")


def test_reader_and_writer_know_the_same_format():
    assert journal.FORMAT == evidence.FORMAT

"""The probe inside the real vLLM: what it says of a canary pair must be what was done to the pair."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness.canary.build import Canary
from harness.canary.spec import SHIPPED, CanarySpec
from harness.engines.vllm import TRITON_CPU
from harness.errors import EvidenceError
from harness.gate import weights
from harness.probe.evidence import Fate, environment, read
from harness.probe.extent import covered
from harness.verdict import Verdict
from tests.engine.support import PROMPTS, canary, captured, without

pytestmark = pytest.mark.engine

DRIVER = Path(__file__).with_name("drive_vllm.py")
RUNNER = {
    "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "v2": {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DRAFTGATE_TRITON_CPU": "1",
    },
}


@pytest.fixture
def serve(vllm_python, tmp_path):
    """Serve a pair once under a runner; return what the engine said and the folder of evidence."""

    def run(pair: Canary, runner: str = "v1", tp: int = 1, **extra: str):
        folder = tmp_path / "evidence"
        probe = environment(folder, str(pair.target), str(pair.drafter), engine="vllm")
        path = os.pathsep.join([probe.pop("PYTHONPATH"), *([str(TRITON_CPU)] if runner == "v2" else [])])
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        env |= {
            **RUNNER[runner],
            **probe,
            "PYTHONPATH": path,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            **({"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}),
            **extra,
        }
        result = tmp_path / "result.json"
        done = subprocess.run(
            [vllm_python, *map(str, [DRIVER, pair.target, pair.drafter, 4, 24, tp, result])],
            input=json.dumps(PROMPTS),
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        tokens = json.loads(result.read_text())["outputs"]
        assert tokens == [pair.oracle.continuation(prompt, 24) for prompt in PROMPTS], "the probe changed an answer"
        return folder

    return run


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_whole_pair(serve, tmp_path, runner):
    pair = canary(tmp_path, SHIPPED["small"])
    found = read(serve(pair, runner))
    assert found.engine == "vllm"
    (drafter,), (target,), (serving,) = found.of("drafter"), found.of("target"), found.servings
    assert found.fates("drafter").pop("t2d") is Fate.DROPPED  # vLLM 0.32.0 skips it by design
    assert {fate for key, fate in found.fates("drafter").items() if key != "t2d"} == {Fate.USED}
    assert set(found.fates("target").values()) == {Fate.USED}
    for load in (target, drafter):
        assert load.tapped
        assert load.limits == ()
        loose = {row.name for row in load.parameters if row.kind == "parameter" and row.untouched}
        assert loose == ({"model.embed_tokens.weight"} if load is drafter else set())
    assert drafter.parameter("model.layers.0.self_attn.qkv_proj.weight").writes == 3
    assert ("model.embed_tokens.weight", "model.embed_tokens.weight") in serving.shared
    assert serving.projection is not None
    assert (serving.projection.in_features, serving.projection.found_by) == (3 * pair.spec.hidden, "key")
    assert serving.went_around == 0
    assert serving.unobserved == ()
    for proposal in serving.proposals:
        assert proposal.feature_width == 3 * pair.spec.hidden
        assert proposal.projection_widths == (3 * pair.spec.hidden,)
        assert proposal.passes == 4
        assert all(capture.exact for capture in proposal.captures)
        assert (proposal.compared, proposal.strays) == (proposal.rows, ())
        assert proposal.layers_entered
    assert [proposal.decode for proposal in serving.proposals] == [False, True, True]
    assert captured(found) == {((2,), (4,), (5,))}
    assert found.config_key("hidden_size").read
    assert found.config_key("rope_theta").read
    assert not found.config_key("tie_word_embeddings").read
    assert ("v1.worker.gpu.spec_decode" in serving.proposer) == (runner == "v2")


def test_auxiliary_layers_that_v1_honours(serve, tmp_path):
    found = read(serve(canary(tmp_path, SHIPPED["aux-layers"])))
    assert captured(found) == {((1,), (3,), (6,))}
    assert found.servings[0].requested == (1, 3, 6)


def test_auxiliary_layers_that_v2_does_not_honour_show_by_value(serve, tmp_path):
    found = read(serve(canary(tmp_path, SHIPPED["aux-layers"]), "v2"))
    assert captured(found) == {((2,), (4,), (5,))}
    assert found.servings[0].declared == (2, 4, 5)
    assert "eagle_config.layer_ids" in {absent.path for absent in found.absent}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tensors_that_are_missing_from_the_checkpoint(serve, tmp_path, runner):
    pair = canary(tmp_path, SHIPPED["small"])
    without(pair, "fc.weight", "midlayer.self_attn.k_proj.weight")
    found = read(serve(pair, runner))
    (drafter,) = found.of("drafter")
    assert drafter.parameter("model.fc.weight").never_written
    qkv = drafter.parameter("model.layers.0.self_attn.qkv_proj.weight")
    assert qkv.partly_written
    assert qkv.untouched == pair.spec.kv_heads * pair.spec.head_dim * 2 * pair.spec.hidden
    assert found.servings[0].projection.found_by == "shape"
    assert found.servings[0].went_around == 0


def test_ranks_of_tensor_parallelism_each_have_their_own(serve, tmp_path):
    pair = canary(tmp_path, SHIPPED["small"])
    without(pair, "midlayer.mlp.up_proj.weight")
    found = read(serve(pair, tp=2))
    assert [load.place.tp_rank for load in found.of("drafter")] == [0, 1]
    for load in found.of("drafter"):
        row = load.parameter("model.layers.0.mlp.gate_up_proj.weight")
        assert (row.written, row.untouched) == (row.elements // 2, row.elements // 2)
    assert [serving.place.rank for serving in found.servings] == [0, 1]
    assert captured(found) == {((2,), (4,), (5,))}
    down = [load.key("midlayer.mlp.down_proj.weight") for load in found.of("drafter")]
    assert [covered(key.size, key.taken) * 2 for key in down] == [key.size for key in down]  # half of each row
    judgement = weights.judge(found, weights.load_exceptions("vllm", found.engine_version), never, never)
    assert [item.code for item in judgement.findings if item.verdict is not Verdict.PASS] == ["WGT004"], (
        "beside the tensor that is missing, the ranks took every byte of every key between them, and changed none"
    )


def never(*_):
    return False


def test_a_nested_config_of_speculators(serve, tmp_path):
    spec = CanarySpec(
        "speculators", dialect="speculators", aux_layers=(1, 3, 6), aux_ids="top-level", norm_before_residual=True
    )
    found = read(serve(canary(tmp_path, spec)))
    assert captured(found) == {((1,), (3,), (6,))}
    assert found.config_key("transformer_layer_config.hidden_size").read
    assert found.config_key("norm_before_residual").read
    assert not found.config_key("speculators_config.verifier.name_or_path").read


def test_a_probe_that_the_engine_does_not_load_is_no_evidence(serve, tmp_path):
    folder = serve(canary(tmp_path, SHIPPED["small"]), VLLM_PLUGINS="another")
    with pytest.raises(EvidenceError, match="no evidence at all"):
        read(folder)

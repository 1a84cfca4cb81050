"""The probe inside the real SGLang: what it says of a canary pair must be what was done to the pair."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.canary import faults
from harness.canary.build import Canary
from harness.canary.spec import SHIPPED, CanarySpec
from harness.engines import sglang_kernels
from harness.errors import EvidenceError
from harness.gate import aux_hidden
from harness.probe.evidence import Fate, environment, read
from tests.engine.support import PROMPTS, canary, captured, without

pytestmark = pytest.mark.engine

DRIVER = Path(__file__).with_name("drive_sglang.py")
SMALL = dataclasses.replace(SHIPPED["small"], dialect="specforge")
"""SGLang goes by the architecture's name. That of the shipped dialect, LlamaForCausalLM, is an ordinary Llama to it."""


@pytest.fixture
def serve(sglang_python, tmp_path):
    """Serve a pair once; return the folder of evidence."""

    def run(pair: Canary, drafter: Path | None = None, algorithm: str = "EAGLE3", inject=None, **extra):
        folder = tmp_path / "evidence"
        probe = environment(folder, str(pair.target), str(drafter or pair.drafter), engine="sglang")
        path = os.pathsep.join([inject or probe.pop("PYTHONPATH"), str(sglang_kernels.FOLDER)])
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        env |= {
            **probe,
            "PYTHONPATH": path,
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **extra,
        }
        argv = [sglang_python, str(DRIVER), str(pair.target), str(drafter or pair.drafter), "24", algorithm]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
        tokens = json.loads(line.removeprefix("TOKENS "))
        assert tokens == [pair.oracle.continuation(prompt, 24) for prompt in PROMPTS], "the probe changed an answer"
        return folder

    return run


def test_a_whole_pair(serve, tmp_path):
    pair = canary(tmp_path, SMALL)
    width = pair.spec.hidden
    found = read(serve(pair))
    assert found.engine == "sglang"
    (drafter,), (target,), (serving,) = found.of("drafter"), found.of("target"), found.servings
    assert found.fates("drafter").pop("t2d") is Fate.DROPPED  # SGLang 0.5.23 skips it by design
    assert {fate for key, fate in found.fates("drafter").items() if key != "t2d"} == {Fate.USED}
    assert set(found.fates("target").values()) == {Fate.USED}
    for load in (target, drafter):
        assert load.tapped
        assert load.limits == ()
        loose = {row.name for row in load.parameters if row.kind == "parameter" and row.untouched}
        assert loose == ({"model.embed_tokens.weight"} if load is drafter else set())
    assert drafter.parameter("model.layers.0.self_attn.qkv_proj.weight").writes == 3
    assert drafter.parameter("hot_token_id").keys == ("d2t",)
    assert ("model.embed_tokens.weight", "model.embed_tokens.weight") in serving.shared
    assert serving.projection is not None
    assert (serving.projection.in_features, serving.projection.found_by) == (3 * width, "key")
    assert serving.went_around == 0
    assert serving.unobserved == ()
    assert (serving.requested, serving.declared) == (None, (2, 4, 5))
    for proposal in serving.proposals:
        assert proposal.feature_width == 3 * width
        assert proposal.projection_widths == (3 * width,)
        # one pass on the features; then, where drafting followed at once, three on the drafter's own output
        assert proposal.pass_widths in {(3 * width,), (3 * width, width, width, width)}
        assert all(capture.exact for capture in proposal.captures)
        assert (proposal.compared, proposal.strays) == (proposal.rows, ())
        assert proposal.layers_entered
    assert [proposal.decode for proposal in serving.proposals] == [False, True, True]
    assert captured(found) == {((2,), (4,), (5,))}
    assert found.config_key("hidden_size").read
    assert not found.config_key("mlp_bias").read  # gone through with all others, and honoured nowhere
    assert serving.runner.endswith("ModelRunner")
    assert "sglang.srt.speculative." in serving.proposer


def test_ids_written_for_this_engine_are_honoured(serve, tmp_path):
    spec = CanarySpec("outputs", dialect="specforge", aux_layers=(1, 3, 6), aux_ids="nested", aux_ids_are="outputs")
    found = read(serve(canary(tmp_path, spec)))
    assert captured(found) == {((1,), (3,), (6,))}
    assert (found.servings[0].requested, found.servings[0].declared) == ((0, 2, 5), (1, 3, 6))


def judged(found, pair, layers):
    want = aux_hidden.expected(
        drafter_config=json.loads((pair.drafter / "config.json").read_text()),
        target_hidden=pair.spec.hidden,
        target_layers=pair.spec.layers,
        pair_width=3 * pair.spec.hidden,
        pair_layers=layers,
    )
    return {finding.code: finding for finding in aux_hidden.judge(found, want).findings if finding.verdict != "PASS"}


def test_ids_written_for_the_other_engine_are_caught_with_those_to_write(serve, tmp_path):
    pair = canary(tmp_path, dataclasses.replace(SHIPPED["aux-layers"], dialect="specforge"))
    found = read(serve(pair))
    assert captured(found) == {((2,), (4,), (7,))}
    assert found.servings[0].requested == (1, 3, 6)
    assert "for sglang, write the ids [0, 2, 5]" in judged(found, pair, (1, 3, 6))["AUX004"].remedy


def test_ids_that_this_release_does_not_look_for_show_by_value(serve, tmp_path):
    spec = CanarySpec("top", dialect="specforge", aux_layers=(1, 3, 6), aux_ids="top-level", aux_ids_are="outputs")
    pair = canary(tmp_path, spec)
    found = read(serve(pair))
    assert captured(found) == {((2,), (4,), (5,))}
    assert "write the ids [0, 2, 5]" in judged(found, pair, (1, 3, 6))["AUX005"].remedy


def test_tensors_that_are_missing_from_the_checkpoint(serve, tmp_path):
    pair = canary(tmp_path, SMALL)
    without(pair, "fc.weight", "midlayer.self_attn.k_proj.weight")
    found = read(serve(pair))
    (drafter,) = found.of("drafter")
    assert drafter.parameter("model.fc.weight").never_written
    qkv = drafter.parameter("model.layers.0.self_attn.qkv_proj.weight")
    assert qkv.partly_written
    assert qkv.untouched == pair.spec.kv_heads * pair.spec.head_dim * 2 * pair.spec.hidden
    assert found.servings[0].projection.found_by == "shape"
    assert found.servings[0].went_around == 0


def test_a_prefix_that_this_release_does_not_know(serve, tmp_path):
    pair = canary(tmp_path, SMALL)
    found = read(serve(pair, faults.apply("rename-prefix", pair.drafter, tmp_path / "broken")))
    dropped = {key for key, fate in found.fates("drafter").items() if fate is Fate.DROPPED}
    assert len(dropped - {"t2d"}) == 10
    assert all(key.startswith("decoder.") for key in dropped - {"t2d"})
    loose = {row.name for row in found.of("drafter")[0].parameters if row.kind == "parameter" and row.never_written}
    assert len({name for name in loose if name.startswith("model.layers.0.")}) == 7


@pytest.mark.parametrize("name", ["small", "kimi-shape"])
def test_the_wrong_algorithm_hands_over_one_hidden_state(serve, tmp_path, name):
    pair = canary(tmp_path, dataclasses.replace(SHIPPED[name], dialect="specforge"))
    width = pair.spec.hidden
    found = read(serve(pair, algorithm="EAGLE"))
    (serving,) = found.servings
    assert {proposal.feature_width for proposal in serving.proposals} == {width}
    assert serving.projection.in_features == 3 * width
    assert serving.went_around == len(serving.proposals)
    assert all(proposal.captures[0].final_norm for proposal in serving.proposals)
    findings = judged(found, pair, None)
    assert findings["AUX002"].summary == f"{width} arrives, {3 * width} expected, projection bypassed"
    assert "bypassed" in findings["AUX003"].summary


def test_by_path_where_the_plugin_cannot_be_found(serve, tmp_path):
    """EAGLE on a CPU does not run in the releases without plugins: here the entry point alone is hidden."""
    inject = Path(environment(tmp_path / "unused", "t", "d", engine="sglang")["PYTHONPATH"].split(os.pathsep)[0])
    hidden = shutil.copytree(inject, tmp_path / "inject", ignore=shutil.ignore_patterns("*.dist-info"))
    found = read(serve(canary(tmp_path, SMALL), inject=os.pathsep.join([str(hidden), str(hidden / "by_path")])))
    assert [load.role for load in found.loads] == ["drafter", "target"]
    assert captured(found) == {((2,), (4,), (5,))}
    assert found.config_key("hidden_size").read


def test_a_probe_that_the_engine_does_not_load_is_no_evidence(serve, tmp_path):
    folder = serve(canary(tmp_path, SMALL), SGLANG_PLUGINS="another")
    with pytest.raises(EvidenceError, match="no evidence at all"):
        read(folder)


def test_a_hook_that_cannot_be_applied_makes_the_evidence_invalid(serve, tmp_path):
    folder = serve(canary(tmp_path, SMALL), DRIVE_WITHOUT="sglang.srt.model_loader.loader:BaseModelLoader")
    with pytest.raises(EvidenceError, match="cannot attach model loaders"):
        read(folder)

"""A release that has regressed: a copy of an engine's environment that patches one fault into vLLM as it is imported.

The copy's files are links, so it costs no disk; the engine's own files stay as they were published, and the fault comes
in by a `.pth` file, as the first thing that each of the environment's processes does.
"""

import inspect
import os
import shutil
import textwrap
from pathlib import Path

REGRESSIONS = {}
"""By name, the module that is patched and the function that patches it. Written for vLLM 0.32.0 under the V1 runner and
SGLang 0.5.23.
"""

SEEN_IN_LOADS = {}
"""The same, of those that are to be seen in what became of the weights, and are not tried with the gate."""


def regression(module, registry=REGRESSIONS):
    def register(function):
        registry[function.__name__] = (module, function)
        return function

    return register


@regression("vllm.model_executor.models.llama_eagle3")
def dropped_tensors(module):
    """The drafter's output projection is left out at load."""
    load = module.Eagle3LlamaForCausalLM.load_weights

    def load_weights(self, weights):
        return load(self, ((name, tensor) for name, tensor in weights if "o_proj" not in name))

    module.Eagle3LlamaForCausalLM.load_weights = load_weights


@regression("vllm.model_executor.models.llama_eagle3", SEEN_IN_LOADS)
def half_a_tensor(module):
    """Of the drafter's input projection, the later half is taken for zeros."""
    import torch

    load = module.Eagle3LlamaForCausalLM.load_weights

    def half(name, tensor):
        if not name.endswith("fc.weight"):
            return tensor
        part = tensor[:, : tensor.shape[1] // 2]
        return torch.cat([part, torch.zeros_like(part)], 1)

    def load_weights(self, weights):
        return load(self, ((name, half(name, tensor)) for name, tensor in weights))

    module.Eagle3LlamaForCausalLM.load_weights = load_weights


@regression("vllm.v1.spec_decode.llm_base_proposer", SEEN_IN_LOADS)
def altered_after_load(module):
    """The drafter's last norm is scaled when its load is over."""
    load = module.SpecDecodeBaseProposer.load_model

    def load_model(self, *args, **kwargs):
        load(self, *args, **kwargs)
        self.model.model.norm.weight.data.mul_(2)

    module.SpecDecodeBaseProposer.load_model = load_model


@regression("vllm.model_executor.models.interfaces")
def shifted_layers(module):
    """The target captures the layer after each that it is asked for."""
    name = "_set_aux_hidden_state_layers"
    (owner,) = [each for each in vars(module).values() if name in getattr(each, "__dict__", {})]
    capture = getattr(owner, name)
    setattr(owner, name, lambda self, layers: capture(self, tuple(layer + 1 for layer in layers)))


@regression("vllm.v1.worker.gpu_model_runner")
def shifted_rows(module):
    """The drafter is handed, for each token, the states of the one before it."""
    import inspect

    propose = module.GPUModelRunner.propose_draft_token_ids
    signature = inspect.signature(propose)

    def propose_draft_token_ids(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs)
        states = given.arguments["aux_hidden_states"]
        given.arguments["aux_hidden_states"] = [chunk.roll(1, 0) for chunk in states]
        return propose(*given.args, **given.kwargs)

    module.GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


@regression("vllm.v1.worker.gpu_model_runner")
def halved_acceptance(module):
    """The later half of the draft tokens are others than the drafter said."""
    propose = module.GPUModelRunner.propose_draft_token_ids

    def propose_draft_token_ids(self, *args, **kwargs):
        drafted = propose(self, *args, **kwargs)
        if isinstance(drafted, list):
            return [[(token + 1) % 100 if at > 1 else token for at, token in enumerate(row)] for row in drafted]
        drafted[:, 2:] = (drafted[:, 2:] + 1) % 100
        return drafted

    module.GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


@regression("vllm.v1.worker.gpu_model_runner")
def slower_steps(module):
    """A step takes 15 % longer: both of its halves, the target's pass and what verifies and drafts."""
    import time

    def slowed(half):
        def run(self, *args, **kwargs):
            began = time.perf_counter()
            done = half(self, *args, **kwargs)
            time.sleep(0.15 * (time.perf_counter() - began))
            return done

        return run

    for name in ("execute_model", "sample_tokens"):
        setattr(module.GPUModelRunner, name, slowed(getattr(module.GPUModelRunner, name)))


@regression("vllm.model_executor.models.llama")
def changed_output(module):
    """The target takes each token below 64 for its neighbour."""
    compute = module.LlamaForCausalLM.compute_logits

    def compute_logits(self, hidden_states):
        logits = compute(self, hidden_states)
        if logits is not None:
            logits[..., :64] = logits[..., :64].unflatten(-1, (32, 2)).flip(-1).flatten(-2).clone()
        return logits

    module.LlamaForCausalLM.compute_logits = compute_logits


@regression("vllm.v1.sample.rejection_sampler")
def mixed_rows(module):
    """Where several requests are verified in one step, the last one gets the first one's token."""
    sample = module.rejection_sample

    def rejection_sample(*args, **kwargs):
        tokens = sample(*args, **kwargs)
        if len(tokens) > 1:
            tokens[-1, 0] = tokens[0, 0]
        return tokens

    module.rejection_sample = rejection_sample


@regression("vllm.v1.spec_decode.metrics")
def renamed_metric(module):
    """The counter of accepted tokens has another name."""
    counter = module.SpecDecodingProm._counter_cls

    def renamed(name, *args, **kwargs):
        return counter(name.replace("num_accepted_tokens", "accepted_draft_tokens"), *args, **kwargs)

    module.SpecDecodingProm._counter_cls = staticmethod(renamed)


@regression("vllm.v1.spec_decode.metrics")
def changed_meaning(module):
    """The token that the target adds in each step counts as accepted."""
    log, counter = module.SpecDecodingLogging, module.SpecDecodingProm

    def counting(observe):
        def run(self, spec_decoding_stats, *args, **kwargs):
            import dataclasses

            accepted = spec_decoding_stats.num_accepted_tokens + spec_decoding_stats.num_drafts
            changed = dataclasses.replace(spec_decoding_stats, num_accepted_tokens=accepted)
            return observe(self, changed, *args, **kwargs)

        return run

    log.observe, counter.observe = counting(log.observe), counting(counter.observe)


@regression("sglang.srt.models.llama_eagle3")
def sglang_dropped_tensors(module):
    """The drafter's output projection is left out at load."""
    load = module.LlamaForCausalLMEagle3.load_weights

    def load_weights(self, weights):
        return load(self, ((name, tensor) for name, tensor in weights if "o_proj" not in name))

    module.LlamaForCausalLMEagle3.load_weights = load_weights


@regression("sglang.srt.speculative.eagle_worker_v2")
def sglang_shifted_rows(module):
    """After each verification the drafter is handed, for each token, the states of the one before it."""
    extend = module.EagleDraftWorker._draft_extend_for_decode

    def draft_extend_for_decode(self, batch, batch_result, **kwargs):
        output = batch_result.logits_output
        output.hidden_states = output.hidden_states.roll(1, 0)
        return extend(self, batch, batch_result, **kwargs)

    module.EagleDraftWorker._draft_extend_for_decode = draft_extend_for_decode


def names(engine):
    """Return the names of an engine's regressions."""
    return sorted(name for name, (module, _) in REGRESSIONS.items() if module.split(".")[0] == engine)


_PATCHER = """
import importlib.machinery
import sys


SEEN_IN_LOADS = None


def regression(*_):
    return lambda function: function


{function}


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(made):
            run(made)
            {name}(made)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


def regressed(python: Path, name: str, folder: Path) -> Path:
    """Copy the environment of `python` into `folder`, with the regression `name`; return the copy's Python."""
    environment = python.parent.parent
    shutil.copytree(environment, folder, symlinks=True, copy_function=_link)
    module, function = (REGRESSIONS | SEEN_IN_LOADS)[name]
    source = textwrap.dedent(inspect.getsource(function))
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "engine_regression.py").write_text(_PATCHER.format(function=source, module=module, name=name))
    (site / "engine_regression.pth").write_text("import engine_regression\n")
    return folder / "bin" / "python"


def _link(source, target, *, follow_symlinks=True):
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=follow_symlinks)

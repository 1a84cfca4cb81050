"""Canary drafters in any dialect, and what a folder holds."""

import dataclasses
import json

from harness.canary import dialects, drafter
from harness.canary.build import write_checkpoint
from harness.canary.oracle import make_oracle
from harness.canary.spec import CanarySpec
from harness.checkpoint.read import read
from harness.convert import plan, write

OPTIONS = {
    "plain": {},
    "aux-layers": {"aux_layers": (1, 3, 6), "aux_ids": "nested"},
    "fc-norm": {"fc_norm": True, "norm_output": True},
    "norm-before-fc": {"norm_before_fc": True},
    "norm-before-residual": {"norm_before_residual": True},
    "attention-bias": {"attention_bias": True},
    "own-embeddings": {"own_embed_tokens": True, "aux_layers": (1, 3, 6), "aux_ids": "top-level"},
    "full-vocabulary": {"full_draft_vocab": True},
}
# What speculators means by ids is known; of the others it has to be said.
CANARY = CanarySpec("c", hidden=128, head_dim=32, classes=16, vocab=128)


def write_drafter(folder, dialect, **options):
    """Write the canary's drafter, without a target, and return its folder."""
    if dialect == "speculators" and options.get("aux_ids") == "nested":
        options["aux_ids"] = "top-level"
    spec = dataclasses.replace(CANARY, dialect=dialect, **options)
    tensors = drafter.drafter_tensors(spec, make_oracle(spec))
    renamed = {dialects.rename(name, dialect): tensor for name, tensor in tensors.items()}
    renamed.pop(None, None)
    config = dialects.drafter_config(spec, drafter.drafter_intermediate(spec), len(renamed["lm_head.weight"]))
    write_checkpoint(folder, config, renamed)
    return folder


def write_target(folder, architecture="LlamaForCausalLM"):
    config = {**dialects.target_config(CANARY, 64), "architectures": [architecture]}
    write_checkpoint(folder, config, {})
    return read(folder)


def convert(source, destination, to, **request):
    """Convert, and return the destination."""
    made = plan.make(read(source), plan.Request(to, **request))
    return write.write(made, source, destination)


def held(folder):
    """Return name -> (dtype, shape, bytes) of every tensor."""
    found = {}
    for shard in read(folder).shards:
        raw = shard.path.read_bytes()
        for name, tensor in shard.tensors.items():
            found[name] = (tensor.dtype, tensor.shape, raw[slice(*shard.span(name))])
    return found


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit_config(folder, **changes):
    """Set keys of the config; None removes one."""
    config = {key: value for key, value in (config_of(folder) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""A target and a drafter of a few lines, and one run of them. Run as a program: FOLDER, one server's life."""

import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

WIDTH, LAYERS = 8, 8


class Model(nn.Module):
    def load_weights(self, weights):
        here = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "d2t":
                self.hot_token_id = tensor + torch.arange(len(tensor))
            elif name in here:
                here[name].data.copy_(tensor)

    def set_embed(self, weight):
        del self.embed.weight
        self.embed.weight = weight


class Stream:
    """ResidualStream of 0.5.23: the residual travels in the batch, the last output is pending."""

    def __init__(self):
        self.residual = self.pending = None

    def take(self, hidden):
        whole = hidden if self.residual is None or self.pending is None else self.residual + hidden
        self.residual, self.pending = whole, None
        return whole

    def record(self, hidden):
        self.pending = types.SimpleNamespace(update=types.SimpleNamespace(is_plain_add=True))
        return hidden


class Owed:
    """OwedOutput of 0.5.23: this rank's part of a sum, in no tensor that a layer may read."""

    def __init__(self, value):
        self.value = value


class Travelling(nn.Module):
    """A layer of 0.5.23."""

    owes = False

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = nn.ModuleDict({"inner": nn.Linear(WIDTH, WIDTH)})
        self.attn = Attention()

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        hidden = hidden_states.value if isinstance(hidden_states, Owed) else hidden_states
        whole = forward_batch.residual_stream.take(hidden)
        if capture_output is not None:
            capture_output(whole.clone())
        out = self.mlp["inner"](self.norm(self.attn(whole, forward_batch)))
        out = forward_batch.residual_stream.record(out)
        return Owed(out) if self.owes else out


class Attention(nn.Module):
    def forward(self, hidden_states, forward_batch):
        return hidden_states


class Owing(Travelling):
    owes = True


class Argument(nn.Module):
    """A layer up to 0.5.20: the residual is an argument, added in place."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, positions, hidden_states, forward_batch, residual):
        if residual is None:
            residual = hidden_states.clone()
        else:
            residual.add_(hidden_states)
        return self.mlp(self.norm(residual)), residual


class Body(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layer() for _ in range(LAYERS)), nn.RMSNorm(WIDTH)
        self.layers_to_capture = []


class Target(Model):
    layer = Travelling
    shift = 1

    def __init__(self):
        super().__init__()
        self.embed, self.model = nn.Embedding(32, WIDTH), Body(self.layer)

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        asked = [2, LAYERS // 2, LAYERS - 3] if layer_ids is None else [k + self.shift for k in layer_ids]
        self.model.layers_to_capture = asked

    def forward(self, ids, batch):
        hidden, residual, kept, wanted = self.embed(ids), None, [], self.model.layers_to_capture
        batch.residual_stream = Stream() if self.layer is not Argument else None
        for index, layer in enumerate(self.model.layers):
            if self.layer is Argument:
                if index in wanted:
                    kept.append(hidden.clone() if residual is None else hidden + residual)
                hidden, residual = layer(None, hidden, batch, residual)
            else:
                hidden = layer(None, hidden, batch, capture_output=kept.append if index in wanted else None)
        if self.layer is not Argument:
            hidden, residual = getattr(hidden, "value", hidden), batch.residual_stream.residual
        hidden = self.model.norm(hidden + residual)
        return types.SimpleNamespace(hidden_states=torch.cat(kept, -1) if kept else hidden)


class Old(Target):
    layer = Argument


class Parts(Target):
    layer = Owing


class Drafter(Model):
    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(32, WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.layers, self.hot_token_id = nn.ModuleList([Argument()]), None

    def forward(self, ids, batch):
        hidden = batch.spec_info.hidden_states
        if hidden.shape[-1] != WIDTH:
            hidden = self.fc(hidden)
        hidden, _ = self.layers[0](None, hidden, batch, None)
        return types.SimpleNamespace(hidden_states=hidden)


def write(folder, target=Target):
    """Write a pair of checkpoints; returns their folders."""
    for role, make, more in (
        ("target", target, {}),
        ("drafter", Drafter, {"d2t": torch.arange(4), "t2d": torch.ones(4)}),
    ):
        path = folder / role
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"hidden_size": WIDTH, "unread": 1}))
        save_file({**make().state_dict(), **more}, path / "model.safetensors")
    return folder / "target", folder / "drafter"


def serve(folder, target=Target, loader="DefaultModelLoader", ids=None, algorithm="EAGLE3"):
    """Start: what SGLang does in a scheduler's process until it takes requests."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader as loaders
    from sglang.srt.speculative.eagle_worker import EAGLEWorker

    configs = ModelConfig(str(folder / "target")), ModelConfig(str(folder / "drafter"), is_draft_model=True)
    assert configs[1].hf_config.hidden_size == WIDTH
    torch.manual_seed(0)
    worker = EAGLEWorker(getattr(loaders, loader)({False: target, True: Drafter}), *configs)
    if algorithm == "EAGLE3":
        worker.target.model.set_eagle3_layers_to_capture(ids)
    worker.warm_up()
    return worker


def answer(worker, steps=4):
    """Serve one request."""
    worker.forward_batch_generation("EXTEND")
    for _ in range(steps - 1):
        worker.forward_batch_generation("VERIFY")


if __name__ == "__main__":
    import importlib.util

    if importlib.util.find_spec("sglang.srt.plugins"):
        from sglang.srt.plugins import load_plugins

        load_plugins()
    answer(serve(Path(sys.argv[1])))

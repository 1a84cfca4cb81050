"""The order of passes in EAGLEWorkerV2: extend after each target pass, drafting before the next."""

import torch

from sglang.srt.model_executor.model_runner import ChildRunner


class Mode:
    def __init__(self, name):
        self.name = name

    def is_idle(self):
        return self.name == "IDLE"

    def is_decode(self):
        return self.name == "DECODE"

    def is_target_verify(self):
        return self.name == "VERIFY"


class Batch:
    def __init__(self, mode, input_ids, spec_info=None, start=0):
        self.forward_mode = Mode(mode)
        self.positions = start + torch.arange(len(input_ids))
        self.input_ids, self.spec_info, self.residual_stream = input_ids, spec_info, None


class Input:
    def __init__(self, hidden_states):
        self.hidden_states = hidden_states


class EAGLEWorker:
    steps = 3

    def __init__(self, loader, target_config, draft_config):
        self.target = ChildRunner(loader, target_config)
        self.drafter = ChildRunner(loader, draft_config)
        self.drafter.model.set_embed(self.target.model.embed.weight)
        self.features = lambda features: features
        self.hidden, self.length, self.passes = None, 0, []

    def warm_up(self):
        """A run of no scheduler's step, as a capture or a profiling run is."""
        out = self.target.forward(Batch("EXTEND", torch.arange(4)))
        self.drafter.forward(Batch("EXTEND", torch.arange(4), Input(out.hidden_states)))

    @torch.no_grad()
    def forward_batch_generation(self, mode, tokens=4):
        ids, start = torch.randint(0, 32, (tokens,)), 0 if mode == "EXTEND" else self.length
        if mode == "VERIFY":
            for _ in range(self.steps - 1):
                batch = Batch("DECODE", ids[-1:], Input(self.hidden))
                self.hidden = self.drafter.forward(batch).hidden_states
        out = self.target.forward(Batch(mode, ids, start=start))
        self.passes.append((start, ids.tolist(), out.hidden_states.clone()))
        self.length = start + tokens
        extend = "EXTEND" if mode == "EXTEND" else "DRAFT_EXTEND_V2"
        batch = Batch(extend, ids.roll(-1), Input(self.features(out.hidden_states)), start)
        self.hidden = self.drafter.forward(batch).hidden_states[-1:]

from torch import nn


class LlamaForCausalLM(nn.Module):
    def __init__(self, config, quant_config=None):
        super().__init__()
        self.config = config
        self.model = nn.Module()

    def load_weights(self, weights):
        for _ in weights:
            pass

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        layers = self.config.num_hidden_layers
        chosen = [2, layers // 2, layers - 3] if layer_ids is None else [layer + 1 for layer in layer_ids]
        self.model.layers_to_capture = chosen


EntryClass = [LlamaForCausalLM]

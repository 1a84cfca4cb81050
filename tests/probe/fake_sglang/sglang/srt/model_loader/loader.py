from pathlib import Path

from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig  # noqa: F401 -- as the real one


def _initialize_model(model_config, load_config):
    return load_config[model_config.is_draft_model]()


class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    def load_model(self, *, model_config, device_config):
        model = _initialize_model(model_config, self.load_config)
        self.load_weights_and_postprocess(model, load_file(Path(model_config.model_path, "model.safetensors")).items())
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(model, weights):
        model.load_weights(weights)


class LayeredModelLoader(DefaultModelLoader):
    def load_model(self, **kwargs):
        return super().load_model(**kwargs)


class DummyModelLoader(BaseModelLoader):
    def load_model(self, *, model_config, device_config):
        return _initialize_model(model_config, self.load_config)

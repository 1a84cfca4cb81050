from transformers import PretrainedConfig


class ModelConfig:
    def __init__(self, model_path, is_draft_model=False):
        values, _ = PretrainedConfig.get_config_dict(model_path)
        if "model_type" not in values:
            raise ValueError("Unrecognized model: it should have a `model_type` key")
        self.hf_config = PretrainedConfig(**values, _name_or_path=model_path)

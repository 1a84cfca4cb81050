from transformers import PretrainedConfig


class ModelConfig:
    def __init__(self, model_path, is_draft_model=False):
        self.model_path = model_path
        self.is_draft_model = is_draft_model
        found, _ = PretrainedConfig.get_config_dict(model_path)
        self.hf_config = self.hf_text_config = PretrainedConfig(_name_or_path=model_path, **found)

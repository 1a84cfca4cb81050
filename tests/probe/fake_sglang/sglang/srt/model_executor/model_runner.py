class ModelRunner:
    def __init__(self, loader, model_config):
        self.is_draft_worker = model_config.is_draft_model
        self.loader, self.model_config = loader, model_config
        self.load_model()

    def load_model(self):
        self.model = self.loader.load_model(model_config=self.model_config, device_config=None)

    def forward(self, forward_batch, pp_proxy_tensors=None):
        return self.model.forward(forward_batch.input_ids, forward_batch)


class ChildRunner(ModelRunner):
    def forward(self, forward_batch, **kwargs):
        return super().forward(forward_batch, **kwargs)

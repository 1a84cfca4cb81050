"""The part of transformers that a config needs."""

import json
import types
from pathlib import Path


class PretrainedConfig:
    attribute_map = types.MappingProxyType({})

    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)

    @classmethod
    def get_config_dict(cls, path, **kwargs):
        return json.loads(Path(path, "config.json").read_text()), kwargs

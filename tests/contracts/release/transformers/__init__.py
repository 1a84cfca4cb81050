"""As much of the config library as the small release and the probe's recorder use."""

import json
from pathlib import Path
from typing import ClassVar


class PretrainedConfig:
    attribute_map: ClassVar = {}

    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)

    @classmethod
    def get_config_dict(cls, folder, **_):
        return json.loads((Path(folder) / "config.json").read_text()), {}

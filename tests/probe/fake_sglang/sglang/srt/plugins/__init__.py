"""As SGLang 0.5.23: plugins that fail are logged and no more."""

from importlib.metadata import entry_points


def load_plugins():
    for point in entry_points(group="sglang.srt.plugins"):
        try:
            point.load()()
        except Exception as error:  # noqa: BLE001
            print("Failed to execute general plugin", point.name, error)

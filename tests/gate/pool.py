"""A pool of servers that are only noted."""

import contextlib
import types
from pathlib import Path


class Pool:
    """Notes what starts and what ends, and how many run at once."""

    def __init__(self):
        self.running, self.events, self.most = {}, [], 0

    def fail_again(self, spec):
        pass

    def holds(self, spec):
        return spec.name in self.running

    def get(self, spec, folder, is_ready):
        if spec.name not in self.running:
            self.events.append(f"+{spec.name}")
            self.running[spec.name] = types.SimpleNamespace(
                base_url=f"http://{len(self.events)}", log_path=Path("log"), busy=contextlib.nullcontext
            )
            self.most = max(self.most, len(self.running))
        return self.running[spec.name]

    def release(self, spec):
        if self.running.pop(spec.name, None):
            self.events.append(f"-{spec.name}")

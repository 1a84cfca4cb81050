"""What a server is given to live in: its environment, its log, its folder for temporary files."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from harness.servers import tree
from harness.servers.spec import ServerSpec

__all__ = ["environment", "inherited", "new_log", "tmpdir"]

# A Unix socket's path holds 107 bytes (unix(7)); vLLM 0.32 (`utils/network_utils.py`) adds "/" and a UUID of 36.
_LONGEST_TMPDIR = 64


def environment(spec: ServerSpec, marker: str, tmp: Path) -> dict[str, str]:
    """Return the environment of the server: the parent's, the spec's changes, and what tear-down and log rely on."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}  # else its phases show only when a buffer is full
    for name, value in spec.env:
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    # SPT_NOENV keeps setproctitle, which vLLM 0.32 calls (`utils/system_utils.py`), from overwriting the marker.
    return {**env, tree.MARKER: marker, "SPT_NOENV": "1", "TMPDIR": str(tmp)}


_TELLING = re.compile(
    r"(?:VLLM|SGLANG|SGL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|KMP|HF|TRANSFORMERS|LD)_\w+"
    r"|PYTHON\w+"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?:^|_)KEY")


def inherited(spec: ServerSpec) -> dict[str, str]:
    """Return the parent's variables that change what an engine does, as the server has them; secrets are masked."""
    own = {name for name, _ in spec.env}
    found = sorted(name for name in os.environ if name not in own and _TELLING.fullmatch(name))
    return {name: "(masked)" if _SECRET.search(name) else os.environ[name] for name in found}


def new_log(folder: Path, name: str) -> Path:
    """Create and return an empty log in `folder`; an earlier server's log is evidence and is never overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / (f"{name}.log" if number == 1 else f"{name}-{number}.log")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return path


def tmpdir(folder: Path, marker: str) -> Path:
    """Return the path, yet to be made, of a folder for temporary files that is short enough for Unix sockets in it."""
    places = (folder.resolve(), Path(tempfile.gettempdir()).resolve(), Path("/tmp"))  # noqa: S108 -- the shortest there is
    paths = [place / f"dg-{marker[:12]}" for place in places]
    return next((path for path in paths if len(os.fsencode(path)) <= _LONGEST_TMPDIR), paths[-1])

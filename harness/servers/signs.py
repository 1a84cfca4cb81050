"""Lines of a server's log that give its trouble away, as data: what they mean and what to do."""

from __future__ import annotations

import dataclasses
import re

__all__ = ["ADDRESS_IN_USE", "ENDED_ITSELF", "Sign", "read"]


@dataclasses.dataclass(frozen=True)
class Sign:
    """A line that matches `pattern` points to `cause`, against which `remedy` helps."""

    pattern: str
    cause: str
    remedy: str


ADDRESS_IN_USE = Sign(
    r"(?i)address already in use|EADDRINUSE|\[Errno 98\]|port \d+ is (?:already in use|not available)",
    "a port that the server wanted belongs to another process",
    "end that process (`ss -ltnp` names it), or let the harness choose the port (port 0)",
)

# SGLang 0.5.23, utils/common.py: the first process kills its whole tree, itself included, when a child fails.
ENDED_ITSELF = Sign(
    r"Received sigquit from a child process|kill_process_tree called: .*include_parent=True",
    "one of its processes failed, and the server killed itself",
    "read the traceback in the log",
)

# The first that matches a line wins.
_SIGNS = (
    ADDRESS_IN_USE,
    ENDED_ITSELF,
    Sign(
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory",
        "the device ran out of memory",
        "free the device (`nvidia-smi` shows who holds it), or lower the engine's share of its memory",
    ),
    Sign(
        r"No available memory for the cache blocks|"
        r"larger than the (?:available KV cache memory|maximum number of tokens)",
        "the weights leave too little memory for the KV cache",
        "raise the engine's memory share, or lower its maximum sequence length",
    ),
    Sign(
        r"Free memory on device .* is less than desired",
        "another process holds memory of the device",
        "end it (`nvidia-smi` names it), or lower the engine's memory share",
    ),
    Sign(
        r"(?:DefaultCPUAllocator: can't allocate memory|^MemoryError\b|Cannot allocate memory)",
        "the machine ran out of memory",
        "use a smaller pair or KV cache, or run fewer servers at once",
    ),
    Sign(
        r"No space left on device|Bus error",
        "a disk or shared memory (/dev/shm) is full",
        "free space; in a container raise its shared memory (docker --shm-size)",
    ),
    Sign(
        r"ModuleNotFoundError: |ImportError: ",
        "the engine's environment lacks a package, or holds one of an unfitting version",
        "make the environment anew; the line above names the package",
    ),
    Sign(
        r"error: (?:unrecognized arguments|argument |the following arguments are required)",
        "this version of the engine does not know a flag, or its value",
        "compare the command with the engine's --help",
    ),
    Sign(
        r"OfflineModeIsEnabled|LocalEntryNotFoundError|We couldn't connect to 'https://huggingface.co'|"
        r"is not a (?:local folder|valid model identifier)",
        "the model is neither at that path nor in the local cache",
        "correct the path, or download the model beforehand",
    ),
    Sign(
        r"There is no module or parameter named",
        "the checkpoint has a tensor that the engine's model does not know",
        "correct the checkpoint's names to the dialect this engine reads",
    ),
    Sign(
        r"SafetensorError|Error while deserializing header",
        "a checkpoint file is damaged",
        "write or download it again",
    ),
)
_COMPILED = tuple((re.compile(sign.pattern), sign) for sign in _SIGNS)


def read(line: str) -> Sign | None:
    """Return the sign that `line` gives, if any."""
    return next((sign for pattern, sign in _COMPILED if pattern.search(line)), None)

"""Questions to torch about the processor, by names that the shared environment's torch no longer has."""

from __future__ import annotations

import torch

_ASKED = ("_is_amx_tile_supported", "_is_avx512_supported")


def answer() -> None:
    """Let the absent ones answer no: that is what a processor without fast paths is."""
    cpu = torch._C._cpu  # noqa: SLF001 -- releases ask it by these names
    for name in _ASKED:
        if not hasattr(cpu, name):
            setattr(cpu, name, lambda: False)

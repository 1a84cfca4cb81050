"""Checkpoints as they lie on disk: headers, config, and a digest that says which one it was."""

from harness.checkpoint.read import Checkpoint, Tensor, read

__all__ = ["Checkpoint", "Tensor", "read"]

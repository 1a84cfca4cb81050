"""Checkpoints as they lie on disk: which files, their headers and config, and what kind of model they hold."""

from harness.checkpoint.header import HeaderError, Shard, Tensor
from harness.checkpoint.read import Checkpoint, read

__all__ = ["Checkpoint", "HeaderError", "Shard", "Tensor", "read"]

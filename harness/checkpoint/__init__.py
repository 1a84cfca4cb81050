"""Checkpoints as they lie on disk: which files, their headers and config, and what kind of model they hold."""

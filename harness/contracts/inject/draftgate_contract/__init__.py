"""Runs in an engine's interpreter: what a release's own model class and `load_weights` do with a checkpoint's keys.

It imports nothing of the harness. It needs `draftgate_probe` beside it on the path, whose tracer it uses.
"""

# noqa: INP001 -- no package: this folder goes on an engine's PYTHONPATH, and a walk over harness must not import it
"""Lets the probe into an SGLang that has no plugins (before 0.5.15); draftgate_probe/by_path.py has the code."""

from draftgate_probe import by_path

by_path.start(__file__)

"""Loads draftgate's fixtures and options for everything under this folder."""

pytest_plugins = ["fixtures.plugin"]

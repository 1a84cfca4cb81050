"""Engines: one adapter file each, and the isolated environments they run in."""

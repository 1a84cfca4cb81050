"""Rewriting a drafter from one dialect into another: names and config only, never a tensor's bytes."""

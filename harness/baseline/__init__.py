"""Baselines: what a run measured, blessed as the reference that later runs are held against."""

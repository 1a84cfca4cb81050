"""Canary pairs: a target and a drafter whose acceptance is known by arithmetic, and the faults to inject."""

"""Verdicts: what was promised, held against what was seen."""

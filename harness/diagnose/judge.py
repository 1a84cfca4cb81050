"""The judge of every cause of `causes.toml`."""

from __future__ import annotations

from collections.abc import Mapping

from harness.diagnose import feeding, figures, loading
from harness.diagnose.rules import Judge

__all__ = ["JUDGES"]

JUDGES: Mapping[str, Judge] = {
    "DIA101": figures.metric,
    "DIA102": figures.off,
    "DIA201": loading.names,
    "DIA202": loading.unfilled,
    "DIA203": loading.embedding,
    "DIA301": feeding.single_state,
    "DIA302": feeding.layers,
    "DIA401": loading.mapping,
    "DIA501": feeding.target,
    "DIA601": feeding.settings,
    "DIA701": figures.other_states,
    "DIA702": figures.untrained,
    "DIA801": figures.cost,
    "DIA901": figures.simulated,
}
"""Code -> judge: a pure function of a `Case`."""

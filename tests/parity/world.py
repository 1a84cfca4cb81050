"""A target of eight layers that is only its states, and two prompts whose features an engine handed over."""

import dataclasses

import ml_dtypes
import numpy as np

from harness.gate.aux_hidden import Expected
from harness.parity.capture import Captured
from harness.parity.compare import Rows, measure
from harness.parity.judge import judge_engine
from harness.parity.reference import Forward

LAYERS, HIDDEN, AUX = 8, 32, (2, 4, 5)
PROMPTS = {"p00": (7, tuple(range(10, 20))), "p01": (5, tuple(range(30, 39)))}
"""By prompt: how many of the tokens are the prompt, and all of them."""


def bfloat16(values):
    return values.astype(ml_dtypes.bfloat16)


def forwards(seed=0):
    """States that drift from layer to layer, in float32 and as bfloat16 rounds them."""
    rng, found = np.random.default_rng(seed), {}
    for _, ids in PROMPTS.values():
        steps = rng.normal(size=(LAYERS + 2, len(ids), HIDDEN)).astype(np.float32)
        wide = steps.cumsum(axis=0) + 3
        found[ids] = Forward(bfloat16(wide), wide)
    return found


def engine(truth, layers=AUX, change=lambda features, prompt: features):
    """Return what an engine hands over that captures the inputs of `layers`."""
    rows = []
    for prompt, (count, ids) in PROMPTS.items():
        features = np.concatenate([truth[ids].own[layer] for layer in layers], axis=1)
        features = bfloat16(np.asarray(change(features.astype(np.float32), prompt)))
        rows.append(Rows(prompt, count, ids, np.arange(len(ids)), features))
    return tuple(rows)


WANT = Expected(3 * HIDDEN, AUX, "here", "the pair's expect.aux_layers")


def judged(rows, truth, want=WANT, name="sglang", requested=None, dtype="bfloat16"):
    measured = measure(rows, truth, want.layers, dtype)
    return measured, judge_engine(name, "1.0", measured, want, Captured((), rows, 0, requested), dtype)


def red(findings):
    return {finding.code: finding for finding in findings if finding.verdict != "PASS"}


def one_reading(layers=AUX):
    return dataclasses.replace(WANT, layers=layers, one_reading=True)

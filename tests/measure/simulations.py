"""Thousands of gates at once: acceptance that varies between prompts, and a machine whose speed drifts and stumbles."""

from __future__ import annotations

import math

import numpy as np

SIMULATIONS = 2_000


def slack(rate: float, runs: int = SIMULATIONS) -> float:
    """Return what chance alone may add to a rate seen in `runs` simulations: three standard errors."""
    return 3 * math.sqrt(rate * (1 - rate) / runs)


def prompt_rates(runs: int, prompts: int, mean: float, concentration: float, rng: np.random.Generator):
    """Return one acceptance rate per prompt, [runs, prompts], from a Beta distribution."""
    return rng.beta(mean * concentration, (1 - mean) * concentration, size=(runs, prompts))


def verify(rates, rng: np.random.Generator, *, k: int = 4, tokens: int = 64, scale=1.0):
    """Return steps [runs, prompts] and acceptances per position [runs, prompts, k] of outputs of `tokens` tokens.

    A draft token is right with its prompt's rate times `scale`, a number or one per position.
    """
    chances = rates[..., None] * np.broadcast_to(scale, (k,))
    position, steps = np.ones(rates.shape), np.zeros(rates.shape)
    accepted = np.zeros((*rates.shape, k))
    while (going := position < tokens).any():
        right = np.cumprod(rng.random((*rates.shape, k)) < chances, axis=2)
        steps += going
        accepted += right * going[..., None]
        position += right.sum(axis=2) + 1
    return steps, accepted


def log_ratios(runs: int, pairs: int, truth: float, rng: np.random.Generator, *, noise=0.06, stumbles=0.03):
    """Return the log ratios new / old of pairs of rounds in the order A B B A B A A B, [runs, pairs].

    The log speed of a round has a part that is its own and one that lasts (autoregressive, 0.5 from round to round), a
    drift of its run's own, and in a share of `stumbles` of all rounds a stumble of 15 % on average. `noise` is the
    standard deviation that the first two give to a log ratio; `truth` is new / old.
    """
    speed = np.empty((runs, 2 * pairs))
    speed[:, 0] = rng.normal(size=runs)
    for i in range(1, 2 * pairs):
        speed[:, i] = 0.5 * speed[:, i - 1] + math.sqrt(0.75) * rng.normal(size=runs)
    speed = 0.5 * speed + math.sqrt(0.75) * rng.normal(size=speed.shape)
    # Of two neighbours a quarter of the variance is common in half of its amount: 2 (1 - 0.25 * 0.5) = 1.75.
    speed *= noise / math.sqrt(1.75)
    speed -= rng.exponential(0.15, speed.shape) * (rng.random(speed.shape) < stumbles)
    speed += rng.normal(0.0, 0.002, (runs, 1)) * np.arange(2 * pairs)
    sign = np.resize([1, -1, -1, 1], pairs)
    return (speed[:, 0::2] - speed[:, 1::2]) * sign + math.log(truth)

"""What changes during a run, as functions of the elapsed share of its time: learning rate, row length, mix."""

from __future__ import annotations

WARM_UP = 0.04
DECAY_FROM = 0.62
EARLY = 0.12
LENGTHS = ((0.60, 512), (0.80, 1024), (1.0, 2048))

# Shares of tokens. Early, more repetition: what copies must settle before the rest is built on it.
EARLY_MIX = {
    "prose": 0.16,
    "technical": 0.06,
    "speech": 0.02,
    "code": 0.14,
    "maths": 0.06,
    "instructions": 0.03,
    "calls": 0.09,
    "translation": 0.05,
    "tasks": 0.22,
    "repeat": 0.12,
    "noise": 0.05,
}
MIX = {
    "prose": 0.18,
    "technical": 0.06,
    "speech": 0.02,
    "code": 0.16,
    "maths": 0.07,
    "instructions": 0.03,
    "calls": 0.11,
    "translation": 0.06,
    "tasks": 0.25,
    "repeat": 0.05,
    "noise": 0.01,
}


def learning_rate(share: float) -> float:
    """Factor on the peak rate: linear warm-up, constant, linear decay to zero at share 1."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.02)
    return min(1.0, max(0.0, (1 - share) / (1 - DECAY_FROM)))


def row_length(share: float, longest: int) -> int:
    """Tokens per row, at most ``longest``."""
    return next(min(length, longest) for until, length in LENGTHS if share <= until or until == 1.0)


def mix(share: float, length: int) -> dict[str, float]:
    """Shares of the kinds; rows longer than 512 have room for long tasks."""
    shares = dict(EARLY_MIX if share < EARLY else MIX)
    if length > 512:
        shares["long_tasks"] = 0.6 * shares["tasks"]
        shares["tasks"] *= 0.4
    return shares

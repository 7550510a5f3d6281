"""What changes during a run, as functions of the elapsed share of its time: learning rate, row length, mix."""

from __future__ import annotations

WARM_UP = 0.03
DECAY_FROM = 0.45
LENGTHS = ((0.8, 512), (1.0, 2048))

# Shares of tokens.
MIX = {
    "prose": 0.10,
    "technical": 0.03,
    "speech": 0.02,
    "code": 0.10,
    "maths": 0.05,
    "instructions": 0.02,
    "calls": 0.11,
    "translation": 0.04,
    "tasks": 0.27,
    "short_tasks": 0.20,
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


def mix(length: int) -> dict[str, float]:
    """Shares of the kinds; rows longer than 512 have room for long tasks."""
    shares = dict(MIX)
    if length > 512:
        shares["long_tasks"] = 0.6 * shares["tasks"]
        shares["tasks"] *= 0.4
    return shares

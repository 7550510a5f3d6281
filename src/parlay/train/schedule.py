"""What changes during a run, as functions of the elapsed share of its time: learning rate and row length."""

from __future__ import annotations

WARM_UP = 0.03
DECAY_FROM = 0.45
LENGTHS = ((0.8, 512), (1.0, 2048))


def learning_rate(share: float) -> float:
    """Factor on the peak rate: linear warm-up, constant, linear decay to zero at share 1."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.02)
    return min(1.0, max(0.0, (1 - share) / (1 - DECAY_FROM)))


def row_length(share: float, longest: int) -> int:
    """Tokens per row, at most ``longest``."""
    return next(min(length, longest) for until, length in LENGTHS if share <= until or until == 1.0)

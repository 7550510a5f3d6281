"""Bounds the steps that read a prompt while other requests stream, so that these do not wait long for a token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

LONGEST = 0.25
"""Seconds that such a step may always take: a pause in a stream that readers hardly notice."""
TIMES = 4
"""How many times as long as without the prompt it may take, where that is more."""


def prompt_rows(seconds: Callable[[int], float], most: int) -> int:
    """Return how many rows of prompts a step may have beside the streams: from 1 to ``most``.

    ``seconds`` predicts the step's seconds with so many rows of prompts, and does not fall.
    """
    bound = max(LONGEST, TIMES * seconds(0))
    return max(1, bisect_right(range(1, most + 1), bound, key=seconds))

"""Bounds the steps that read a prompt while other requests stream, so that these do not wait long for a token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

LONGEST = 0.25
"""Seconds that such a step may always take: a pause in a stream that readers hardly notice."""
TIMES = 4
"""How many times as long as without the prompt it may take, where that is more."""
_NEWEST = 0.5
"""Weight of the last step in how much longer steps take than expected."""
_MOST = 8.0
"""The most that counts of this: a step that something else delayed says nothing about the next one."""


class PromptRows:
    """Decides how many rows of prompts each step has beside streams.

    Expected seconds may be far too low behind a long text, because costs are learned slowly. So what the last such
    steps took counts, too.
    """

    def __init__(self) -> None:
        self._slower, self._expected = 1.0, 0.0
        self._seconds: Callable[[int], float] | None = None

    def within(self, seconds: Callable[[int], float], most: int) -> int:
        """Return how many rows, from 1 to ``most``.

        ``seconds`` predicts a step's seconds with so many rows of prompts, and does not fall.
        """
        self._seconds = seconds
        bound = max(LONGEST / self._slower, TIMES * seconds(0))
        return max(1, bisect_right(range(1, most + 1), bound, key=seconds))

    def begin(self, rows: int) -> None:
        """Note that a step with so many rows of prompts begins now."""
        self._expected = self._seconds(rows) if self._seconds is not None and rows else 0.0

    def learn(self, seconds: float) -> None:
        """Learn that the last step took ``seconds``. This has no effect unless it had prompts beside streams."""
        self._seconds = None
        if self._expected:
            ratio = min(_MOST, max(1.0, seconds / self._expected))
            self._slower += _NEWEST * (ratio - self._slower)
            self._expected = 0.0

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

Seconds = Callable[[int], float]
"""Expected seconds of a step by its number of some rows; they do not fall with it."""


def most_rows(seconds: Seconds, bound: float, least: int, most: int) -> int:
    """Return the most rows, from ``least`` to ``most``, that take at most ``bound`` seconds; ``least`` if none do."""
    return max(least, least - 1 + bisect_right(range(least, most + 1), bound, key=seconds))


class PromptRows:
    """Decides how many rows of prompts each step has beside streams.

    Expected seconds may be far too low behind a long text, because costs are learned slowly. So what the last such
    steps took counts, too.
    """

    def __init__(self) -> None:
        self._slower, self._expected = 1.0, 0.0

    def within(self, seconds: Seconds, most: int) -> int:
        """Return how many rows of prompts, from 1 to ``most``, a step may have. ``seconds`` is by these rows."""
        return most_rows(seconds, max(LONGEST / self._slower, TIMES * seconds(0)), 1, most)

    def begin(self, expected: float) -> None:
        """Note that a step begins. ``expected``: its seconds; 0 unless it reads prompts beside streams."""
        self._expected = expected

    def learn(self, seconds: float) -> None:
        """Learn that the last step took ``seconds``. This has no effect unless something was expected of it."""
        if self._expected:
            ratio = min(_MOST, max(1.0, seconds / self._expected))
            self._slower += _NEWEST * (ratio - self._slower)
            self._expected = 0.0

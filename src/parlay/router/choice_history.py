"""What a router chose over the life of a sequence, in a bounded number of stretches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parlay.types import Stretch

_MOST = 32
"""Stretches. When there would be more, two that follow each other become one, and new ones are twice as long."""


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    tokens: int = 0
    expected: float = 0.0
    choices: Counter[str] = field(default_factory=Counter)

    def join(self, other: _Counts) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.expected += other.expected
        self.choices += other.choices


class Life:
    """Counts steps as they come; see `Stretch`."""

    __slots__ = ("_long", "_stretches")

    def __init__(self) -> None:
        self._long = 1  # steps of a stretch
        self._stretches: list[_Counts] = []

    def step(self, choice: str, tokens: int = 1, expected: float = 1.0) -> None:
        """One step: what was verified in it, or why nothing was, and the tokens that it committed and should have."""
        if not self._stretches or self._stretches[-1].steps == self._long:
            if len(self._stretches) == _MOST:
                self._halve()
            self._stretches.append(_Counts())
        latest = self._stretches[-1]
        latest.steps += 1
        latest.tokens += tokens
        latest.expected += expected
        latest.choices[choice] += 1

    def _halve(self) -> None:
        for first, second in zip(self._stretches[::2], self._stretches[1::2], strict=True):
            first.join(second)
        self._stretches = self._stretches[::2]
        self._long *= 2

    def told(self) -> tuple[Stretch, ...]:
        return tuple([Stretch(each.steps, each.tokens, each.expected, dict(each.choices)) for each in self._stretches])

"""Records what a router chose while one sequence decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from parlay.types import Stretch

_STRETCHES = 32
"""The most stretches. When one more is needed, neighbours are joined in pairs, and new stretches are twice as long."""


@dataclass(slots=True)
class _Stretch:
    steps: int = 0
    tokens: int = 0
    expected: float = 0.0
    choices: dict[str, int] = field(default_factory=dict)

    def join(self, other: _Stretch) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.expected += other.expected
        for choice, steps in other.choices.items():
            self.choices[choice] = self.choices.get(choice, 0) + steps


class ChoiceHistory:
    """The choices made while a sequence decoded, in a bounded number of stretches; see `Stretch`."""

    __slots__ = ("_long", "_stretches")

    def __init__(self) -> None:
        self._long = 1  # steps per stretch
        self._stretches: list[_Stretch] = []

    def add(self, choice: str, tokens: int = 1, expected: float = 1.0) -> None:
        """Add a step: who drafted, or why nothing was verified; the tokens it committed, and those expected."""
        if not self._stretches or self._stretches[-1].steps == self._long:
            if len(self._stretches) == _STRETCHES:
                self._halve()
            self._stretches.append(_Stretch())
        latest = self._stretches[-1]
        latest.steps += 1
        latest.tokens += tokens
        latest.expected += expected
        latest.choices[choice] = latest.choices.get(choice, 0) + 1

    def _halve(self) -> None:
        for first, second in zip(self._stretches[::2], self._stretches[1::2], strict=True):
            first.join(second)
        self._stretches = self._stretches[::2]
        self._long *= 2

    def stretches(self) -> tuple[Stretch, ...]:
        return tuple([Stretch(each.steps, each.tokens, each.expected, dict(each.choices)) for each in self._stretches])

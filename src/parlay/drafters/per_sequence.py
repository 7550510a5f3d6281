"""Bases of drafters that only read the text, and the comparison of a drafter's state with the sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from parlay.types import NO_DRAFT, Draft, Drafter, Needs, Observation, SequenceView

TAIL = 32


class FromText(Drafter):
    """Proposes from the sequences' tokens, and learns nothing from steps.

    A subclass that learns from steps overrides ``needs`` and `observe`; one that keeps state overrides `release`.
    """

    needs = Needs(outcomes=False)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn nothing: `propose` reads the committed tokens."""

    def release(self, sequence: int) -> None:
        """Keep no state to release."""


class OneByOne(FromText):
    """Proposes for each sequence separately and reads its committed tokens only."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        pairs = zip(views, budgets, strict=True)
        return [self._propose(view, budget) if budget > 0 else NO_DRAFT for view, budget in pairs]

    @abstractmethod
    def _propose(self, view: SequenceView, budget: int) -> Draft:
        """Make a draft of at most ``budget`` nodes; the budget is at least 1."""


class History:
    """The tokens that a drafter's state was built from, compared cheaply with the present sequence.

    The prefix that agreed last time is not compared again if the sequence shows the same list object, the list is at
    least as long, and the last `TAIL` tokens of the prefix are unchanged. Otherwise everything is compared. (If a list
    was cut and has grown to the same tail between two calls, this goes unnoticed, and only makes drafts worse.)
    """

    __slots__ = ("_agreed", "_source", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._source: Sequence[int] = ()
        self._agreed = 0

    def agree(self, tokens: Sequence[int]) -> int:
        """The length of the common prefix of ``tokens`` here and the argument."""
        own = self.tokens
        start = self._agreed if tokens is self._source else 0
        if start > len(tokens) or start > len(own) or not _same(own, tokens, max(0, start - TAIL), start):
            start = 0
        end = min(len(own), len(tokens))
        if start < end and not _same(own, tokens, start, end):
            end = next(place for place in range(start, end) if own[place] != tokens[place])
        self._source, self._agreed = tokens, end
        return end

    def cut(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        del self.tokens[length:]
        self._agreed = min(self._agreed, length)


def _same(own: list[int], tokens: Sequence[int], start: int, end: int) -> bool:
    there = tokens[start:end]
    return own[start:end] == (there if isinstance(there, list) else list(there))

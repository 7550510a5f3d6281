"""Budget policies: none, always the same, and as much as pays."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.router.adaptive import Adaptive
from parlay.types import Cost, Draft, Policy, Spent, View

__all__ = ["Adaptive", "Fixed", "Plain", "make_policy"]


class Fixed:
    """Always drafts ``budget`` nodes and verifies all of them."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def plan(self, views: Sequence[View]) -> list[int]:
        return [self._budget] * len(views)

    def trim(self, views: Sequence[View], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def learn(self, view: View, draft: Draft, accepted: int, spent: Spent) -> None:
        """Nothing to learn."""

    def release(self, sequence: int) -> None:
        """Holds nothing."""


class Plain(Fixed):
    """Never drafts."""

    def __init__(self) -> None:
        super().__init__(0)


def make_policy(name: str, budget: int, cost: Cost) -> Policy:
    """The policy that a strategy's ``policy`` and ``k`` ask for."""
    return Fixed(budget) if name == "fixed" else Adaptive(cost, budget)

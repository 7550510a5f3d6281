"""Budget policies by name: no drafts, a fixed size, as much as pays, and the rules of papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from parlay.router.adaptive import Adaptive
from parlay.router.heuristic import Heuristic
from parlay.router.stopping import Confidence, Risk
from parlay.types import Budgets, Cost, Draft, Needs, Policy, SequenceView, Spent

__all__ = ["BY_NAME", "Adaptive", "Confidence", "Fixed", "Heuristic", "Plain", "Risk", "make_policy"]


class Fixed(Policy):
    """Always drafts ``budget`` nodes and verifies all of them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        return Budgets([self.budget] * len(views))

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        """Nothing to learn."""

    def release(self, sequence: int) -> None:
        """Holds nothing."""


class Plain(Fixed):
    """Never drafts."""

    def __init__(self) -> None:
        super().__init__(0)


BY_NAME: Mapping[str, Callable[[int, Cost, Needs], Policy]] = MappingProxyType(
    {
        "adaptive": lambda budget, cost, needs: Adaptive(cost, budget, needs),
        "fixed": lambda budget, cost, needs: Fixed(budget),
        "heuristic": lambda budget, cost, needs: Heuristic(budget),
        "heuristic-transient": lambda budget, cost, needs: Heuristic(budget, transient=True),
        "confidence": lambda budget, cost, needs: Confidence(budget),
        "risk": lambda budget, cost, needs: Risk(budget),
    }
)


def make_policy(name: str, budget: int, cost: Cost, needs: Needs) -> Policy:
    """The policy that a strategy's ``policy`` and ``k`` ask for. ``needs`` are those of its drafter."""
    return BY_NAME[name](budget, cost, needs)

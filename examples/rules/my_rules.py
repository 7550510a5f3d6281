"""An accept rule and a budget policy of one's own."""

from collections.abc import Callable, Sequence

import numpy as np

from parlay.sampling.rules import DistributionRule, RuleInput, longest
from parlay.types import Budgets, Cost, Draft, Exactness, Policy, SequenceView, Spent, Verdict


class Nucleus(DistributionRule):
    """Accepts each token of the smallest set that has nine tenths of the target's probability."""

    exactness = Exactness.LOSSY
    kinds = frozenset({"point"})

    def verdict(self, inputs: RuleInput) -> Verdict:
        return longest(inputs, self._inside, inputs.rng.draw)

    def _inside(self, probs_V: np.ndarray) -> Callable[[int], bool]:
        likelier_V = np.sort(probs_V)[::-1]
        last = np.searchsorted(np.cumsum(likelier_V), 0.9)
        return lambda token: bool(probs_V[token] >= likelier_V[min(last, len(likelier_V) - 1)])


class Halving(Policy):
    """Drafts half as many tokens after a wrong draft, and twice as many after a right one."""

    def __init__(self, budget: int, cost: Cost) -> None:
        self._most, self._budgets = budget, dict[int, int]()

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        return Budgets([self._budgets.get(view.sequence, self._most) for view in views])

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        for view, draft, right in zip(views, drafts, accepted, strict=True):
            if len(draft):
                now = self._budgets.get(view.sequence, self._most)
                self._budgets[view.sequence] = min(2 * now, self._most) if right == len(draft) else max(now // 2, 1)

    def release(self, sequence: int) -> None:
        self._budgets.pop(sequence, None)

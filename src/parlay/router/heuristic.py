"""A budget that follows the last outcome: two nodes more after a draft accepted whole, one less after any other."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.types import Budgets, Draft, Policy, SequenceView, Spent, trees

_MORE, _LESS, _LEAST = 2, 1, 1
_MOST = 1024  # the upper bound of the parameter k


class Heuristic(Policy):
    """The ``heuristic`` schedule of assisted generation (Gante 2023, transformers' ``num_assistant_tokens_schedule``).

    A sequence drafts ``budget`` nodes at first, two more after each draft that was accepted to its end, one less after
    any other, never less than one. A new sequence begins where the one that ended last stood; with ``transient``, at
    ``budget``. A step in which nothing was verified changes nothing. ``budget`` 0 is plain decoding.
    """

    def __init__(self, budget: int, *, transient: bool = False) -> None:
        self._start = budget
        self._transient = transient
        self._budgets: dict[int, int] = {}

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        return Budgets([self._budgets.get(view.sequence, self._start) for view in views])

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        for view, draft, right in zip(views, drafts, accepted, strict=True):
            depths = trees.depths(draft.tree)[: len(draft) - draft.probes]
            if depths:
                budget = self._budgets.get(view.sequence, self._start)
                change = _MORE if right == max(depths) else -_LESS
                self._budgets[view.sequence] = min(max(_LEAST, budget + change), _MOST)

    def release(self, sequence: int) -> None:
        last = self._budgets.pop(sequence, self._start)
        if not self._transient:
            self._start = last

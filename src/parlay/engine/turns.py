"""Verify two halves of a batch in turn, where one is drafted for while the other is verified and that is quicker."""

from __future__ import annotations

from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import SequenceStep
from parlay.types import BesideDrafter, Cost

_NEWEST = 0.1
"""Weight of the newest step in the mean of rows."""


class Turns:
    """Chooses the sequences of the next step where all of them decode with one drafter that goes on during forwards.

    A sequence that waits for its turn has all its tokens committed, so what is drafted for it meanwhile is not drafted
    in vain, and the drafter and the target never wait for each other longer than one of them is slower. But two
    forwards of half the rows may take nearly twice as long as one of all, as on CPUs, so measured prices decide.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._rows = 0.0  # of a sequence in a step that decodes, in the mean of the last ones
        self._last: frozenset[int] = frozenset()  # the numbers of those in the last step
        self._drafter: BesideDrafter | None = None  # that drafts for one half at a time; None: there are no halves

    def due(self, running: list[Sequence]) -> list[Sequence]:
        """Return those that have the next step: all, or of two halves the one that waited during the last step."""
        drafter = running[0].beside if len(running) > 1 and self._rows else None
        if drafter is not None and not self._pays(drafter, running):
            drafter = None
        if self._drafter is not None and self._drafter is not drafter:
            self._drafter.look_ahead(())
        self._drafter = drafter
        if drafter is None:
            return running
        waited = [sequence for sequence in running if sequence.sequence not in self._last]
        due = (waited or running)[: -(-len(running) // 2)]
        drafter.look_ahead([sequence for sequence in running if sequence not in due])
        return due

    def _pays(self, drafter: BesideDrafter, running: list[Sequence]) -> bool:
        """Whether halves are quicker; never while a prompt is read, whose rows are not those of other steps."""
        if not all(sequence.beside is drafter and sequence.decodes for sequence in running):
            return False
        context = sum([len(sequence.tokens) for sequence in running]) // len(running)
        whole, half = (
            self._cost.forward(round(self._rows * count), context) for count in (len(running), -(-len(running) // 2))
        )
        return drafter.halves_pay(running, whole, half, now=drafter is self._drafter)

    def learn(self, steps: list[SequenceStep]) -> None:
        """Note whose turn it was, and how many rows each sequence had."""
        self._last = frozenset([step.sequence.sequence for step in steps])
        if steps and not any(step.prefill or not step.at_root for step in steps):
            rows = sum([len(step.pending) + len(step.draft.tree.tokens) for step in steps]) / len(steps)
            self._rows += (_NEWEST if self._rows else 1.0) * (rows - self._rows)

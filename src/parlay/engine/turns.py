"""Verifies the two halves of a batch in turn, if drafting for one half while the other is verified is quicker."""

from __future__ import annotations

from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import SequenceStep
from parlay.types import BesideDrafter, Cost

_NEWEST = 0.1
"""Weight of the newest step in the mean rows per sequence."""


class Turns:
    """Picks the sequences of the next step, if all decode with one drafter that drafts on during forwards.

    A waiting half has all its tokens committed, so the drafter drafts from the right text meanwhile, and neither
    drafter nor target waits longer than the other is slower. But on CPUs, for example, two forwards of half the rows
    may take nearly twice as long as one of all rows. So measured prices decide.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._rows_each = 0.0  # per sequence in a decoding step: a running mean
        self._last: set[int] = set()  # the numbers of the sequences in the last step
        self._drafter: BesideDrafter | None = None  # drafts for the half that waits; None: no halves

    def due(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences of the next step: all, or the half that waited during the last step."""
        drafter = running[0].beside if len(running) > 1 and self._rows_each else None
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
        """Whether halves are quicker. Never while a prompt is read, because its steps have other numbers of rows."""
        if not all(sequence.beside is drafter and sequence.decodes for sequence in running):
            return False
        context = sum([len(sequence.tokens) for sequence in running]) // len(running)
        whole, half = (
            self._cost.forward(round(self._rows_each * count), context)
            for count in (len(running), -(-len(running) // 2))
        )
        return drafter.halves_pay(running, whole, half, now=drafter is self._drafter)

    def learn(self, steps: list[SequenceStep]) -> None:
        """Note which sequences had the step, and how many rows each had."""
        self._last, rows, decoding = set(), 0, bool(steps)
        for step in steps:
            self._last.add(step.sequence.sequence)
            rows += len(step.pending) + len(step.draft.tree.tokens)
            decoding = decoding and step.at_root and not step.prefill
        if decoding:
            self._rows_each += (_NEWEST if self._rows_each else 1.0) * (rows / len(steps) - self._rows_each)

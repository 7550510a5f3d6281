"""Drafters inside another drafter: builds them, sums up their needs, and shows each what it needs of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from parlay.drafters.options import DRAFT_MODEL, ON_PROBES, PARALLEL_DRAFT
from parlay.drafters.resources import NestedStrategy
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, Drafter, Needs, Observation, SequenceView, trees


class Member:
    """A drafter inside another one, limited to its own ``k`` nodes.

    It is shown only what it needs of each step, and its probes are left out.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        self._drafter = drafter
        self.needs = drafter.needs
        self._most = most

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """Ask the drafter only about sequences that have a budget."""
        limits = [min(budget, self._most) for budget in budgets]
        places = [place for place, limit in enumerate(limits) if limit > 0]
        drafts = [NO_DRAFT] * len(views)
        if places:
            asked = self._drafter.propose([views[place] for place in places], [limits[place] for place in places])
            for place, draft in zip(places, asked, strict=True):
                # Probes may only stand below nodes of their own drafter, so they are left out of trees that are
                # merged.
                drafts[place] = trees.subtree(draft, range(min(limits[place], len(draft) - draft.probes)))
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        needs = self.needs
        self._drafter.observe([_narrowed(observation, needs) for observation in observations])

    def release(self, sequence: int) -> None:
        self._drafter.release(sequence)


def build(owner: str, nested: NestedStrategy) -> Member:
    """Build the drafter of a strategy inside the strategy ``owner``, limited to its own ``k``.

    Raises UsageError for a strategy that would never draft there, and for one that drafts during forwards, because the
    engine could not charge its owner for that.
    """
    if nested.name == PARALLEL_DRAFT:
        raise UsageError(
            f"strategy {owner}: {nested.name} drafts during the target's forwards, which strategies inside others "
            f"can't; name {DRAFT_MODEL} there"
        )
    if nested.name in ON_PROBES:
        raise UsageError(
            f"strategy {owner}: {nested.name} guesses on rows beside its own draft, which strategies inside others "
            "don't have; use it alone, or in auto:of="
        )
    drafter = nested.build()
    if drafter is None:
        raise UsageError(f"strategy {owner}: {nested.name} drafts nothing; remove it")
    return Member(drafter, nested.k)


def needs_of(drafters: Iterable[Drafter], *, outcomes: bool = False) -> Needs:
    """The combined needs of drafters. ``outcomes``: the drafter that holds them wants to observe steps, too."""
    needs = [drafter.needs for drafter in drafters]
    return Needs(
        taps=tuple(sorted({layer for need in needs for layer in need.taps})),
        top_k=max((need.top_k for need in needs), default=0),
        layers=any(need.layers for need in needs),
        outcomes=outcomes or any(need.outcomes for need in needs),
        expected=max((need.expected for need in needs), default=0.0),
    )


def _narrowed(observation: Observation, needs: Needs) -> Observation:
    taps = {layer: observation.taps[layer] for layer in needs.taps if layer in observation.taps}
    top_k = tuple(row[: needs.top_k] for row in observation.top_k) if needs.top_k else ()
    if taps.keys() == observation.taps.keys() and top_k == observation.top_k:
        return observation
    return replace(observation, taps=taps, top_k=top_k)

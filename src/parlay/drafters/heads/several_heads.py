"""What drafters share whose heads guess one token each: the target's latest state, and a static tree to fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.draft_models.static_trees import FilledTree, StaticTree, best_tree
from parlay.drafters.heads.guessing import Guessing
from parlay.drafters.heads.latest_states import LatestStates
from parlay.heads.artefact import HeadArtefact
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView


class HeadTree(FilledTree):
    """One sequence's tree, and the target's state of the token before its root."""

    def __init__(self, view: SequenceView, state_H: Tensor, shape: StaticTree) -> None:
        super().__init__(shape)
        self.view, self.state_H = view, state_H


class SeveralHeadsDrafter(ABC):
    """Which ranks a tree combines is fixed by how often each rank of each head was right on held-out texts.

    A tree of n nodes holds the n paths with the highest products. The heads read the state of the token before the
    root, so nothing is cached. Where a request samples, candidates are ranked by the request's own noise. Scores are
    the heads' probabilities.
    """

    def __init__(self, held: HeadArtefact, draft_ids_D: Tensor, vocab_size: int) -> None:
        """``draft_ids_D`` are the tokens that the heads can propose, of the target's ``vocab_size``."""
        self._source = held.method
        self._acceptance: list[list[float]] = held.settings["acceptance"]
        (layer,) = held.settings["taps"]
        self.needs = Needs(taps=(layer,))
        self._states = LatestStates(layer)
        self._guessing = Guessing(draft_ids_D, vocab_size)
        self._shape = lru_cache(maxsize=256)(self._best_shape)

    @abstractmethod
    def _fill(self, level: int, trees: Sequence[HeadTree]) -> None:
        """Give the children of the nodes of a level their tokens. Each of the trees has such nodes."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        wanted = [place for place, budget in enumerate(budgets) if budget > 0]
        states = self._states.of([views[place] for place in wanted])
        trees = {
            place: HeadTree(views[place], state_H, self._shape(budgets[place]))
            for place, state_H in zip(wanted, states, strict=True)
            if state_H is not None
        }
        for level in range(len(self._acceptance)):
            growing = [tree for tree in trees.values() if tree.inner(level)]
            if growing:
                self._fill(level, growing)
        return [trees[place].draft(self._source) if place in trees else NO_DRAFT for place in range(len(views))]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._states.take(observation)

    def release(self, sequence: int) -> None:
        self._states.release(sequence)

    def _best(self, logits_ND: Tensor, trees: Sequence[HeadTree], paths: Sequence[Sequence[int]]) -> list[list[Guess]]:
        """Per row the best tokens after a path of a tree."""
        return self._guessing.best(logits_ND, [tree.view for tree in trees], paths, len(self._acceptance[0]))

    def _best_shape(self, budget: int) -> StaticTree:
        return best_tree(self._acceptance, budget, len(self._acceptance))

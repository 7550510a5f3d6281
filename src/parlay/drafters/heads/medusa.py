"""Medusa (Cai et al. 2024): heads on the target's last state guess one token each, and a static tree combines them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.draft_models.static_trees import StaticTree, best_tree
from parlay.drafters.heads.guessing import Guessing
from parlay.drafters.heads.latest_states import LatestStates
from parlay.drafters.heads.options import MEDUSA as SOURCE
from parlay.drafters.heads.options import MedusaOptions
from parlay.drafters.resources import Resources
from parlay.heads.medusa import MedusaConfig, MedusaHeads
from parlay.heads.opening import opened
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, Tree


class Medusa:
    """Medusa-1 (Cai et al. 2024, arXiv:2401.10774).

    Every node at one depth has the same candidates: the best tokens of that depth's head. Which ranks are combined is
    fixed beforehand, by how often each rank of each head was right on held-out texts: a tree of n nodes holds the n
    paths with the highest products. The heads read the state of the token before the root, so nothing is cached. Where
    a request samples, candidates are ranked by the request's own noise. Scores are the heads' probabilities. The tokens
    are verified by the strategy's accept rule; the paper's typical acceptance is one of those that can be asked for.
    """

    def __init__(self, resources: Resources, options: MedusaOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        held = head.artefact
        config = MedusaConfig(
            held.layer.hidden_size,
            held.layer.vocab_size,
            int(held.settings["draft_vocab_size"]),
            int(held.settings["heads"]),
        )
        self._heads = MedusaHeads(config)
        self._heads.load_state_dict(dict(held.tensors))
        self._heads.float().requires_grad_(False)
        self._acceptance: list[list[float]] = held.settings["acceptance"]
        (layer,) = held.settings["taps"]
        self.needs = Needs(taps=(layer,))
        self._states = LatestStates(layer)
        self._guessing = Guessing(self._heads.draft_ids, resources.vocab_size)
        self._shape = lru_cache(maxsize=256)(self._best_shape)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        wanted = [place for place, budget in enumerate(budgets) if budget > 0]
        states = self._states.of([views[place] for place in wanted])
        ready = {place: state for place, state in zip(wanted, states, strict=True) if state is not None}
        drafts = [NO_DRAFT] * len(views)
        if ready:
            logits_KBD = self._heads(torch.stack(list(ready.values())).float())
            for index, place in enumerate(ready):
                shape = self._shape(budgets[place])
                drafts[place] = _filled(shape, self._guesses(views[place], logits_KBD[: shape.levels, index]))
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._states.take(observation)

    def release(self, sequence: int) -> None:
        self._states.release(sequence)

    def _best_shape(self, budget: int) -> StaticTree:
        return best_tree(self._acceptance, budget, len(self._acceptance))

    def _guesses(self, view: SequenceView, logits_LD: Tensor) -> list[list[Guess]]:
        """The candidates of each level, best first. A level's noise depends on its depth alone, so any path does."""
        found: list[list[Guess]] = []
        for row_D in logits_LD:
            path = [level[0][0] for level in found]
            found += self._guessing.best(row_D[None], [view], [path], len(self._acceptance[0]))
            if not found[-1]:
                return found[:-1]
        return found


def _filled(shape: StaticTree, levels: Sequence[Sequence[Guess]]) -> Draft:
    """The shape with the candidates of each level; where a level offers fewer, nodes and what is below are left out."""
    places: dict[int, int] = {-1: -1}
    nodes: list[tuple[int, int, float]] = []
    for node, (parent, rank, depth) in enumerate(zip(shape.parents, shape.ranks, shape.depths, strict=True)):
        if parent in places and depth <= len(levels) and rank < len(levels[depth - 1]):
            places[node] = len(nodes)
            nodes.append((levels[depth - 1][rank][0], places[parent], levels[depth - 1][rank][1]))
    if not nodes:
        return NO_DRAFT
    tokens, parents, scores = zip(*nodes, strict=True)
    return Draft(Tree(tokens, parents), sources=(SOURCE,) * len(nodes), scores=scores)

"""Hydra (Ankner et al. 2024): Medusa's heads, each of which reads the tokens drafted before its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from parlay import trees
from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.draft_models.static_trees import StaticTree, best_tree
from parlay.drafters.heads.guessing import Guessing
from parlay.drafters.heads.latest_states import LatestStates
from parlay.drafters.heads.options import HYDRA as SOURCE
from parlay.drafters.heads.options import HydraOptions
from parlay.drafters.resources import Resources
from parlay.heads.hydra import HydraHeads
from parlay.heads.medusa import MedusaConfig
from parlay.heads.opening import opened
from parlay.models.fused import as_tensor
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, Tree


class _Planting:
    """One sequence's tree: a shape that is filled with tokens level by level."""

    def __init__(self, view: SequenceView, state_H: Tensor, shape: StaticTree) -> None:
        self.view, self.state_H = view, state_H
        self._shape = shape
        self._children = trees.children(Tree(shape.ranks, shape.parents))
        self._filled: dict[int, Guess] = {}

    def inner(self, level: int) -> list[int]:
        """The nodes so deep, the root at 0, that have children to fill."""
        nodes = [-1] if level == 0 else [node for node in sorted(self._filled) if self._shape.depths[node] == level]
        return [node for node in nodes if self._children[node]]

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to this node."""
        above = []
        while node >= 0:
            above.append(self._filled[node][0])
            node = self._shape.parents[node]
        return above[::-1]

    def fill(self, node: int, found: Sequence[Guess]) -> None:
        """A node's children get the tokens of their ranks; where fewer are offered, they are left out."""
        for child in self._children[node]:
            if self._shape.ranks[child] < len(found):
                self._filled[child] = found[self._shape.ranks[child]]

    def draft(self) -> Draft:
        nodes = sorted(self._filled)
        if not nodes:
            return NO_DRAFT
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        tokens, scores = zip(*(self._filled[node] for node in nodes), strict=True)
        tree = Tree(tokens, tuple(places[self._shape.parents[node]] for node in nodes))
        return Draft(tree, sources=(SOURCE,) * len(nodes), scores=scores)


class Hydra:
    """Hydra (Ankner et al. 2024, arXiv:2402.05109).

    As in Medusa a tree's shape follows from how often each rank of each head was right on held-out texts, and nothing
    is cached. But a head reads the root and the path above its tokens, so each level of a tree is one product for the
    nodes that have children. Where a request samples, candidates are ranked by its own noise. Scores are the heads'
    probabilities. Hydra++'s prefix layer is not there.
    """

    def __init__(self, resources: Resources, options: HydraOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        held, settings = head.artefact, head.artefact.settings
        size, vocab_size = held.layer.hidden_size, held.layer.vocab_size
        config = MedusaConfig(size, vocab_size, int(settings["draft_vocab_size"]), int(settings["heads"]))
        heads = HydraHeads(config)
        heads.load_state_dict(dict(held.tensors))
        self._heads = heads.float().requires_grad_(False).heads
        self._embedding_VH = as_tensor(head.embedding, torch.bfloat16)
        self._acceptance: list[list[float]] = settings["acceptance"]
        (layer,) = settings["taps"]
        self.needs = Needs(taps=(layer,))
        self._states = LatestStates(layer)
        self._guessing = Guessing(heads.draft_ids, resources.vocab_size)
        self._shape = lru_cache(maxsize=256)(self._best_shape)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        wanted = [place for place, budget in enumerate(budgets) if budget > 0]
        states = self._states.of([views[place] for place in wanted])
        plantings = {
            place: _Planting(views[place], state_H, self._shape(budgets[place]))
            for place, state_H in zip(wanted, states, strict=True)
            if state_H is not None
        }
        for level in range(len(self._heads)):
            self._fill(level, list(plantings.values()))
        return [plantings[place].draft() if place in plantings else NO_DRAFT for place in range(len(views))]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._states.take(observation)

    def release(self, sequence: int) -> None:
        self._states.release(sequence)

    def _best_shape(self, budget: int) -> StaticTree:
        return best_tree(self._acceptance, budget, len(self._acceptance))

    def _fill(self, level: int, plantings: Sequence[_Planting]) -> None:
        """One level of all trees."""
        rows = [(planting, node) for planting in plantings for node in planting.inner(level)]
        if not rows:
            return
        paths = [planting.path(node) for planting, node in rows]
        ids_NK = torch.tensor(
            [[planting.view.tokens[-1], *path] for (planting, _), path in zip(rows, paths, strict=True)]
        )
        states_NH = torch.stack([planting.state_H for planting, _ in rows]).float()
        logits_ND = self._heads[level](states_NH, self._embedding_VH[ids_NK].float().flatten(1))
        views = [planting.view for planting, _ in rows]
        guesses = self._guessing.best(logits_ND, views, paths, len(self._acceptance[0]))
        for (planting, node), found in zip(rows, guesses, strict=True):
            planting.fill(node, found)

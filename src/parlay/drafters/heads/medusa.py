"""Medusa (Cai et al. 2024): heads on the target's last state guess one token each, and a static tree combines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parlay.drafters.heads.options import MEDUSA as SOURCE
from parlay.drafters.heads.options import HeadOptions
from parlay.drafters.heads.several_heads import HeadTree, SeveralHeadsDrafter
from parlay.drafters.resources import Resources
from parlay.heads.medusa import MedusaHeads
from parlay.heads.opening import opened
from parlay.heads.several import SeveralHeadsConfig


class Medusa(SeveralHeadsDrafter):
    """Medusa-1 (Cai et al. 2024, arXiv:2401.10774); see `SeveralHeadsDrafter`.

    Every node at one depth has the same candidates: the best tokens of that depth's head. The tokens are verified by
    the strategy's accept rule; the paper's typical acceptance is one of those that can be asked for.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        held = opened(SOURCE, resources.find_head, options.head).artefact
        self._heads = MedusaHeads(SeveralHeadsConfig.of(held))
        self._heads.load_state_dict(dict(held.tensors))
        self._heads.float().requires_grad_(False)
        super().__init__(held, self._heads.draft_ids, resources.vocab_size)

    def _fill(self, level: int, trees: Sequence[HeadTree]) -> None:
        """A level's noise depends on its depth alone, so the path of any of its nodes does."""
        states_BH = torch.stack([tree.state_H for tree in trees]).float()
        paths = [tree.path(tree.inner(level)[0]) for tree in trees]
        for tree, found in zip(trees, self._best(self._heads.head(level, states_BH), trees, paths), strict=True):
            for node in tree.inner(level):
                tree.fill(node, found)

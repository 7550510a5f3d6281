"""Hydra (Ankner et al. 2024): Medusa's heads, each of which reads the tokens drafted before its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parlay.drafters.heads.options import HYDRA as SOURCE
from parlay.drafters.heads.options import HeadOptions
from parlay.drafters.heads.several_heads import HeadTree, SeveralHeadsDrafter
from parlay.drafters.resources import Resources
from parlay.heads.hydra import HydraHeads
from parlay.heads.opening import opened
from parlay.heads.several import SeveralHeadsConfig
from parlay.models.fused import as_tensor


class Hydra(SeveralHeadsDrafter):
    """Hydra (Ankner et al. 2024, arXiv:2402.05109); see `SeveralHeadsDrafter`.

    A head reads the root and the path above its tokens, so each level of a tree is one product for the nodes that have
    children. Hydra++'s prefix layer is not there.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        heads = HydraHeads(SeveralHeadsConfig.of(head.artefact))
        heads.load_state_dict(dict(head.artefact.tensors))
        self._heads = heads.float().requires_grad_(False).heads
        self._embedding_VH = as_tensor(head.embedding, torch.bfloat16)
        super().__init__(head.artefact, heads.draft_ids, resources.vocab_size)

    def _fill(self, level: int, trees: Sequence[HeadTree]) -> None:
        rows = [(tree, node) for tree in trees for node in tree.inner(level)]
        paths = [tree.path(node) for tree, node in rows]
        ids_NK = torch.tensor([[tree.view.tokens[-1], *path] for (tree, _), path in zip(rows, paths, strict=True)])
        states_NH = torch.stack([tree.state_H for tree, _ in rows]).float()
        logits_ND = self._heads[level](states_NH, self._embedding_VH[ids_NK].float().flatten(1))
        for (tree, node), found in zip(rows, self._best(logits_ND, [tree for tree, _ in rows], paths), strict=True):
            tree.fill(node, found)

"""EAGLE-3 (Li et al. 2025): a one-layer head over fused features of several target layers drafts a dynamic tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from parlay.drafters.heads.dynamic_tree import DynamicTree
from parlay.drafters.heads.guessing import Guessing, draft_ids
from parlay.drafters.heads.layer_heads import Growth, LayerHeadDrafter
from parlay.drafters.heads.options import EAGLE3 as SOURCE
from parlay.drafters.heads.options import DynamicTreeOptions
from parlay.drafters.resources import Resources
from parlay.heads.native import eagle3_decoder
from parlay.heads.opening import opened


class Eagle3(LayerHeadDrafter):
    """EAGLE-3 (Li et al. 2025, arXiv:2503.01840), with the trees of EAGLE-2 (Li et al. 2024, arXiv:2406.16858).

    See `LayerHeadDrafter`. The layer reads the embeddings beside these inputs.
    """

    def __init__(self, resources: Resources, options: DynamicTreeOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        held = head.artefact
        runner = head.make_runner(*eagle3_decoder(held.layer, held.tensors, head.embedding))
        guessing = Guessing(draft_ids(held.tensors["d2t"]), resources.vocab_size)
        growth = Growth(options.depth, options.width, options.width * options.depth)
        super().__init__(SOURCE, runner, held, guessing, growth)
        self._options, self._dtype = options, head.dtype
        self._fc_HF = held.tensors["fc.weight"].float()  # so is the product: few processors are fast in bfloat16

    def _from_target(self, features_KF: Tensor, tokens: Sequence[int]) -> Tensor:
        return F.linear(features_KF.float(), self._fc_HF).to(self._dtype)

    def _from_itself(self, hidden_KH: Tensor, tokens: Sequence[int]) -> Tensor:
        return hidden_KH

    def _tree(self, budget: int) -> DynamicTree:
        return DynamicTree(self._options.width, self._options.min_p)

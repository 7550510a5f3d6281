"""A head that drafts a whole block in one forward, with mask tokens in all rows but the first (P-EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from parlay.drafters.heads.state_heads import MarginalsDrafter
from parlay.drafters.heads.states import LayerLogits
from parlay.drafters.options import BLOCK_DRAFTER as SOURCE
from parlay.drafters.options import BlockOptions
from parlay.drafters.resources import Resources
from parlay.heads.block import BlockConfig
from parlay.heads.native import block_decoder, input_norm
from parlay.heads.opening import opened


class BlockDrafter(MarginalsDrafter):
    """P-EAGLE (Hui et al. 2026, arXiv:2602.01469); see `MarginalsDrafter`. A tree takes one forward of the head."""

    def __init__(self, resources: Resources, options: BlockOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        artefact, config = head.artefact, BlockConfig.of(head.artefact)
        shape = artefact.layer, artefact.operands, head.embedding, config.layers
        runner = head.runner(SOURCE, partial(block_decoder, *shape, normed=config.normed))
        norm = input_norm(artefact, "layers.0.hidden_norm.weight")
        fuse = head.fuse

        def inputs(features_KF: Tensor, tokens: Sequence[int]) -> Tensor:
            return norm(fuse(features_KF)).to(head.dtype)

        masked_MH = inputs(artefact.tensors["mask_hidden"][None], ()).expand(config.length - 1, -1)
        states = LayerLogits(runner, config.taps, inputs, masked_MH, config.mask_id, room=resources.room)
        super().__init__(artefact, states, config.length, width=options.width, min_p=options.min_p)

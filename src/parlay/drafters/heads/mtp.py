"""Multi-token prediction: one module that is used again for each depth, or several heads in parallel."""

from __future__ import annotations

from functools import partial

from parlay.drafters.heads.next_states import SequentialMtp
from parlay.drafters.heads.state_heads import MarginalsDrafter
from parlay.drafters.heads.states import LayerLogits, SideBySide
from parlay.drafters.options import MTP as SOURCE
from parlay.drafters.options import DynamicTreeOptions
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateRoom
from parlay.heads.native import parallel_decoder
from parlay.heads.opening import OpenHead, opened
from parlay.types import Drafter


def mtp(resources: Resources, options: DynamicTreeOptions) -> Drafter:
    """Make the drafter for the form of the head that the strategy names."""
    head = opened(SOURCE, resources.find_head, options.head)
    parallel = "heads" in head.artefact.settings
    return (ParallelMtp if parallel else SequentialMtp)(head, options, resources.room)


class ParallelMtp(MarginalsDrafter):
    """Multi-token prediction with parallel heads, Gloeckle et al. 2024, arXiv:2404.19737; see `MarginalsDrafter`.

    Each head has a cache of its own.
    """

    def __init__(self, head: OpenHead, options: DynamicTreeOptions, room: StateRoom) -> None:
        artefact = head.artefact
        levels = min(options.depth, artefact.settings["heads"])
        super().__init__(artefact, parallel_states(head, room), levels, width=options.width, min_p=options.min_p)


def parallel_states(head: OpenHead, room: StateRoom) -> SideBySide:
    """The logits of all parallel heads."""
    artefact = head.artefact
    decoder = partial(parallel_decoder, artefact.layer, artefact.operands, head.embedding)
    return SideBySide(
        [
            LayerLogits(
                head.runner(f"head {place}", partial(decoder, place)),
                artefact.settings["taps"],
                lambda features_KF, _: features_KF.to(head.dtype),
                room=room,
            )
            for place in range(artefact.settings["heads"])
        ]
    )

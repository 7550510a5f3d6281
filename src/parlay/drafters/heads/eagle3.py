"""EAGLE-3 (Li et al. 2025): a one-layer head over fused features of several target layers drafts a dynamic tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from parlay.drafters.heads.layer_heads import LayerHeadDrafter, TreeJob, TreeLimits
from parlay.drafters.heads.level_trees import DynamicTree, Guessing
from parlay.drafters.options import EAGLE3 as SOURCE
from parlay.drafters.options import Eagle3Options
from parlay.drafters.resources import Resources
from parlay.heads.base import draft_ids, with_newest
from parlay.heads.eagle3 import normed
from parlay.heads.native import eagle3_decoder, input_norm
from parlay.heads.opening import opened
from parlay.models.forward import NO_TEXT, Growth, HeadRows, TreeRequest
from parlay.sampling import noise
from parlay.types import NO_TREE, Draft, PickedRows, Segment, Tree


class Eagle3(LayerHeadDrafter):
    """EAGLE-3 (Li et al. 2025, arXiv:2503.01840), with the trees of EAGLE-2 (Li et al. 2024, arXiv:2406.16858).

    See `LayerHeadDrafter`. The layer reads token embeddings beside these inputs. Trees also favour copies.
    """

    def __init__(self, resources: Resources, options: Eagle3Options) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        artefact = head.artefact
        ids_D, rows = draft_ids(artefact.tensors["d2t"]), head.rows_of_lm_head
        ids_D, slot = (ids_D, len(ids_D)) if rows is None else with_newest(ids_D, artefact.layer.vocab_size)
        decoder = partial(
            eagle3_decoder, artefact.layer, artefact.operands, head.embedding, ids_D, normed=normed(artefact)
        )
        runner = head.runner(SOURCE, decoder)
        if rows is not None and runner.grows and slot < len(ids_D):
            ids_D = runner.list_newest(ids_D, slot, rows)
        self._head, self._ids_D = runner, ids_D
        guessing = Guessing(self._ids_D, copies=options.copies)
        limits = TreeLimits(options.depth, options.width, options.width * options.depth)
        fuse, norm, dtype = head.fuse, input_norm(artefact, "midlayer.hidden_norm.weight"), head.dtype

        def from_target(features_KF: Tensor, tokens: Sequence[int]) -> Tensor:
            return norm(fuse(features_KF)).to(dtype)

        def read(text: Segment, features: Sequence[PickedRows]) -> None:
            runner.read_text(text, fuse.linear, features)

        self._at_once = runner.grows and not normed(artefact)
        super().__init__(
            SOURCE,
            runner,
            artefact,
            guessing,
            limits,
            from_target=from_target,
            room=resources.room,
            read=read if self._at_once else None,
        )
        self._options, self._fuse, self._norm = options, fuse, norm

    def _from_itself(self, hidden_KH: Tensor, tokens: Sequence[int]) -> Tensor:
        return self._norm(hidden_KH)

    def _tree(self, budget: int) -> DynamicTree:
        return DynamicTree(self._options.width, self._options.min_p, budget)

    def _grow(self, jobs: list[TreeJob]) -> None:
        """Grow all trees in one call, if the compiled decoder runs the head and no norm is needed between levels."""
        if not self._at_once:
            super()._grow(jobs)
            return
        options = self._options
        head = HeadRows(self._ids_D, self._fuse.linear, [piece for job in jobs for piece in job.text.features])
        growth = Growth(options.depth, options.width, options.min_p, head)
        texts = [Segment(job.text.name, job.text.pending, NO_TREE, len(job.text.pending) - 1) for job in jobs]
        wishes = [_wish(job, options) for job in jobs]
        for job, grown in zip(jobs, self._head.grow(texts, growth, wishes), strict=True):
            if grown.tokens:
                sources = (SOURCE,) * len(grown.tokens)
                job.draft = Draft(Tree(grown.tokens, grown.parents), sources=sources, scores=grown.chances)


def _wish(job: TreeJob, options: Eagle3Options) -> TreeRequest:
    """The arguments of the job's draft for the compiled decoder, with the noise of a request that samples."""
    own, place = job.text.view.request, len(job.text.view.tokens)
    temperature, text = own.params.temperature, job.text.text if options.copies else NO_TEXT
    streams = [noise.stream(own.key, place + level) for level in range(options.depth)] if temperature else ()
    return TreeRequest(
        job.budget, temperature, streams, unread=job.text.unread, salt=own.salt, ends=own.stop_ids, text=text
    )

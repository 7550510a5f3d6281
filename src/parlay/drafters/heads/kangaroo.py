"""Kangaroo (Liu et al. 2024): the target's first layers and a trained adapter write a chain while they are sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parlay.drafters.draft_models.guesses import probabilities
from parlay.drafters.heads.level_trees import Guessing
from parlay.drafters.heads.text_rows import TextRows, WaitingRows
from parlay.drafters.heads.watch import Watched
from parlay.drafters.options import KANGAROO as SOURCE
from parlay.drafters.options import KangarooOptions
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.skipping import ChainDraft, layers_of, skippable
from parlay.heads.base import draft_ids
from parlay.heads.native import kangaroo_decoder
from parlay.heads.opening import opened
from parlay.types import NO_DRAFT, Draft, Features, Needs, Segment, SequenceView, trees


@dataclass(slots=True)
class _Job:
    """One sequence to draft for: its rows that must run first, then the rows of the root and of its chain."""

    text: WaitingRows
    chain: ChainDraft

    def segment(self, state_H: Tensor) -> Segment:
        """The newest row, which reads ``state_H``; in the first forward, also the rows that must run first."""
        view, path = self.text.view, self.chain.tokens
        rows, first = trees.chain_tree([view.tokens[-1], *path]), len(self.text.pending) + len(path)
        inputs_KH = state_H[None] if path else torch.cat((self.text.inputs(), state_H[None]))
        base = first if path else 0
        return Segment(self.text.name, self.text.pending, rows, first, base, Features(inputs_KH))


class Kangaroo(Watched):
    """Kangaroo (Liu et al. 2024, arXiv:2404.18911), for all sequences together.

    The target runs its first layers over a drafted token, and the adapter predicts the next one. A chain ends after the
    token at which the largest probability falls below ``threshold``, which is the second early exit. Verification runs
    all layers; in the paper it continues from the states of the first layers, which this engine does not keep.
    """

    def __init__(self, resources: Resources, options: KangarooOptions) -> None:
        skippable(SOURCE, resources)
        head = opened(SOURCE, resources.find_head, options.head)
        artefact = head.artefact
        (self._exit,) = artefact.settings["taps"]
        self.needs = Needs(taps=(self._exit,), layers=True, expected=artefact.expected)
        decoder = partial(kangaroo_decoder, artefact.layer, artefact.operands, head.embedding)
        self._runner = head.runner(SOURCE, decoder)
        dtype = head.dtype
        self._rows = TextRows(self._runner, (self._exit,), lambda each_KF, _: each_KF.to(dtype), resources.room)
        super().__init__(SOURCE, artefact, self._rows)
        self._guessing = Guessing(draft_ids(artefact.tensors["d2t"]))
        self._options = options

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        jobs = self._jobs(views, budgets)
        active = list(jobs.values())
        while active:
            active = self._step(active)
        for job in jobs.values():
            self._rows.keep(job.text)
        return [jobs[place].chain.chain(SOURCE) if place in jobs else NO_DRAFT for place in range(len(views))]

    def _jobs(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, _Job]:
        """The sequences that can be drafted for now, by index."""
        most = self._runner.spec.max_context
        limits = [
            min(budget, self._options.length, most - len(view.tokens))
            for view, budget in zip(views, budgets, strict=True)
        ]
        found = self._rows.waiting(views, [limit + 1 if limit > 0 else None for limit in limits])
        return {
            place: _Job(text, ChainDraft(text.view, limits[place], self._options.threshold))
            for place, text in found.items()
        }

    def _step(self, jobs: list[_Job]) -> list[_Job]:
        """Draft one more token for each job. Returns the jobs that go on."""
        views, paths = [job.text.view for job in jobs], [job.chain.tokens for job in jobs]
        states_BH = layers_of(views[0]).early(views, paths, self._exit)
        segments = [job.segment(state_H) for job, state_H in zip(jobs, states_BH, strict=True)]
        logits_BD = self._runner.forward(segments).logits_RV
        guesses = self._guessing.best(logits_BD, views, paths, 1)
        tops = probabilities(logits_BD, views).amax(-1).tolist()
        return [job for job, found, top in zip(jobs, guesses, tops, strict=True) if job.chain.take(found, top)]

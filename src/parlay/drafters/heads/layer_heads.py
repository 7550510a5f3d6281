"""What drafters share whose head is a decoder layer with a cache of its own, which runs a tree level by level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.heads.guessing import Guessing
from parlay.drafters.heads.level_trees import LevelTree
from parlay.drafters.heads.sequences import HeadSequence, HeadSequences
from parlay.types import NO_DRAFT, NO_TREE, Draft, Features, Needs, Observation, Runner, Segment, SequenceView

_CHUNK = 512  # rows of one sequence in one forward
_LAST = 1  # the tap behind the head's one layer


@dataclass(frozen=True, slots=True)
class Growth:
    """How large trees grow: most levels, and most children of a node.

    ``rows``: most rows of a tree that the head runs; None if these are all in the draft.
    """

    levels: int
    children: int
    rows: int | None = None


@dataclass(slots=True)
class _Job:
    """One sequence to draft for: the rows that it has to run first, then its tree."""

    view: SequenceView
    budget: int
    name: int
    pending: tuple[int, ...]
    inputs_KH: Tensor
    """What the pending rows read, or those of the latest level."""
    tree: LevelTree

    def segment(self) -> Segment:
        rows, count = (self.tree.rows(), len(self.tree.newest)) if self.tree.ran else (NO_TREE, 1)
        end = len(self.pending) + len(rows)
        base = end - count if rows.tokens else 0
        return Segment(self.name, self.pending, rows, end - count, base, Features(self.inputs_KH))


class LayerHeadDrafter(ABC):
    """The head continues from the target's features of the committed text, then from its own hidden states.

    Each level of a tree is one forward of the head, for all sequences together. Rows of drafted tokens are dropped from
    its cache: once committed they run again, on the target's own features. Where a request samples, candidates are
    ranked by the request's own noise. Scores are the head's probabilities.
    """

    def __init__(self, source: str, runner: Runner, taps: Sequence[int], guessing: Guessing, growth: Growth) -> None:
        self._source, self._runner, self._guessing, self._growth = source, runner, guessing, growth
        self.needs = Needs(taps=tuple(taps))
        self._sequences = HeadSequences(runner, taps)

    @abstractmethod
    def _from_target(self, features_KF: Tensor, tokens: Sequence[int]) -> Tensor:
        """What rows read, ``[K, H]``, of the target's features and of the tokens that come one after each."""

    @abstractmethod
    def _from_itself(self, hidden_KH: Tensor, tokens: Sequence[int]) -> Tensor:
        """The same for rows of drafted ``tokens``, of what left the layer at the rows above them."""

    @abstractmethod
    def _tree(self, budget: int) -> LevelTree:
        """A new tree for a draft of so many nodes."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        jobs = self._jobs(views, budgets)
        if jobs:
            self._grow(list(jobs.values()))
        return [
            jobs[place].tree.draft(jobs[place].budget, self._source) if place in jobs else NO_DRAFT
            for place in range(len(views))
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            if observation.taps:
                self._sequences.take(observation.view, observation.start, observation.taps)

    def release(self, sequence: int) -> None:
        self._sequences.release(sequence)

    def _jobs(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> dict[int, _Job]:
        """What can be drafted now, by place; all but the last chunk of its pending rows has run."""
        most = self._runner.spec.max_context
        limits = [min(budget, most - len(view.tokens)) for view, budget in zip(views, budgets, strict=True)]
        wanted = [place for place, limit in enumerate(limits) if limit > 0 and len(views[place].tokens) > 1]
        busy = {views[place].sequence for place in wanted}
        self._catch_up([views[place] for place in wanted])
        rows = self._growth.rows
        room = [len(views[place].tokens) + (budgets[place] if rows is None else rows) for place in wanted]
        ready = [
            place
            for place, tokens in zip(wanted, room, strict=True)
            if self._sequences.reserve(views[place], tokens, busy)
        ]
        return {place: self._job(views[place], limits[place]) for place in ready}

    def _catch_up(self, views: Sequence[SequenceView]) -> None:
        """Have the target compute features that are lacking, as after a prefix hit."""
        lacking = [view for view in views if self._sequences.lacks(view)]
        if not lacking:
            return
        layers = lacking[0].layers
        assert layers is not None, "the needs name taps"
        starts = [len(self._sequences.aligned(view).text.tokens) for view in lacking]
        for view, start, taps in zip(lacking, starts, layers.states(lacking, starts, self.needs.taps), strict=True):
            if taps:
                self._sequences.take(view, start, taps)

    def _job(self, view: SequenceView, budget: int) -> _Job:
        held = self._sequences.aligned(view)
        while len(view.tokens) - 1 - held.ran > _CHUNK:
            self._feed(view, held)
        pending = tuple(view.tokens[held.ran + 1 :])
        return _Job(view, budget, held.name, pending, self._from_target(held.features(), pending), self._tree(budget))

    def _feed(self, view: SequenceView, held: HeadSequence) -> None:
        """One chunk of a long text, whose outputs nobody reads."""
        tokens = tuple(view.tokens[held.ran + 1 : held.ran + 1 + _CHUNK])
        inputs = Features(self._from_target(held.features()[:_CHUNK], tokens))
        self._runner.forward([Segment(held.name, tokens, logits_from=len(tokens), features=inputs)])
        self._sequences.keep(view, len(tokens))

    def _grow(self, jobs: list[_Job]) -> None:
        """All trees, level by level."""
        active = jobs
        for level in range(self._growth.levels):
            out = self._runner.forward([job.segment() for job in active], (_LAST,))
            hidden_NH, guesses, row, first = out.taps[_LAST], self._guesses(active, out.logits_RV), 0, 0
            growing = []
            for job in active:
                count, ran = len(job.tree.newest), job.segment().rows
                before = job.tree.newest
                job.tree.offer(guesses[row : row + count])
                row, first = row + count, first + ran
                if level + 1 < self._growth.levels and job.tree.expand():
                    above_KH = hidden_NH[first - count : first][job.tree.rows_above(before)]
                    job.inputs_KH = self._from_itself(above_KH, [job.tree.token(node) for node in job.tree.newest])
                    growing.append(job)
            active = growing
            if not active:
                break
        for job in jobs:
            self._sequences.keep(job.view, len(job.pending))

    def _guesses(self, jobs: Sequence[_Job], logits_RD: Tensor) -> list[list[Guess]]:
        """The best children of each row that has just run."""
        rows = [(job, node) for job in jobs for node in job.tree.newest]
        paths = [job.tree.path_tokens(node) for job, node in rows]
        return self._guessing.best(logits_RD, [job.view for job, _ in rows], paths, self._growth.children)


def draft_ids(d2t_D: Tensor) -> Tensor:
    """The target's token of each draft id, int64; ``d2t_D`` holds them as offsets."""
    return d2t_D + torch.arange(len(d2t_D))

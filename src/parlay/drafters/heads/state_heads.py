"""The base of drafters that grow a tree from one state per sequence: usually the target's, before the root.

The tokens of a level are guessed for all sequences together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from parlay.drafters.draft_models.guesses import likely_chain
from parlay.drafters.draft_models.static_trees import StaticTree, best_tree
from parlay.drafters.heads.level_trees import DynamicTree, Guessing, LevelTree, RankTree
from parlay.drafters.heads.states import LatestStates, States
from parlay.drafters.heads.watch import Watched
from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import draft_ids
from parlay.types import NO_DRAFT, Draft, Needs, SequenceView


@dataclass(slots=True)
class StateJob:
    """One sequence to draft for. ``state_H``: usually the target's state of the token before the root.

    ``carried_KS``: for heads with a state of their own, that of each node that ran last. ``above``: for each of the
    newest nodes, the row of its parent in it.
    """

    view: SequenceView
    state_H: Tensor
    tree: LevelTree
    carried_KS: Tensor | None = None
    above: list[int] = field(default_factory=list)

    def newest_tokens(self) -> list[int]:
        """The token of each of the newest nodes; for the root, the text's last token."""
        return [self.tree.token(node) if node >= 0 else self.view.tokens[-1] for node in self.tree.newest]


class StateHeadDrafter(Watched, ABC):
    """Drafts trees from a state per sequence.

    If a request samples, candidates are ranked with its noise. Scores are the heads' probabilities.
    """

    def __init__(
        self,
        artefact: HeadArtefact,
        draft_ids_D: Tensor,
        levels: int,
        children: int,
        *,
        states: States | None = None,
    ) -> None:
        """``draft_ids_D``: the tokens that the heads can propose.

        ``levels``: the most levels of a tree; ``children``: the most children of a node. Without ``states``, the heads
        read the target's layer that the artefact names.
        """
        self._source, self._levels, self._children = artefact.method, levels, children
        taps: list[int] = artefact.settings["taps"]
        self.needs = Needs(taps=tuple(taps), expected=artefact.expected)
        self._states = LatestStates(taps[0]) if states is None else states
        super().__init__(artefact.method, artefact, self._states)
        self._guessing = Guessing(draft_ids_D)

    @abstractmethod
    def _tree(self, budget: int) -> LevelTree:
        """A new tree for a draft of at most ``budget`` nodes."""

    @abstractmethod
    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        """Logits ``[N, D]`` of the children of all newest nodes, which are ``level`` levels below the root."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        wanted = [place for place, budget in enumerate(budgets) if budget > 0]
        states = self._states.of([views[place] for place in wanted])
        jobs = {
            place: StateJob(views[place], state_H, self._tree(budgets[place]))
            for place, state_H in zip(wanted, states, strict=True)
            if state_H is not None
        }
        self._grow(list(jobs.values()))
        return [
            jobs[place].tree.draft(budget, self._source) if place in jobs else NO_DRAFT
            for place, budget in enumerate(budgets)
        ]

    def _grow(self, jobs: list[StateJob]) -> None:
        active = jobs
        for level in range(self._levels):
            if not active:
                break
            rows = [(job, node) for job in active for node in job.tree.newest]
            paths = [job.tree.path_tokens(node) for job, node in rows]
            logits_ND = self._logits(level, active)
            guesses = self._guessing.best(logits_ND, [job.view for job, _ in rows], paths, self._children)
            growing, row = [], 0
            for job in active:
                before = job.tree.newest
                job.tree.offer(guesses[row : row + len(before)])
                row += len(before)
                if level + 1 < self._levels and job.tree.expand(job.view.request.stop_ids):
                    job.above = job.tree.rows_above(before)
                    growing.append(job)
            active = growing


class StaticTreeDrafter(StateHeadDrafter):
    """Drafts trees whose shape follows from how often each rank of each head was right on held-out texts.

    A tree of n nodes has the n paths with the highest products.
    """

    def __init__(self, artefact: HeadArtefact, draft_ids_D: Tensor, states: States | None = None) -> None:
        acceptance: list[list[float]] = artefact.settings["acceptance"]
        super().__init__(artefact, draft_ids_D, len(acceptance), len(acceptance[0]), states=states)

        @lru_cache(maxsize=256)
        def shape(budget: int) -> StaticTree:
            return best_tree(acceptance, budget, len(acceptance))

        self._shape = shape

    def _tree(self, budget: int) -> RankTree:
        return RankTree(self._shape(budget))


class MarginalsDrafter(StateHeadDrafter):
    """Drafts from the logits ``[levels, D]`` of all levels at once: a level's guesses are the same below each node.

    The tree has the paths with the highest products of probabilities. Each level continues below its ``width``
    likeliest nodes with ``width`` children each; paths below ``min_p`` are left out.
    """

    def __init__(self, artefact: HeadArtefact, states: States, levels: int, *, width: int, min_p: float) -> None:
        super().__init__(artefact, draft_ids(artefact.tensors["d2t"]), levels, width, states=states)
        self._width, self._min_p = width, min_p

    def _tree(self, budget: int) -> DynamicTree:
        return DynamicTree(self._width, self._min_p, budget)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        """If nodes have one child, guess all levels in one call; otherwise level by level.

        One call is enough there because the noise depends on a path's length, not on its tokens.
        """
        if self._width > 1:
            return super().propose(views, budgets)
        drafts = [NO_DRAFT] * len(views)
        wanted = [place for place, budget in enumerate(budgets) if budget > 0]
        states = zip(wanted, self._states.of([views[place] for place in wanted]), strict=True)
        found = {place: state_LD for place, state_LD in states if state_LD is not None}
        if not found:
            return drafts
        of_rows = [views[place] for place in found for _ in range(self._levels)]
        paths = [(0,) * level for _ in found for level in range(self._levels)]
        guesses = self._guessing.best(torch.cat(list(found.values())), of_rows, paths, 1)
        for number, place in enumerate(found):
            first = number * self._levels
            chain = [own[0] for own in guesses[first : first + min(self._levels, budgets[place])]]
            drafts[place] = likely_chain(chain, self._min_p, self._source)
        return drafts

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        return torch.stack([job.state_H[level] for job in jobs for _ in job.tree.newest])


def states_of_rows(jobs: Sequence[StateJob]) -> Tensor:
    """The target's state, float32 ``[N, H]``, for each of the newest nodes."""
    return torch.stack([job.state_H for job in jobs for _ in job.tree.newest]).float()


def carried_of_rows(jobs: Sequence[StateJob], first_S: Tensor | None = None) -> Tensor:
    """The heads' own state ``[N, S]`` at the parent of each of the newest nodes.

    For the root it is ``first_S``, or the target's state.
    """
    parts = [
        job.carried_KS[job.above]
        if job.carried_KS is not None
        else (job.state_H.float() if first_S is None else first_S)[None]
        for job in jobs
    ]
    return torch.cat(parts)


def carry(jobs: Sequence[StateJob], states_NS: Tensor) -> None:
    """Store the heads' own states of the nodes that have run now."""
    for job, part_KS in zip(jobs, torch.split(states_NS, [len(job.tree.newest) for job in jobs]), strict=True):
        job.carried_KS = part_KS

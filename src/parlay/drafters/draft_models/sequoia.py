"""Sequoia (Chen et al. 2024): a tree of the shape that is best for the measured acceptance of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.draft_models.draft_sequences import DraftSequence, DraftSequences
from parlay.drafters.draft_models.guesses import Guess, best_guesses
from parlay.drafters.draft_models.opening import draft_name, open_draft
from parlay.drafters.draft_models.static_trees import FilledTree, RankRecord, StaticTree, best_shape
from parlay.drafters.options import SEQUOIA as SOURCE
from parlay.drafters.options import SequoiaOptions
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.types import NO_DRAFT, NO_TREE, Draft, Needs, Observation, Segment, SequenceView, Tree, trees

_REFIT = 16  # steps after which shapes are computed again


class Sequoia:
    """Sequoia's static trees (Chen et al. 2024, arXiv:2402.12374), filled with a draft model's best tokens.

    The drafter measures how often the draft model's token of each rank is right, by depth, at every node that the walk
    reached, whether or not the tree held the token. It drafts the tree with the most expected tokens for these numbers,
    level by level, and runs only the inner nodes. The size of the tree is the budget, which the policy sets by measured
    cost. Its depth, at most ``levels``, is the one that pays if a level costs ``level_cost`` target forwards. ``width``
    is the number of ranks that are distinguished. Scores are the measured acceptance. In the paper it is measured once,
    beforehand, and the tree is drawn without replacement; here the tree holds fixed guesses by the request's sampler.
    """

    needs = Needs()

    def __init__(self, resources: Resources, options: SequoiaOptions) -> None:
        name = draft_name(SOURCE, resources, options.model)
        self._runner = open_draft(SOURCE, resources, name)
        if self._runner.spec.tree != "tree":
            raise UsageError(f"strategy {SOURCE}: {name} can't verify trees; choose another draft model")
        self._width = options.width
        self._level_cost = options.level_cost
        self._sequences = DraftSequences(self._runner)
        self._record = RankRecord(options.levels, options.width)
        self._shapes: dict[int, StaticTree] = {}
        self._steps_to_refit = _REFIT
        self._tree_jobs: dict[int, _TreeJob] = {}

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        jobs = self._sequences.jobs(views, budgets)
        tree_jobs = {place: _TreeJob(job.view, job.sequence, self._shape(job.budget)) for place, job in jobs.items()}
        self._grow(list(tree_jobs.values()))
        self._tree_jobs.update({tree_job.view.sequence: tree_job for tree_job in tree_jobs.values()})
        return [tree_jobs[place].draft() if place in tree_jobs else NO_DRAFT for place in range(len(views))]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            tree_job = self._tree_jobs.pop(observation.view.sequence, None)
            if tree_job is not None:
                self._learn(tree_job, tuple(observation.view.tokens[tree_job.length :]))

    def _learn(self, tree_job: _TreeJob, committed: tuple[int, ...]) -> None:
        for depth, token in enumerate(committed):
            offered = tree_job.offered.get(committed[:depth])
            if offered is None:
                break
            self._record.learn(depth, offered.index(token) if token in offered else None)
        self._steps_to_refit -= 1
        if self._steps_to_refit == 0:
            self._steps_to_refit = _REFIT
            self._shapes.clear()

    def release(self, sequence: int) -> None:
        self._tree_jobs.pop(sequence, None)
        self._sequences.release(sequence)

    def _shape(self, nodes: int) -> StaticTree:
        if nodes not in self._shapes:
            self._shapes[nodes] = best_shape(self._record.acceptance, nodes, self._level_cost)
        return self._shapes[nodes]

    def _grow(self, tree_jobs: Sequence[_TreeJob]) -> None:
        """Fill the trees level by level: the newest inner nodes of all trees run, and their children get tokens."""
        while tree_jobs:
            out = self._runner.forward([tree_job.segment() for tree_job in tree_jobs])
            rows = [(tree_job, node) for tree_job in tree_jobs for node in tree_job.newest]
            views = [tree_job.view for tree_job, _ in rows]
            paths = [tree_job.tree.path(node) for tree_job, node in rows]
            guesses = best_guesses(out.logits_RV, views, paths, self._width)
            for (tree_job, node), path, found in zip(rows, paths, guesses, strict=True):
                tree_job.fill(node, path, found)
            for tree_job in tree_jobs:
                tree_job.descend()
            for tree_job in tree_jobs:
                if not tree_job.newest:
                    self._sequences.keep(tree_job.sequence, trees.first_path(tree_job.ran), tree_job.ran)
            tree_jobs = [tree_job for tree_job in tree_jobs if tree_job.newest]


class _TreeJob:
    """One sequence's tree, and the part of it that the draft model has run."""

    def __init__(self, view: SequenceView, sequence: DraftSequence, shape: StaticTree) -> None:
        self.view = view
        self.sequence = sequence
        self.length = len(view.tokens)
        self.offered: dict[tuple[int, ...], list[int]] = {}
        """The draft model's best tokens after each path that it was run for."""
        self.newest: list[int] = [-1]
        self.ran = NO_TREE
        self.tree = FilledTree(shape)
        self._shape = shape
        self._level = 0
        self._rows: dict[int, int] = {-1: -1}  # node of the shape -> node of the tree that runs

    def segment(self) -> Segment:
        return self.sequence.level(self.ran, len(self.newest))

    def fill(self, node: int, path: Sequence[int], found: Sequence[Guess]) -> None:
        self.offered[tuple(path)] = [token for token, _ in found]
        self.tree.fill(node, found)

    def descend(self) -> None:
        """Go to the filled nodes of the next level that have children, which run next."""
        self._level += 1
        self.newest = self.tree.inner(self._level)
        if self.newest:
            self._rows.update({node: len(self.ran) + place for place, node in enumerate(self.newest)})
            tokens = tuple(self.tree.token(node) for node in self.newest)
            parents = tuple(self._rows[self._shape.parents[node]] for node in self.newest)
            self.ran = Tree(self.ran.tokens + tokens, self.ran.parents + parents)

    def draft(self) -> Draft:
        """The draft. Scores are the measured acceptance."""
        return self.tree.draft(SOURCE, self._shape.scores)

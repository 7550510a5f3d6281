"""Chains and trees of a draft model's best guesses, made with the noise that it shares with the target."""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from parlay.drafters.draft_models.draft_sequences import DraftJob, DraftSequences
from parlay.drafters.draft_models.guesses import Guess, best_guesses
from parlay.types import NO_DRAFT, Draft, Runner, SequenceView, Tree, trees


@dataclass(frozen=True, slots=True)
class LeastOf:
    """The least probability of a drafted token: for some kinds of requests, and for all others."""

    usual: float = 0.0
    of_kinds: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, view: SequenceView) -> float:
        return self.of_kinds.get(view.request.kind, self.usual)


class BestChains:
    """Drafts one chain per sequence, token by token, until a token of ``ends`` or a stop token.

    A chain ends before a token if the path's probability falls below ``min_p``, or the token's below ``least``.
    """

    def __init__(
        self,
        runner: Runner,
        sequences: DraftSequences,
        source: str,
        min_p: float,
        ends: Container[int] = frozenset(),
        *,
        least: LeastOf = LeastOf(),
    ) -> None:
        self._ends, self._least = ends, least
        self._runner = runner
        self._sequences = sequences
        self._source = source
        self._min_p = min_p

    def write(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Draft chains. Their tokens join the draft model's cache as if they were committed."""
        plans = [TreeDraft(job, self._min_p) for job in jobs]
        active = plans
        while active:
            out = self._runner.forward([plan.sequence.segment() for plan in active])
            paths = [plan.tokens for plan in active]
            guesses = best_guesses(out.logits_RV, [plan.view for plan in active], paths, 1)
            for plan, guess in zip(active, guesses, strict=True):
                self._sequences.keep(plan.sequence)
                plan.offer(len(plan.tokens) - 1, [each for each in guess if each[1] >= self._least(plan.view)])
                plan.sequence.pending = tuple(plan.grow(1))
            active = [plan for plan in active if plan.sequence.pending and not self._whole(plan)]
        return [plan.draft(self._source) for plan in plans]

    def _whole(self, plan: TreeDraft) -> bool:
        ends = plan.tokens[-1] in self._ends or plan.tokens[-1] in plan.view.request.stop_ids
        return ends or len(plan.tokens) >= plan.budget


class BestTrees:
    """Drafts trees: in each forward, the ``width`` likeliest open nodes run, and each offers ``width`` children."""

    def __init__(self, runner: Runner, sequences: DraftSequences, source: str, width: int, min_p: float) -> None:
        self._runner = runner
        self._sequences = sequences
        self._source = source
        self._width = width
        self._min_p = min_p

    def write(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        plans = [TreeDraft(job, self._min_p) for job in jobs]
        active = plans
        while active:
            out = self._runner.forward([plan.sequence.level(plan.tree, len(plan.newest)) for plan in active])
            rows = [(plan, node) for plan in active for node in plan.newest]
            views = [plan.view for plan, _ in rows]
            paths = [plan.path_tokens(node) for plan, node in rows]
            for (plan, node), guesses in zip(rows, best_guesses(out.logits_RV, views, paths, self._width), strict=True):
                plan.offer(node, guesses)
            active = [plan for plan in active if not self._finished(plan)]
        return [plan.draft(self._source) for plan in plans]

    def _finished(self, plan: TreeDraft) -> bool:
        """Grow the plan. When no forward can help it any more, cache its likeliest path in the draft model."""
        ran = plan.tree
        left = plan.budget - len(ran)
        if left > self._width and plan.grow(self._width):
            return False
        self._sequences.keep(plan.sequence, plan.likeliest_path(), ran)
        plan.grow(left)
        return True


class TreeDraft:
    """A draft in the making: its nodes so far, and candidates for further nodes, the likeliest path first."""

    def __init__(self, job: DraftJob, min_p: float) -> None:
        self.view = job.view
        self.sequence = job.sequence
        self.budget = job.budget
        self.tokens: list[int] = []
        self.newest: list[int] = [-1]  # nodes that have not run yet; at first the root
        self._min_p = min_p
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._path_probs: list[float] = []  # probability of the path to each node
        self._candidates: list[tuple[float, int, int, int, float]] = []  # -path_prob, order, parent, token, score
        self._offered = 0

    @property
    def tree(self) -> Tree:
        return Tree(tuple(self.tokens), tuple(self._parents))

    def offer(self, parent: int, guesses: Sequence[Guess]) -> None:
        """Add candidates for children of ``parent``, without those whose path falls below ``min_p``."""
        path_prob = self._path_probs[parent] if parent >= 0 else 1.0
        for token, probability in guesses:
            if path_prob * probability >= self._min_p:
                self._offered += 1
                heapq.heappush(self._candidates, (-path_prob * probability, self._offered, parent, token, probability))

    def grow(self, count: int) -> list[int]:
        """Turn up to ``count`` candidates into nodes. Returns their tokens."""
        first = len(self.tokens)
        for _ in range(min(count, len(self._candidates))):
            path_prob, _, parent, token, score = heapq.heappop(self._candidates)
            self.tokens.append(token)
            self._parents.append(parent)
            self._scores.append(score)
            self._path_probs.append(-path_prob)
        self.newest = list(range(first, len(self.tokens)))
        return self.tokens[first:]

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[place] for place in trees.path_to(self.tree, node)]

    def likeliest_path(self) -> tuple[int, ...]:
        """The path from the root that takes the likeliest child each time."""
        families = trees.children(self.tree)
        node, path = -1, []
        while families[node]:
            node = max(families[node], key=self._path_probs.__getitem__)
            path.append(node)
        return tuple(path)

    def draft(self, source: str) -> Draft:
        if not self.tokens:
            return NO_DRAFT
        return Draft(self.tree, sources=(source,) * len(self.tokens), scores=tuple(self._scores))

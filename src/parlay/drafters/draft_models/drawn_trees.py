"""Trees drawn from a draft model's own distribution: independent siblings, siblings without replacement, beams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parlay.drafters.draft_models.draft_sequences import DraftJob, DraftSequences
from parlay.drafters.draft_models.drawn_chains import draw_token, drawable, stream
from parlay.sampling import noise
from parlay.types import NO_DRAFT, Draft, DraftKind, Runner, SequenceView, Tree, trees


@dataclass(frozen=True, slots=True)
class OpenNode:
    """A node that may get children (-1: the root), the distribution after it, and its path's log-probability.

    ``value``: that log-probability with Gumbel noise, which only beams need.
    """

    node: int
    probs_V: Tensor
    path_logprob: float = 0.0
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Child:
    """A drawn node: its token, and the node that it was drawn at."""

    token: int
    parent: OpenNode
    value: float = 0.0

    @property
    def probability(self) -> float:
        return float(self.parent.probs_V[self.token])


class LevelDrawer(Protocol):
    """Draws one level of a tree, in the order of its nodes."""

    @property
    def kind(self) -> DraftKind: ...

    def children(self, view: SequenceView, depth: int, spots: Sequence[OpenNode], first: int) -> list[Child]:
        """Draw the children of the ``spots``, which are ``depth`` levels below the root.

        The first child gets the number ``first`` in the tree.
        """
        ...


class DrawnTrees:
    """Draws trees level by level: the newest nodes of all trees run at once, then a `LevelDrawer` draws children.

    A tree is cut to its budget in drawing order, which does not depend on what is drawn later. A node whose path is
    less likely than ``min_p`` gets no children, but stays.
    """

    def __init__(
        self, runner: Runner, sequences: DraftSequences, source: str, drawer: LevelDrawer, min_p: float
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._source = source
        self._drawer = drawer
        self._min_p = min_p

    def write(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        plans = [_Tree(job, self._drawer, math.log(self._min_p) if self._min_p else -math.inf) for job in jobs]
        active = plans
        while active:
            out = self._runner.forward([plan.job.sequence.level(plan.tree, len(plan.newest)) for plan in active])
            starts = out.starts
            for place, plan in enumerate(active):
                ran = plan.tree
                plan.grow(out.logits_RV[starts[place] : starts[place + 1]])
                if plan.finished:
                    self._sequences.keep(plan.job.sequence, trees.first_path(ran), ran)
            active = [plan for plan in active if not plan.finished]
        return [plan.draft(self._source) for plan in plans]


class _Tree:
    def __init__(self, job: DraftJob, drawer: LevelDrawer, least_reach: float) -> None:
        self.job = job
        self.newest: list[int] = [-1]
        self._drawer = drawer
        self._least_logprob = least_reach
        self._depth = 0
        self._nodes: list[Child] = []
        self._path_logprobs: dict[int, float] = {-1: 0.0}

    @property
    def tree(self) -> Tree:
        return Tree(tuple(node.token for node in self._nodes), tuple(node.parent.node for node in self._nodes))

    @property
    def finished(self) -> bool:
        if len(self._nodes) >= self.job.budget:
            return True
        return all(self._path_logprobs[node] < self._least_logprob for node in self.newest)

    def grow(self, logits_RV: Tensor) -> None:
        """Add a level, drawn from the logits of the newest nodes."""
        spots = [spot for node, row_V in zip(self.newest, logits_RV, strict=True) if (spot := self._spot(node, row_V))]
        first = len(self._nodes)
        drawn = self._drawer.children(self.job.view, self._depth, spots, first)
        self._nodes += drawn[: self.job.budget - first]
        self._depth += 1
        self.newest = list(range(first, len(self._nodes)))
        for node in self.newest:
            child = self._nodes[node]
            self._path_logprobs[node] = child.parent.path_logprob + math.log(child.probability)

    def _spot(self, node: int, logits_V: Tensor) -> OpenNode | None:
        path_logprob = self._path_logprobs[node]
        path = [self._nodes[above].token for above in trees.path_to(self.tree, node)]
        probs_V = drawable(logits_V, self.job.view, path) if path_logprob >= self._least_logprob else None
        return (
            None
            if probs_V is None
            else OpenNode(node, probs_V, path_logprob, self._nodes[node].value if node >= 0 else 0.0)
        )

    def draft(self, source: str) -> Draft:
        if not self._nodes:
            return NO_DRAFT
        return Draft(
            self.tree,
            kind=self._drawer.kind,
            sources=(source,) * len(self._nodes),
            scores=tuple(node.probability for node in self._nodes),
            probs=torch.stack([node.parent.probs_V for node in self._nodes]),
        )


@dataclass(frozen=True, slots=True)
class Independent:
    """Draws independent children: as many as ``branching`` says for the depth, its last number repeated.

    Equal children stay separate nodes. Greedy requests draw one child, because all would be equal.
    """

    branching: tuple[int, ...]
    kind: DraftKind = "iid"

    def children(self, view: SequenceView, depth: int, spots: Sequence[OpenNode], first: int) -> list[Child]:
        count = 1 if view.request.params.greedy else _at(self.branching, depth)
        places = [spot for spot in spots for _ in range(count)]
        return [Child(draw_token(spot.probs_V, view, depth, first + place), spot) for place, spot in enumerate(places)]


@dataclass(frozen=True, slots=True)
class Distinct:
    """Draws children without replacement, by the largest log-probability plus Gumbel noise: RSD-C.

    (Jeon et al. 2024, arXiv:2402.14160.) There are fewer if the distribution has fewer tokens.
    """

    branching: tuple[int, ...]
    kind: DraftKind = "without_replacement"

    def children(self, view: SequenceView, depth: int, spots: Sequence[OpenNode], first: int) -> list[Child]:
        count = _at(self.branching, depth)
        return [
            Child(token, spot)
            for spot in spots
            for token, _ in _disturbed(spot.probs_V, stream(view, depth, spot.node + 1), count)
        ]


@dataclass(frozen=True, slots=True)
class Beam:
    """Keeps the ``width`` best nodes of each level by the noisy log-probability of their paths: stochastic beam search.

    RSD-S (Jeon et al. 2024, arXiv:2402.14160), after Kool et al. 2019 (arXiv:1903.06059): the values of siblings are
    conditioned so that the largest equals their parent's. In order of value, the children of one node are draws without
    replacement, and how many of them a level keeps is independent of which token comes next.
    """

    width: int
    kind: DraftKind = "without_replacement"

    def children(self, view: SequenceView, depth: int, spots: Sequence[OpenNode], first: int) -> list[Child]:
        family = [child for spot in spots for child in self._offered(view, depth, spot)]
        return sorted(family, key=lambda child: -child.value)[: self.width]

    def _offered(self, view: SequenceView, depth: int, spot: OpenNode) -> list[Child]:
        best = _disturbed(spot.probs_V, stream(view, depth, spot.node + 1), self.width)
        most = spot.path_logprob + best[0][1]
        return [Child(token, spot, conditioned(spot.path_logprob + value, most, spot.value)) for token, value in best]


def conditioned(value: float, most: float, bound: float) -> float:
    """-log(exp(-bound) - exp(-most) + exp(-value)), in a form that neither cancels nor overflows."""
    if value >= most:
        return bound
    gap = bound - value + math.log1p(-math.exp(value - most))
    return bound - max(0.0, gap) - math.log1p(math.exp(-abs(gap)))


def _disturbed(probs_V: Tensor, state: int, count: int) -> list[tuple[int, float]]:
    """Up to ``count`` tokens with their log-probability plus Gumbel noise, the largest first."""
    ids = probs_V.nonzero()[:, 0]
    values = probs_V[ids].log() + noise.gumbel(noise.bits([state], ids))[0]
    best = values.topk(min(count, len(values)))
    return list(zip(ids[best.indices].tolist(), best.values.tolist(), strict=True))


def _at(branching: Sequence[int], depth: int) -> int:
    return branching[min(depth, len(branching) - 1)]

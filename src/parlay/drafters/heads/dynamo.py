"""DynaMo (Tuli et al. 2024): parallel heads whose guesses are combined by how often tokens co-occur."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.drafters.heads.level_trees import DynamicTree
from parlay.drafters.heads.mtp import parallel_states
from parlay.drafters.heads.state_heads import StateHeadDrafter, StateJob
from parlay.drafters.options import DYNAMO as SOURCE
from parlay.drafters.options import DynamoOptions
from parlay.drafters.resources import Resources
from parlay.heads.base import draft_ids
from parlay.heads.ngrams import Ngrams
from parlay.heads.opening import opened
from parlay.types import Draft, SequenceView

UNVERIFIED = "unverified"
_BINS = 64


class Dynamo(StateHeadDrafter):
    """DynaMo (Tuli et al. 2024, arXiv:2405.00888).

    After the root r, two heads guess x and y independently, with p(x) and p(y). The co-occurrence mask, p(r x y) over
    p(r) p(x) p(y) by n-grams of the heads' training texts, turns these into a joint distribution over the ``lattice``
    best guesses of each head. It ranks the paths of a tree that is verified, so the text is that of plain decoding.

    ``rule=unverified`` is the paper's own sampling, which guarantees nothing about the text: a path is drawn from the
    joint distribution and committed. Pairs below ``eps``^2 count as 0; so do those below Otsu's threshold (``otsu``),
    if that is higher. If no pair is left, only x is drawn, with ``eps``; if no x is left either, nothing is drafted.
    """

    def __init__(self, resources: Resources, options: DynamoOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        artefact = head.artefact
        self._ids_D, self._options = draft_ids(artefact.tensors["d2t"]), options
        self._ngrams = Ngrams(artefact.tensors, resources.vocab_size)
        self._verified = resources.rule != UNVERIFIED
        self._tables: dict[int, _Joint] = {}
        levels, width = artefact.settings["heads"], options.width if self._verified else 1
        super().__init__(artefact, self._ids_D, levels, width, states=parallel_states(head, resources.room))

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._tables.clear()
        return super().propose(views, budgets)

    def _tree(self, budget: int) -> DynamicTree:
        width, min_p = (self._options.width, self._options.min_p) if self._verified else (1, 0.0)
        return DynamicTree(width, min_p, budget)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        rows = [self._row(level, job, node) for job in jobs for node in job.tree.newest]
        return torch.stack(rows)

    def _row(self, level: int, job: StateJob, node: int) -> Tensor:
        """Logits ``[D]`` of a node's children, such that the request's temperature yields their probabilities."""
        temperature = job.view.request.params.temperature or 1.0
        if job.view.sequence not in self._tables:
            self._tables[job.view.sequence] = self._joint(job.state_H / temperature, job.view.tokens[-1])
        table = self._tables[job.view.sequence]
        chances_C = table.first() if level == 0 else table.second(job.tree.token(node))
        logits_D = torch.full((len(self._ids_D),), -torch.inf)
        return logits_D.scatter(0, table.candidates_KC[level], temperature * chances_C.log())

    def _joint(self, logits_KD: Tensor, root: int) -> _Joint:
        """The joint scores of the heads' tokens after the root."""
        probs_KC, candidates_KC = logits_KD.softmax(-1).topk(min(self._options.lattice, logits_KD.shape[-1]))
        ids_KC: list[list[int]] = self._ids_D[candidates_KC].tolist()
        alone_C = probs_KC[0] * torch.tensor([self._ngrams.affinity([root], token) for token in ids_KC[0]])
        pairs_CC = alone_C[:, None]
        if len(ids_KC) > 1:
            masks = [[self._ngrams.affinity([root, first], second) for second in ids_KC[1]] for first in ids_KC[0]]
            pairs_CC = pairs_CC * probs_KC[1] * torch.tensor(masks)
        if not self._verified:
            pairs_CC, alone_C = self._cut(pairs_CC, len(ids_KC)), self._cut(alone_C, 1)
        return _Joint(candidates_KC, ids_KC[0], alone_C, pairs_CC)

    def _cut(self, joint: Tensor, tokens: int) -> Tensor:
        """``joint`` of any shape, with entries below the thresholds set to 0."""
        least = float(self._options.eps**tokens)
        if self._options.otsu:
            least = max(least, otsu(joint))
        return joint * (joint >= least)


@dataclass(frozen=True, slots=True)
class _Joint:
    """Unnormalised scores of one sequence: ``pairs_CC`` of pairs of candidates, ``alone_C`` of first candidates."""

    candidates_KC: Tensor
    first_ids: list[int]
    alone_C: Tensor
    pairs_CC: Tensor

    def first(self) -> Tensor:
        """Scores ``[C]`` of first tokens: summed over pairs, or their own if no pair is left."""
        return self.pairs_CC.sum(-1) if self.pairs_CC.any() else self.alone_C

    def second(self, first: int) -> Tensor:
        """Scores ``[C]`` of second tokens after this first one."""
        return self.pairs_CC[self.first_ids.index(first)]


def otsu(values: Tensor) -> float:
    """The threshold that best divides ``values`` of any shape into low and high ones (Otsu 1979), in 64 bins.

    It maximises the variance between the two parts; 0 if all values are equal.
    """
    low, high = float(values.min()), float(values.max())
    if high <= low:
        return 0.0
    counts = torch.histc(values.float(), _BINS, low, high)
    middles = low + (high - low) * (torch.arange(_BINS) + 0.5) / _BINS
    below, mass = counts.cumsum(0), (counts * middles).cumsum(0)
    above = below[-1] - below
    gap = mass / below.clamp(min=1) - (mass[-1] - mass) / above.clamp(min=1)
    best = int((below * above * gap.square()).argmax())
    return low + (high - low) * (best + 1) / _BINS

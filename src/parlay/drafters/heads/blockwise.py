"""Blockwise parallel decoding (Stern et al. 2018), with the rescoring of Kim et al. 2024."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.drafters.heads.level_trees import DynamicTree
from parlay.drafters.heads.state_heads import StateHeadDrafter, StateJob
from parlay.drafters.options import BLOCKWISE as SOURCE
from parlay.drafters.options import BlockwiseOptions
from parlay.drafters.resources import Resources
from parlay.heads.blockwise import WINDOW, BlockwiseHeads, Rescorer
from parlay.heads.ngrams import LONGEST, Ngrams
from parlay.heads.opening import opened
from parlay.models.weights.fused import as_tensor
from parlay.options import refuse_unread


class Blockwise(StateHeadDrafter):
    """Blockwise parallel decoding (Stern et al. 2018, arXiv:1811.03115); see `StateHeadDrafter`.

    The paper drafts one chain of the heads' best guesses, which is ``width=1,rescore=none``. Here the paths with the
    highest products of probabilities make a tree.

    ``rescore`` (Kim et al. 2024, arXiv:2404.09221): the ``lattice`` best guesses of each head are candidates. A small
    language model (``neural``), or n-grams of the heads' training texts (``ngram``), tells how likely each is after the
    tokens on its path. Its log-probability has the weight ``weight``, the head's own has the rest. The verified paths
    are the best ones through that lattice.
    """

    def __init__(self, resources: Resources, options: BlockwiseOptions) -> None:
        if options.rescore == "none":
            refuse_unread(f"strategy {SOURCE}", options, ("weight", "lattice"), "with rescore=none: remove it")
        head = opened(SOURCE, resources.find_head, options.head)
        artefact, heads = head.artefact, BlockwiseHeads.of(head.artefact)
        own = ("lm_head.weight", *(f"ngrams.{size}" for size in range(1, LONGEST + 1)))
        heads.load_state_dict({name: each for name, each in artefact.tensors.items() if name not in own})
        self._heads, self._options = heads.float().requires_grad_(False), options
        embedding_VH, self._ids_D = as_tensor(head.embedding, torch.bfloat16), heads.draft_ids
        self._head_DH = artefact.tensors.get("lm_head.weight", embedding_VH[self._ids_D]).float()
        self._rescoring: _Rescoring | None = None
        if options.rescore == "neural":
            self._rescoring = _Neural(heads.rescorer, embedding_VH)
        if options.rescore == "ngram":
            self._rescoring = _Counted(Ngrams(artefact.tensors, resources.vocab_size), self._ids_D)
        super().__init__(artefact, self._ids_D, len(heads.heads), options.width)

    def _tree(self, budget: int) -> DynamicTree:
        return DynamicTree(self._options.width, self._options.min_p, budget)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        """The logits of a level.

        All nodes of a sequence's level read the same state, so one product per sequence is enough.
        """
        states_BH = self._heads.heads[level](torch.stack([job.state_H for job in jobs]).float())
        logits_BD = F.linear(states_BH, self._head_DH)
        logits_ND = logits_BD.repeat_interleave(torch.tensor([len(job.tree.newest) for job in jobs]), 0)
        return logits_ND if self._rescoring is None else self._rescored(logits_ND, jobs, self._rescoring)

    def _rescored(self, logits_ND: Tensor, jobs: Sequence[StateJob], rescoring: _Rescoring) -> Tensor:
        """The mixed log-probabilities of candidates; -inf for other tokens."""
        texts = [_text(job, node) for job in jobs for node in job.tree.newest]
        own_ND, weight = logits_ND.log_softmax(-1), self._options.weight
        own_NC, candidates_NC = own_ND.topk(min(self._options.lattice, own_ND.shape[-1]))
        mixed_NC = (1 - weight) * own_NC + weight * rescoring.log_probs(texts, candidates_NC)
        return torch.full_like(own_ND, -torch.inf).scatter(-1, candidates_NC, mixed_NC)


class _Rescoring(ABC):
    """A language model that scores candidates after a path."""

    @abstractmethod
    def log_probs(self, texts: Sequence[Sequence[int]], candidates_NC: Tensor) -> Tensor:
        """Log-probabilities ``[N, C]`` of the draft ids ``candidates_NC``, each row after its text."""


class _Neural(_Rescoring):
    def __init__(self, model: Rescorer, embedding_VH: Tensor) -> None:
        self._model, self._embedding_VH = model, embedding_VH

    def log_probs(self, texts: Sequence[Sequence[int]], candidates_NC: Tensor) -> Tensor:
        windows = [[0] * (WINDOW - len(text)) + list(text[-WINDOW:]) for text in texts]
        embedded_NX = self._embedding_VH[torch.tensor(windows)].float().flatten(1)
        logits_ND: Tensor = self._model(embedded_NX)
        return logits_ND.log_softmax(-1).gather(-1, candidates_NC)


class _Counted(_Rescoring):
    def __init__(self, ngrams: Ngrams, ids_D: Tensor) -> None:
        self._ngrams, self._ids_D = ngrams, ids_D

    def log_probs(self, texts: Sequence[Sequence[int]], candidates_NC: Tensor) -> Tensor:
        rows = zip(texts, self._ids_D[candidates_NC].tolist(), strict=True)
        return torch.tensor([self._ngrams.log_probabilities(text, tokens) for text, tokens in rows])


def _text(job: StateJob, node: int) -> list[int]:
    """The last tokens before a child of the node."""
    return [*job.view.tokens[-WINDOW:], *job.tree.path_tokens(node)][-WINDOW:]

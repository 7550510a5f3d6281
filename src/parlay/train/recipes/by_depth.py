"""Base of recipes whose modules draft one token per depth: losses, weights, and acceptance of each candidate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.base import DraftVocab
from parlay.train.data.batches import TrainingBatch
from parlay.train.recipes.recipe import Teacher, counted, right_tokens, soft_loss
from parlay.train.recipes.target import Target

DECAY = 0.8
"""The factor by which each depth's loss counts less than that of the depth before."""
_NONE = -100
RANKS = 10
"""Number of candidates per depth whose acceptance is measured for the drafter's static tree."""


class ByDepth(ABC):
    """Trains ``module``, which is or contains ``vocab``. ``output``: the LM heads' matrices, which AdamW trains, not
    Muon."""

    def __init__(
        self, module: nn.Module, vocab: DraftVocab, target: Target, output: Iterable[nn.Parameter] = ()
    ) -> None:
        self.module: nn.Module = module
        self._vocab, self._target = vocab, target
        self._output = {id(weight) for weight in output}

    @abstractmethod
    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """Yield the logits ``[B, R, D]`` of each depth: row i at depth d predicts token i + 2 + d."""

    @cached_property
    def teacher(self) -> Teacher:
        """The target's distributions. Made at first use, since a checkpoint may load another draft vocabulary."""
        return Teacher(self._target, self._vocab.draft_ids)

    @cached_property
    def _head_DH(self) -> Tensor:
        """The rows of the target's LM head for the draft vocabulary."""
        with torch.inference_mode(False):  # a loss needs it too, if a measurement is the first to use it
            return self._target.head_VH[self._vocab.draft_ids].float()

    def _read(self, hidden_BRH: Tensor) -> Tensor:
        """Return the target's LM head's logits ``[B, R, D]`` for a step's states."""
        return F.linear(hidden_BRH, self._head_DH.to(hidden_BRH.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Return the module's weights, and the rows of the target's LM head unless it equals the embedding.

        Drafters read the embedding from the target.
        """
        own = {} if self._target.tied else {"lm_head.weight": self._head_DH}
        return {**self.module.state_dict(), **own}

    def soft_losses(self, batch: TrainingBatch, depths: Iterable[Tensor]) -> Tensor:
        """Return the sum over depths d of 0.8^d times `soft_loss`; ``depths`` yields logits ``[B, R, D]``."""
        probs_BRD, total = self.teacher.probs(batch), torch.zeros(())
        for depth, logits_BRD in enumerate(depths):
            total = total + DECAY**depth * self.soft_loss(batch, probs_BRD, depth, logits_BRD)
        return total

    def soft_loss(self, batch: TrainingBatch, probs_BRD: Tensor, depth: int, logits_BRD: Tensor) -> Tensor:
        """Return the cross-entropy of one depth with the target's distributions ``probs_BRD`` of the token after each
        row.

        It is the mean over the rows whose drafted token is in the batch and in the draft vocabulary.
        """
        rows = batch.rows - depth - 1
        usable_BR = self.teacher.usable(batch, depth + 2)[:, :rows]
        return soft_loss(logits_BRD[:, :rows], probs_BRD[:, depth + 1 :], usable_BR)

    def hard_losses(self, batch: TrainingBatch) -> Tensor:
        """Return the sum over depths d of 0.8^d times `hard_loss`."""
        total = torch.zeros(())
        for depth, logits_BRD in enumerate(self.logits(batch)):
            total = total + DECAY**depth * self.hard_loss(batch, depth + 2, logits_BRD)
        return total

    def hard_loss(self, batch: TrainingBatch, ahead: int, logits_BRD: Tensor) -> Tensor:
        """Return the mean cross-entropy with the token ``ahead`` places after each row, where it can be drafted."""
        ids_BR = batch.tokens_ahead(ahead)
        labels_BR = torch.where(batch.known_BR & (ids_BR >= 0), self._draft_of_V[ids_BR.clamp(min=0)], _NONE)
        rows_BR = labels_BR != _NONE
        summed = F.cross_entropy(logits_BRD[rows_BR], labels_BR[rows_BR], reduction="sum")
        return summed / rows_BR.sum().clamp(min=1)

    @cached_property
    def _draft_of_V(self) -> Tensor:
        """The draft id of each token, or `_NONE`. Made at first use, like `teacher`."""
        draft_of_V = torch.full((len(self._vocab.t2d),), _NONE)
        draft_of_V[self._vocab.draft_ids] = torch.arange(len(self._vocab.d2t))
        return draft_of_V

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        return [weight for weight in self._learned() if weight.ndim == 2 and id(weight) not in self._output]

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        return [weight for weight in self._learned() if weight.ndim != 2 or id(weight) in self._output]

    def right(self, batch: TrainingBatch) -> Tensor:
        """See `Recipe`."""
        drafted = (self._vocab.draft_ids[logits_BRD.argmax(-1)] for logits_BRD in self.logits(batch))
        return counted([right_tokens(ids_BR, batch, depth + 2) for depth, ids_BR in enumerate(drafted)])

    @torch.inference_mode()
    def acceptance(self, heldout: Iterable[TrainingBatch]) -> list[list[float]]:
        """Return how often each candidate (by rank) at each depth is right, after the text's own tokens.

        Each rank's share is lowered to that of the rank before it if it is higher.
        """
        ranks = min(RANKS, len(self._vocab.d2t))
        right: list[Tensor] = []
        rows: list[int] = []
        for batch in heldout:
            for depth, logits_BRD in enumerate(self.logits(batch)):
                if depth == len(rows):
                    right.append(torch.zeros(ranks))
                    rows.append(0)
                ids_BR = batch.tokens_ahead(depth + 2)
                known_BR = batch.known_BR & (ids_BR >= 0)
                best_NW = self._vocab.draft_ids[logits_BRD[known_BR].topk(ranks).indices]
                right[depth] += (best_NW == ids_BR[known_BR][:, None]).sum(0)
                rows[depth] += int(known_BR.sum())
        shares = [(of_depth / max(count, 1)).cummin(0).values for of_depth, count in zip(right, rows, strict=True)]
        return [[round(share, 4) for share in of_depth.tolist()] for of_depth in shares]

    def _learned(self) -> list[nn.Parameter]:
        return [weight for weight in self.module.parameters() if weight.requires_grad]

"""Base of recipes whose modules guess one token per depth: their weights, and how often each rank is right."""

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
"""The weight of a depth's loss, relative to the depth before."""
_NONE = -100
RANKS = 10
"""The static tree of a drafter tells this many candidates of each depth apart."""


class ByDepth(ABC):
    """``module`` is the module to train; it is or holds ``vocab``. ``output`` are the matrices of LM heads."""

    def __init__(
        self, module: nn.Module, vocab: DraftVocab, target: Target, output: Iterable[nn.Parameter] = ()
    ) -> None:
        self.module: nn.Module = module
        self._vocab, self._target = vocab, target
        self._output = {id(weight) for weight in output}

    @abstractmethod
    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """Logits ``[B, R, D]`` for each depth: row i of depth d predicts token i + 2 + d."""

    @cached_property
    def teacher(self) -> Teacher:
        """Built when first used, since a checkpoint may bring another draft vocabulary."""
        return Teacher(self._target, self._vocab.draft_ids)

    @cached_property
    def _head_DH(self) -> Tensor:
        """Rows of the target's LM head for the tokens that can be drafted."""
        with torch.inference_mode(False):  # a loss needs it too, if a measurement is the first to use it
            return self._target.head_VH[self._vocab.draft_ids].float()

    def _read(self, hidden_BRH: Tensor) -> Tensor:
        """Logits ``[B, R, D]`` of a step's states, by the target's LM head."""
        return F.linear(hidden_BRH, self._head_DH.to(hidden_BRH.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """The module's weights, with the target's LM head unless that is its embedding, which drafters read
        themselves."""
        own = {} if self._target.tied else {"lm_head.weight": self._head_DH}
        return {**self.module.state_dict(), **own}

    def soft_losses(self, batch: TrainingBatch, depths: Iterable[Tensor]) -> Tensor:
        """The sum of 0.8^d times `soft_loss` of depth d, for the logits ``[B, R, D]`` of each depth."""
        probs_BRD, total = self.teacher.probs(batch), torch.zeros(())
        for depth, logits_BRD in enumerate(depths):
            total = total + DECAY**depth * self.soft_loss(batch, probs_BRD, depth, logits_BRD)
        return total

    def soft_loss(self, batch: TrainingBatch, probs_BRD: Tensor, depth: int, logits_BRD: Tensor) -> Tensor:
        """Cross-entropy of one depth with the target's own distributions ``probs_BRD`` after each row.

        The mean covers rows whose next token can be drafted and is in the batch.
        """
        rows = batch.rows - depth - 1
        usable_BR = self.teacher.usable(batch, depth + 2)[:, :rows]
        return soft_loss(logits_BRD[:, :rows], probs_BRD[:, depth + 1 :], usable_BR)

    def hard_losses(self, batch: TrainingBatch) -> Tensor:
        """The sum of 0.8^d times `hard_loss` of depth d."""
        total = torch.zeros(())
        for depth, logits_BRD in enumerate(self.logits(batch)):
            total = total + DECAY**depth * self.hard_loss(batch, depth + 2, logits_BRD)
        return total

    def hard_loss(self, batch: TrainingBatch, ahead: int, logits_BRD: Tensor) -> Tensor:
        """Cross-entropy with the token so many places after each row, where it can be drafted."""
        ids_BR = batch.tokens_ahead(ahead)
        labels_BR = torch.where(batch.known_BR & (ids_BR >= 0), self._draft_of_V[ids_BR.clamp(min=0)], _NONE)
        rows_BR = labels_BR != _NONE
        summed = F.cross_entropy(logits_BRD[rows_BR], labels_BR[rows_BR], reduction="sum")
        return summed / rows_BR.sum().clamp(min=1)

    @cached_property
    def _draft_of_V(self) -> Tensor:
        """The draft id of each token; made when first used, as `teacher` is."""
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
        """How often each rank of each depth is right after the text's own tokens; each at most as often as the one
        before."""
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

"""Medusa-1 (Cai et al. 2024): heads on a frozen target learn the tokens that follow in its own texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.medusa import MedusaConfig, MedusaHeads
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import MedusaTrainOptions
from parlay.train.recipes.recipe import counted, final_states, right_tokens
from parlay.train.recipes.target import Target, common_tokens

DECAY = 0.8
"""What a head's loss counts for, relative to the head before."""
RANKS = 10
"""As many candidates of each head are told apart in the drafter's tree."""
_NONE = -100


class MedusaRecipe:
    """Loss: sum of 0.8^k times the cross-entropy of head k with the text, over tokens that can be drafted."""

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        self.module: nn.Module = heads
        self._heads, self._target = heads, target

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        return [weight for weight in self._heads.blocks.parameters() if weight.ndim == 2]

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        biases = [weight for weight in self._heads.blocks.parameters() if weight.ndim == 1]
        return [*biases, *self._heads.lm_heads.parameters()]

    def loss(self, batch: TrainingBatch) -> Tensor:
        draft_of_V = torch.full((len(self._heads.t2d),), _NONE)
        draft_of_V[self._heads.draft_ids] = torch.arange(len(self._heads.draft_ids))
        total = torch.zeros(())
        for place, logits_BRD in enumerate(self._logits(batch)):
            ids_BR = batch.tokens_ahead(place + 2)
            known_BR = batch.known_BR & (ids_BR >= 0)
            labels_BR = torch.where(known_BR, draft_of_V[ids_BR.clamp(min=0)], _NONE)
            if (labels_BR >= 0).any():
                rows_N = labels_BR >= 0
                total = total + DECAY**place * F.cross_entropy(logits_BRD[rows_N], labels_BR[rows_N])
        return total

    def right(self, batch: TrainingBatch) -> Tensor:
        drafted = (self._heads.draft_ids[logits.argmax(-1)] for logits in self._logits(batch))
        return counted([right_tokens(ids_BR, batch, place + 2) for place, ids_BR in enumerate(drafted)])

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """With the acceptance of each head's ranks, which says what the drafter's tree is."""
        config = self._heads.config
        return {
            "taps": [self._target.config.num_layers],
            "draft_vocab_size": config.draft_vocab_size,
            "heads": config.heads,
            "acceptance": self._acceptance(heldout),
        }

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._heads.state_dict())

    @torch.inference_mode()
    def _acceptance(self, heldout: Iterable[TrainingBatch]) -> list[list[float]]:
        """How often each rank of each head is right; no rank is better than the one before."""
        ranks = min(RANKS, self._heads.config.draft_vocab_size)
        right_KW, rows_K1 = torch.zeros(self._heads.config.heads, ranks), torch.zeros(self._heads.config.heads, 1)
        for batch in heldout:
            for place, logits_BRD in enumerate(self._logits(batch)):
                ids_BR = batch.tokens_ahead(place + 2)
                known_BR = batch.known_BR & (ids_BR >= 0)
                best_NW = self._heads.draft_ids[logits_BRD[known_BR].topk(ranks).indices]
                right_KW[place] += (best_NW == ids_BR[known_BR][:, None]).sum(0)
                rows_K1[place] += known_BR.sum()
        shares_KW = (right_KW / rows_K1.clamp(min=1)).cummin(1).values
        return [[round(share, 4) for share in head] for head in shares_KW.tolist()]

    def _logits(self, batch: TrainingBatch) -> Tensor:
        """``[K, B, R, D]``."""
        logits: Tensor = self._heads(final_states(batch, self._heads.config.hidden_size))
        return logits


def start(options: MedusaTrainOptions, target: Target, texts: Sequence[Featured]) -> MedusaRecipe:
    """Heads that guess like the target's LM head."""
    size, vocab_size = target.config.hidden_size, target.config.vocab_size
    draft_ids_D = common_tokens(texts, options.draft_vocab, vocab_size)
    heads = MedusaHeads(MedusaConfig(size, vocab_size, len(draft_ids_D), options.heads))
    heads.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        for head in heads.lm_heads.parameters():
            head.copy_(target.head_VH[draft_ids_D].float())
    return MedusaRecipe(heads, target)

"""What recipes share whose heads guess one token each, and whose drafter fills a static tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.several import SeveralHeadsConfig, SeveralHeadsModule
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.recipes.recipe import counted, right_tokens
from parlay.train.recipes.target import Target, common_tokens

DECAY = 0.8
"""What a head's loss counts for, relative to the head before."""
RANKS = 10
"""As many candidates of each head are told apart in the drafter's tree."""
_NONE = -100


class SeveralHeads(ABC):
    """Loss: sum of 0.8^k times the cross-entropy of head k with the text, over tokens that can be drafted."""

    def __init__(self, module: SeveralHeadsModule, target: Target) -> None:
        self.module: nn.Module = module
        self._vocab, self._config, self._target = module, module.config, target
        self._output = {id(weight) for weight in module.lm_head_weights}

    @abstractmethod
    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """``[B, R, D]`` of each head."""

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        return [weight for weight in self.module.parameters() if weight.ndim == 2 and id(weight) not in self._output]

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        fast = {id(weight) for weight in self.matrices}
        return [weight for weight in self.module.parameters() if id(weight) not in fast]

    def loss(self, batch: TrainingBatch) -> Tensor:
        draft_of_V = torch.full((len(self._vocab.t2d),), _NONE)
        draft_of_V[self._vocab.draft_ids] = torch.arange(len(self._vocab.d2t))
        total = torch.zeros(())
        for place, logits_BRD in enumerate(self.logits(batch)):
            ids_BR = batch.tokens_ahead(place + 2)
            labels_BR = torch.where(batch.known_BR & (ids_BR >= 0), draft_of_V[ids_BR.clamp(min=0)], _NONE)
            rows_BR = labels_BR != _NONE
            if rows_BR.any():
                total = total + DECAY**place * F.cross_entropy(logits_BRD[rows_BR], labels_BR[rows_BR])
        return total

    def right(self, batch: TrainingBatch) -> Tensor:
        drafted = (self._vocab.draft_ids[logits_BRD.argmax(-1)] for logits_BRD in self.logits(batch))
        return counted([right_tokens(ids_BR, batch, place + 2) for place, ids_BR in enumerate(drafted)])

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """With the acceptance of each head's ranks, which says what the drafter's tree is."""
        return {
            "taps": [self._target.config.num_layers],
            "draft_vocab_size": self._config.draft_vocab_size,
            "heads": self._config.heads,
            "acceptance": self._acceptance(heldout),
        }

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    @torch.inference_mode()
    def _acceptance(self, heldout: Iterable[TrainingBatch]) -> list[list[float]]:
        """How often each rank of each head is right after the text's own tokens; none better than the one before."""
        ranks = min(RANKS, self._config.draft_vocab_size)
        right_KW, rows_K1 = torch.zeros(self._config.heads, ranks), torch.zeros(self._config.heads, 1)
        for batch in heldout:
            for place, logits_BRD in enumerate(self.logits(batch)):
                ids_BR = batch.tokens_ahead(place + 2)
                known_BR = batch.known_BR & (ids_BR >= 0)
                best_NW = self._vocab.draft_ids[logits_BRD[known_BR].topk(ranks).indices]
                right_KW[place] += (best_NW == ids_BR[known_BR][:, None]).sum(0)
                rows_K1[place] += known_BR.sum()
        shares_KW = (right_KW / rows_K1.clamp(min=1)).cummin(1).values
        return [[round(share, 4) for share in head] for head in shares_KW.tolist()]


Heads = TypeVar("Heads", bound=SeveralHeadsModule)


def first_heads(
    make: Callable[[SeveralHeadsConfig], Heads], target: Target, texts: Sequence[Featured], vocab: int, count: int
) -> Heads:
    """``count`` heads over the ``vocab`` commonest tokens of the texts, which guess like the target's LM head."""
    draft_ids_D = common_tokens(texts, vocab, target.config.vocab_size)
    config = SeveralHeadsConfig(target.config.hidden_size, target.config.vocab_size, len(draft_ids_D), count)
    heads = make(config)
    heads.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        for weight in heads.lm_head_weights:
            weight.copy_(target.head_VH[draft_ids_D].float())
    return heads

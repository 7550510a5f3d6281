"""Base of recipes whose heads guess one token each, and whose drafter fills a static tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.recipes.by_depth import ByDepth
from parlay.train.recipes.linear_start import states_ahead
from parlay.train.recipes.target import Target, common_tokens


class SeveralHeads(ByDepth):
    """Loss: sum of 0.8^k times the cross-entropy of head k with the text, over tokens that can be drafted."""

    def __init__(self, module: SeveralHeadsModule, target: Target, embedding: Iterable[nn.Parameter] = ()) -> None:
        """``embedding``: the module's own, if it has one."""
        super().__init__(module, module, target, (*module.lm_head_weights, *embedding))
        self._config = module.config

    def loss(self, batch: TrainingBatch) -> Tensor:
        return self.hard_losses(batch)

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """With the acceptance of each head's ranks, which says what the drafter's tree is."""
        return {
            "taps": [self._target.config.num_layers],
            "draft_vocab_size": self._config.draft_vocab_size,
            "heads": self._config.heads,
            "acceptance": self.acceptance(heldout),
        }

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())


Heads = TypeVar("Heads", bound=SeveralHeadsModule)


def first_heads(
    make: Callable[[SeveralHeadsConfig], Heads], target: Target, texts: Sequence[Featured], vocab: int, count: int
) -> Heads:
    """``count`` heads over the ``vocab`` commonest tokens of the texts.

    Each begins as the target's LM head behind the best linear guess of the state that it has to read.
    """
    draft_ids_D = common_tokens(texts, vocab, target.config.vocab_size)
    config = SeveralHeadsConfig(target.config.hidden_size, target.config.vocab_size, len(draft_ids_D), count)
    heads = make(config)
    heads.set_draft_vocab(draft_ids_D)
    head_DH, ahead = target.head_VH[draft_ids_D].float(), states_ahead(config.hidden_size, texts, count)
    with torch.no_grad():
        for weight, guess_HH in zip(heads.lm_head_weights, ahead, strict=True):
            weight.copy_(head_DH @ guess_HH)
    return heads

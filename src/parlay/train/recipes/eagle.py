"""Recipe for EAGLE's head (Li et al. 2024, arXiv:2401.15077): a layer that predicts the target's next feature.

The target's LM head reads the prediction. EAGLE-2 drafts with the same head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.eagle import EagleHead
from parlay.heads.layer import Steps, add_nothing
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import EagleTrainOptions
from parlay.train.recipes.layer_heads import RepeatedLayer
from parlay.train.recipes.linear_start import linear_guess
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.target import Target, common_tokens

DEPTHS = 5
"""Number of depths of the drafter's static tree."""
_DISTRIBUTION = 0.1
"""The weight of the cross-entropy; the regression of features weighs 1."""
_NOISE = 0.1
"""Noise on the input features, as a fraction of their usual size: in deeper drafts, features are inexact predictions.
"""


class EagleRecipe(RepeatedLayer):
    """Loss: smooth L1 between predicted and true features, in units of ``size``, plus 0.1 times the cross-entropy.

    The cross-entropy compares the LM head's output on the predicted feature with its output on the true feature. Only
    one step is trained, on the target's features.
    """

    def __init__(self, head: EagleHead, target: Target, size: float) -> None:
        super().__init__(head, head, target, DEPTHS)
        self._head, self._size = head, size

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        return {
            "taps": [self._target.config.num_layers],
            "draft_vocab_size": len(self._head_DH),
            "acceptance": self.acceptance(heldout),
        }

    def loss(self, batch: TrainingBatch) -> Tensor:
        (guessed_BRH,) = self.unrolled(batch, 1)
        true_BRH = final_states(batch, self._head.config.hidden_size)[:, 1:]
        apart_BR = F.smooth_l1_loss(guessed_BRH[:, :-1] / self._size, true_BRH / self._size, reduction="none").mean(-1)
        known_BR = batch.known_BR[:, :-1] & (batch.tokens_ahead(1)[:, :-1] >= 0)
        regression = (apart_BR * known_BR).sum() / known_BR.sum().clamp(min=1)
        return regression + _DISTRIBUTION * self.soft_losses(batch, [self._target.logits(self._read(guessed_BRH))])

    def _first(self, batch: TrainingBatch) -> Tensor:
        features_BTH = batch.states_BTF[..., -self._head.config.hidden_size :]
        if not self._head.training:
            return features_BTH
        return features_BTH + (2 * torch.rand_like(features_BTH) - 1) * _NOISE * self._size

    def _step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        return self._head.step(hidden_BTH, embedded_BTH, steps)


def start(options: EagleTrainOptions, target: Target, texts: Sequence[Featured]) -> EagleRecipe:
    """Make the recipe; the head starts from the best linear guess."""
    head = EagleHead(target.config, min(options.draft_vocab, target.config.vocab_size))
    head.set_draft_vocab(common_tokens(texts, options.draft_vocab, target.config.vocab_size))
    guess = linear_guess(target, texts, slice(-target.config.hidden_size, None), normed=False)
    with torch.no_grad():
        head.fc.weight.copy_(torch.cat((guess.from_embedding_HH, guess.from_features_HF), -1))
        head.fc.bias.zero_()
    add_nothing(head.layers[0])
    return EagleRecipe(head, target, guess.size)

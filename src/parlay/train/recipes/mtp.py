"""Multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437): a block on a frozen target learns one token further."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.layer import Steps
from parlay.heads.mtp import MtpModule
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import MtpTrainOptions
from parlay.train.recipes.by_depth import DECAY
from parlay.train.recipes.layer_heads import LayerHeads
from parlay.train.recipes.linear_start import linear_guess
from parlay.train.recipes.target import Target, common_tokens

_MEASURED = 3
"""Depths of which acceptance is measured, at least."""


class MtpRecipe(LayerHeads):
    """Loss: the cross-entropy with the target's own distribution of one token further than the target's.

    Where the module is trained for ``steps`` depths, it runs on its own states from the second on, and each depth
    counts 0.8 times the one before.
    """

    def __init__(self, module: MtpModule, target: Target, steps: int) -> None:
        super().__init__(module, module, target, max(steps, _MEASURED))
        self._mtp, self._trained = module, steps
        self._head_DH = target.head_VH[module.draft_ids].float()

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # trees grow where the module itself is sure
        return {"taps": [self._target.config.num_layers], "draft_vocab_size": len(self._head_DH)}

    def tensors(self) -> dict[str, Tensor]:
        """With the target's LM head where that is not its embedding, from which drafters read it."""
        own = {} if self._target.tied else {"lm_head.weight": self._head_DH}
        return {**self._mtp.state_dict(), **own}

    def loss(self, batch: TrainingBatch) -> Tensor:
        probs_BRD, total = self.teacher.probs(batch), torch.zeros(())
        for step, hidden_BRH in enumerate(self.unrolled(batch, self._trained)):
            total = total + DECAY**step * self.soft_loss(batch, probs_BRD, step, hidden_BRH)
        return total

    def _first(self, batch: TrainingBatch) -> Tensor:
        return batch.states_BTF[..., -self._mtp.config.hidden_size :]

    def _step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        return self._mtp.step(hidden_BTH, embedded_BTH, steps)

    def _read(self, hidden_BRH: Tensor) -> Tensor:
        normed_BRH = self._mtp.norm(hidden_BRH)
        return F.linear(normed_BRH, self._head_DH.to(normed_BRH.dtype))


def start(options: MtpTrainOptions, target: Target, texts: Sequence[Featured]) -> MtpRecipe:
    """From the best linear guess on."""
    size = target.config.hidden_size
    module = MtpModule(target.config, min(options.draft_vocab, target.config.vocab_size))
    module.set_draft_vocab(common_tokens(texts, options.draft_vocab, target.config.vocab_size))
    guess = linear_guess(target, texts, slice(-size, None), normed=True)
    with torch.no_grad():
        # States are normed before they are read. Their sizes hardly differ, so that is about a division.
        module.eh_proj.weight.copy_(torch.cat((guess.from_embedding_HH, guess.from_features_HF * guess.size), -1))
        module.block.self_attn.o_proj.weight.zero_()
        module.block.mlp.down_proj.weight.zero_()
        module.norm.weight.fill_(guess.size)
    return MtpRecipe(module, target, options.steps)

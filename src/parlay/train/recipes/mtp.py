"""Multi-token prediction on a target that stays as it is: a block that learns one token further, or parallel heads.

The block is that of DeepSeek-AI 2024, arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from parlay.heads.layer import Steps, add_nothing
from parlay.heads.mtp import NORMED, MtpModule
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import MtpTrainOptions
from parlay.train.recipes.layer_heads import RepeatedLayer
from parlay.train.recipes.linear_start import linear_guess
from parlay.train.recipes.parallel_mtp import ParallelMtpRecipe, start_parallel
from parlay.train.recipes.target import Target, common_tokens

_MEASURED = 3
"""Depths of which acceptance is measured, at least."""


class MtpRecipe(RepeatedLayer):
    """Loss: the cross-entropy with the target's own distribution of one token further than the target's.

    Where the module is trained for ``steps`` depths, it runs on its own states from the second on, and each depth
    counts 0.8 times the one before.
    """

    def __init__(self, module: MtpModule, target: Target, steps: int) -> None:
        super().__init__(module, module, target, max(steps, _MEASURED))
        self._mtp, self._trained = module, steps

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # trees grow where the module itself is sure
        sizes = {"draft_vocab_size": len(self._head_DH), NORMED: True}
        return {"taps": [self._target.config.num_layers], **sizes}

    def loss(self, batch: TrainingBatch) -> Tensor:
        return self.soft_losses(batch, map(self._read, self.unrolled(batch, self._trained)))

    def _first(self, batch: TrainingBatch) -> Tensor:
        return batch.states_BTF[..., -self._mtp.config.hidden_size :]

    def _step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        return self._mtp.step(hidden_BTH, embedded_BTH, steps)

    def _again(self, hidden_BRH: Tensor) -> Tensor:
        return self._mtp.again(hidden_BRH)

    def _read(self, hidden_BRH: Tensor) -> Tensor:
        return super()._read(self._mtp.norm(hidden_BRH))


def start(options: MtpTrainOptions, target: Target, texts: Sequence[Featured]) -> MtpRecipe | ParallelMtpRecipe:
    """The form that is asked for."""
    if options.form == "parallel":
        return start_parallel(options.draft_vocab, options.steps, target, texts)
    return _start_sequential(options, target, texts)


def _start_sequential(options: MtpTrainOptions, target: Target, texts: Sequence[Featured]) -> MtpRecipe:
    """From the best linear guess on."""
    size = target.config.hidden_size
    module = MtpModule(target.config, min(options.draft_vocab, target.config.vocab_size), normed=True)
    module.set_draft_vocab(common_tokens(texts, options.draft_vocab, target.config.vocab_size))
    guess = linear_guess(target, texts, slice(-size, None), normed=True)
    with torch.no_grad():
        # States are normed before they are read. Their sizes hardly differ, so that is about a division.
        module.eh_proj.weight.copy_(torch.cat((guess.from_embedding_HH, guess.from_features_HF * guess.size), -1))
        module.norm.weight.fill_(guess.size)
    add_nothing(module.block)
    return MtpRecipe(module, target, options.steps)

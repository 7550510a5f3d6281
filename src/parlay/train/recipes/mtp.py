"""Multi-token prediction on a frozen target: a sequential block that drafts one token further, or parallel heads.

The block is DeepSeek-V3's (DeepSeek-AI 2024, arXiv:2412.19437). DynaMo also has parallel heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parlay.heads import ngrams
from parlay.heads.base import ParallelHeads
from parlay.heads.layer import Steps, add_nothing
from parlay.heads.mtp import NORMED, MtpModule
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import DynamoTrainOptions, MtpTrainOptions
from parlay.train.recipes.layer_heads import LayerHeads, RepeatedLayer
from parlay.train.recipes.linear_start import linear_guess
from parlay.train.recipes.target import Target, common_tokens

_MEASURED = 3
"""Acceptance is measured at least up to this depth of a draft."""
_TEXTS = 64
"""Number of texts on which the size of states is measured."""


class MtpRecipe(RepeatedLayer):
    """Loss: the cross-entropy of drafted tokens with the target's own distribution.

    The block is trained for ``steps`` depths. After the first it runs on its own states, and each depth weighs 0.8
    times the one before.
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
    """Make the recipe of the requested form."""
    if options.form == "parallel":
        return ParallelMtpRecipe(first_parallel(options.draft_vocab, options.steps, target, texts), target)
    return _start_sequential(options, target, texts)


def _start_sequential(options: MtpTrainOptions, target: Target, texts: Sequence[Featured]) -> MtpRecipe:
    """Make the sequential recipe; the module starts from the best linear guess."""
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


class ParallelMtpRecipe(LayerHeads):
    """Parallel heads (Gloeckle et al. 2024). Loss: the sum over heads k of 0.8^k times the cross-entropy with the
    target."""

    def __init__(self, heads: ParallelHeads, target: Target) -> None:
        super().__init__(heads, heads, target, len(heads.blocks))
        self._heads = heads

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # trees hold the paths of which the heads themselves are surest
        taps = [self._target.config.num_layers]
        return {"taps": taps, "draft_vocab_size": len(self._head_DH), "heads": self._steps}

    def unrolled(self, batch: TrainingBatch, count: int) -> Iterator[Tensor]:
        hidden_BTH = batch.states_BTF[..., -self._heads.config.hidden_size :]
        for place in range(count):
            yield self._heads.head(place, hidden_BTH, batch.padding_B, batch.rows)


def first_parallel(draft_vocab: int, heads: int, target: Target, texts: Sequence[Featured]) -> ParallelHeads:
    """Make parallel heads that add nothing at first, so that each predicts like the target's LM head at the same
    row."""
    size = target.config.hidden_size
    draft_ids_D = common_tokens(texts, draft_vocab, target.config.vocab_size)
    module = ParallelHeads(target.config, len(draft_ids_D), heads)
    module.set_draft_vocab(draft_ids_D)
    states_NH = torch.cat([text.states_TF[text.answer - 1 :, -size:] for text in texts[:_TEXTS]]).float()
    with torch.no_grad():
        module.norm.weight.copy_(states_NH.square().mean().sqrt())
    for block in module.blocks:
        add_nothing(block)
    return module


class DynamoRecipe(ParallelMtpRecipe):
    """DynaMo (Tuli et al. 2024); see `ParallelMtpRecipe`. ``counted``: the texts' n-gram counts, saved with heads."""

    def __init__(self, heads: ParallelHeads, target: Target, counted: Mapping[str, Tensor]) -> None:
        super().__init__(heads, target)
        self._counted = dict(counted)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **self._counted}


def start_dynamo(options: DynamoTrainOptions, target: Target, texts: Sequence[Featured]) -> DynamoRecipe:
    """Make the recipe of DynaMo; the heads start as in `first_parallel`. Also count the answers' n-grams."""
    counted = ngrams.count(text.ids_T[text.answer - 1 :].tolist() for text in texts)
    return DynamoRecipe(first_parallel(options.draft_vocab, options.heads, target, texts), target, counted)

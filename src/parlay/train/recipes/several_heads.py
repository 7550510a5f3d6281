"""Recipes for heads that draft one token each on a frozen target: Medusa, Hydra, MLP speculator, ReDrafter,
blockwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads import ngrams
from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule
from parlay.heads.blockwise import WINDOW, BlockwiseHeads
from parlay.heads.hydra import HydraHeads
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.heads.redrafter import ReDrafterHead
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import (
    BlockwiseTrainOptions,
    HydraTrainOptions,
    MedusaTrainOptions,
    MlpSpeculatorTrainOptions,
    ReDrafterTrainOptions,
)
from parlay.train.recipes.by_depth import ByDepth
from parlay.train.recipes.linear_start import states_ahead
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.target import Target, common_tokens


class SeveralHeads(ByDepth):
    """Loss: the sum over heads k of 0.8^k times the cross-entropy with the text, over tokens that can be drafted."""

    def __init__(self, module: SeveralHeadsModule, target: Target, embedding: Iterable[nn.Parameter] = ()) -> None:
        """``embedding``: the module's own embedding, if it has one."""
        super().__init__(module, module, target, (*module.lm_head_weights, *embedding))
        self._config = module.config

    def loss(self, batch: TrainingBatch) -> Tensor:
        return self.hard_losses(batch)

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """Return the settings, with the acceptance of each head's candidates, from which drafters build trees."""
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
    """Make ``count`` heads over the ``vocab`` tokens that occur most often in the answers.

    Each starts as the target's LM head after the best linear prediction of the state it needs; see `states_ahead`.
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


class MedusaRecipe(SeveralHeads):
    """Medusa-1 (Cai et al. 2024); see `SeveralHeads`. Each head reads only the target's state."""

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        super().__init__(heads, target)
        self._heads = heads

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        yield from self._heads(final_states(batch, self._heads.config.hidden_size))


def start_medusa(options: MedusaTrainOptions, target: Target, texts: Sequence[Featured]) -> MedusaRecipe:
    """Make the recipe; the heads start as in `first_heads`."""
    return MedusaRecipe(first_heads(MedusaHeads, target, texts, options.draft_vocab, options.heads), target)


class HydraRecipe(SeveralHeads):
    """Hydra (Ankner et al. 2024); see `SeveralHeads`. In training, heads read the text's own tokens.

    Hydra++ is trained on the target's distribution instead of the text, with the same weights of depths.
    """

    def __init__(self, heads: HydraHeads, target: Target) -> None:
        super().__init__(heads, target)
        self._heads = heads
        self._embedding_VH = target.embedding_VH

    def loss(self, batch: TrainingBatch) -> Tensor:
        plain = self._heads.prefix is None
        return super().loss(batch) if plain else self.soft_losses(batch, self.logits(batch))

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        states_BTH = batch.states_BTF[..., -self._heads.config.hidden_size :]
        hidden_BRH = self._heads.read(states_BTH, batch.padding_B, batch.rows)
        embedded: list[Tensor] = []
        for place, head in enumerate(self._heads.heads):
            ids_BR = batch.tokens_ahead(place + 1).clamp(min=0)
            embedded.append(F.embedding(ids_BR, self._embedding_VH).float())
            yield head(hidden_BRH, torch.cat(embedded, -1))

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        return {**super().settings(heldout), "plus": self._heads.prefix is not None}


def start_hydra(options: HydraTrainOptions, target: Target, texts: Sequence[Featured]) -> HydraRecipe:
    """Make the recipe; the heads start as in `first_heads`."""
    make = partial(HydraHeads, plus=target.config if options.plus else None)
    return HydraRecipe(first_heads(make, target, texts, options.draft_vocab, options.heads), target)


class MlpSpeculatorRecipe(SeveralHeads):
    """The MLP speculator (Wertheimer et al. 2024); see `SeveralHeads`. Its steps carry a state along the text's own
    tokens.

    The texts are the target's own, as in the paper's second stage.
    """

    def __init__(self, speculator: MlpSpeculator, target: Target) -> None:
        super().__init__(speculator, target, speculator.emb.parameters())
        self._speculator = speculator

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        config = self._speculator.config
        state = self._speculator.begin(final_states(batch, config.hidden_size))
        for step in range(config.heads):
            state = self._speculator.advance(step, state, batch.tokens_ahead(step + 1).clamp(min=0))
            yield self._speculator.read(step, state)


def start_mlp_speculator(
    options: MlpSpeculatorTrainOptions, target: Target, texts: Sequence[Featured]
) -> MlpSpeculatorRecipe:
    """Make the recipe; the speculator starts as in `first_heads`, with the target's embedding."""
    speculator = first_heads(MlpSpeculator, target, texts, options.draft_vocab, options.heads)
    with torch.no_grad():
        speculator.emb.weight.copy_(target.embedding_VH.float())
    return MlpSpeculatorRecipe(speculator, target)


class ReDrafterRecipe(SeveralHeads):
    """ReDrafter (Zhang et al. 2024); see `SeveralHeads`. One recurrent network serves all depths."""

    def __init__(self, head: ReDrafterHead, target: Target) -> None:
        super().__init__(head, target)
        self._head = head
        self._embedding_VH = target.embedding_VH

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        hidden_BRH = final_states(batch, self._head.config.hidden_size)
        state = torch.zeros_like(hidden_BRH)
        for step in range(self._head.config.heads):
            ids_BR = batch.tokens_ahead(step + 1).clamp(min=0)
            state = self._head.advance(state, F.embedding(ids_BR, self._embedding_VH).float())
            yield self._head.read(hidden_BRH, state)


def start_redrafter(options: ReDrafterTrainOptions, target: Target, texts: Sequence[Featured]) -> ReDrafterRecipe:
    """Make the recipe; the head at first predicts like the target's LM head at the same row."""
    size, vocab_size = target.config.hidden_size, target.config.vocab_size
    draft_ids_D = common_tokens(texts, options.draft_vocab, vocab_size)
    head = ReDrafterHead(SeveralHeadsConfig(size, vocab_size, len(draft_ids_D), options.length))
    head.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        head.lm_head.weight.copy_(
            torch.cat((target.head_VH[draft_ids_D].float(), torch.zeros(len(draft_ids_D), size)), 1)
        )
    return ReDrafterRecipe(head, target)


class BlockwiseRecipe(SeveralHeads):
    """Blockwise parallel decoding (Stern et al. 2018); see `SeveralHeads`. The heads share the target's LM head.

    The rescoring model (Kim et al. 2024) is trained at the same time, on the cross-entropy of each next token.
    ``counted``: the n-gram counts that are saved with the heads.
    """

    def __init__(self, heads: BlockwiseHeads, target: Target, counted: Mapping[str, Tensor]) -> None:
        super().__init__(heads, target, [heads.rescorer.get_parameter("lm_head.weight")])
        self._heads, self._counted = heads, dict(counted)
        self._embedding_VH = target.embedding_VH

    def loss(self, batch: TrainingBatch) -> Tensor:
        padded = F.pad(batch.ids_BT, (WINDOW - 1, 0))
        windows_BRW = padded.unfold(1, WINDOW, 1)[:, -batch.rows :]
        embedded = F.embedding(windows_BRW, self._embedding_VH).float().flatten(2)
        return super().loss(batch) + self.hard_loss(batch, 1, self._heads.rescorer(embedded))

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        hidden_BRH = final_states(batch, self._config.hidden_size)
        for head in self._heads.heads:
            yield self._read(head(hidden_BRH))

    def tensors(self) -> dict[str, Tensor]:
        return {**ByDepth.tensors(self), **self._counted}


def start_blockwise(options: BlockwiseTrainOptions, target: Target, texts: Sequence[Featured]) -> BlockwiseRecipe:
    """Make the recipe; the heads start as the identity before the target's LM head. Also count the answers' n-grams."""
    draft_ids_D = common_tokens(texts, options.draft_vocab, target.config.vocab_size)
    sizes = (target.config.hidden_size, target.config.vocab_size, len(draft_ids_D), options.heads)
    heads = BlockwiseHeads(SeveralHeadsConfig(*sizes), target.config.intermediate_size)
    heads.set_draft_vocab(draft_ids_D)
    return BlockwiseRecipe(heads, target, ngrams.count(text.ids_T[text.answer - 1 :].tolist() for text in texts))

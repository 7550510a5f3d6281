"""Recipes for probes, trained inputs of the frozen target: PaSS, PPD, BiTA and Speculative Streaming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.layer import Steps
from parlay.heads.probes import PrefixedProbes, ProbeEmbeddings, Streams
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import BitaTrainOptions, ProbeTrainOptions, StreamTrainOptions
from parlay.train.recipes.by_depth import ByDepth
from parlay.train.recipes.target import Target, common_tokens
from parlay.train.recipes.torch_decoder import TorchTarget
from parlay.types import ParlayError

_DEEP = 3
"""By default, streams run through the last 1 / `_DEEP` of the layers."""


class ProbeRecipe(ByDepth):
    """In each batch, all probes follow every row of a text; probes of different rows do not attend to each other.

    Loss: the sum over probes m of 0.8^m times the cross-entropy, with the target's own distribution (PPD) or, if
    ``hard``, with the text (PaSS, BiTA, Speculative Streaming).
    """

    def __init__(self, probes: ProbeEmbeddings, target: Target, *, hard: bool) -> None:
        super().__init__(probes, probes, target, probes.parameters())
        self._probes, self._hard = probes, hard
        self._decoder = TorchTarget(target).requires_grad_(False)
        self._embedding_VH = target.embedding_VH

    def loss(self, batch: TrainingBatch) -> Tensor:
        return self.hard_losses(batch) if self._hard else self.soft_losses(batch, self.logits(batch))

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        yield from map(self._read, self._states(batch))

    def _states(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """Yield for each probe the states ``[B, R, H]`` that the LM head reads."""
        steps = self._begin(batch)
        with torch.no_grad():
            self._decoder.step(self._embedded(batch), steps)
        for input_H in self._probes.inputs_MH:
            yield self._decoder.step(input_H.expand(*batch.known_BR.shape, -1), steps)

    def _begin(self, batch: TrainingBatch) -> list[Steps]:
        return self._decoder.begin(batch.padding_B)

    def _embedded(self, batch: TrainingBatch) -> Tensor:
        return F.embedding(batch.ids_BT, self._embedding_VH).float()

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """Return the settings, with the acceptance of each probe's candidates, from which drafters build trees."""
        return {"draft_vocab_size": len(self._head_DH), "acceptance": self.acceptance(heldout)}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._probes.state_dict())


class BitaRecipe(ProbeRecipe):
    """BiTA (Lin et al. 2024): probes that also attend to a trained prefix in every layer. See `ProbeRecipe`."""

    def __init__(self, probes: PrefixedProbes, target: Target) -> None:
        super().__init__(probes, target, hard=True)
        self._prefix = probes.prefix

    def _begin(self, batch: TrainingBatch) -> list[Steps]:
        steps = super()._begin(batch)
        for own, states in zip(steps, self._prefix, strict=True):
            own.prefix = states
        return steps

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """Return the settings of `ProbeRecipe`, and the length of the prefix."""
        return {**super().settings(heldout), "prefix": self._prefix.shape[3]}


class StreamRecipe(ProbeRecipe):
    """Speculative Streaming (Bhendawade et al. 2024): streams start at the input of layer ``join``; see `ProbeRecipe`.

    The layers before ``join`` run only on the text, without gradients.
    """

    def __init__(self, streams: Streams, target: Target, join: int) -> None:
        super().__init__(streams, target, hard=True)
        self._streams, self._join = streams, join

    def _states(self, batch: TrainingBatch) -> Iterator[Tensor]:
        decoder, steps = self._decoder, self._begin(batch)
        with torch.no_grad():
            states_BTH = decoder.through(self._embedded(batch), steps, 0, self._join)
            decoder.step(states_BTH, steps, self._join)
        anchors_BRH = states_BTH[:, -batch.rows :]
        begun_BRH = anchors_BRH + anchors_BRH @ self._streams.down_RH.T @ self._streams.up_RH
        for input_H in self._streams.inputs_MH:
            yield decoder.step(begun_BRH + input_H, steps, self._join)

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """Return the settings of `ProbeRecipe`, the layer where streams start, and their rank."""
        return {**super().settings(heldout), "join": self._join, "rank": len(self._streams.up_RH)}


def start_ppd(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> ProbeRecipe:
    """Make the recipe of PPD; see `ProbeRecipe`."""
    return ProbeRecipe(_plain(options, target, texts), target, hard=False)


def start_pass(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> ProbeRecipe:
    """Make the recipe of PaSS; see `ProbeRecipe`."""
    return ProbeRecipe(_plain(options, target, texts), target, hard=True)


def start_bita(options: BitaTrainOptions, target: Target, texts: Sequence[Featured]) -> BitaRecipe:
    """Make the recipe of BiTA; the prefix's keys and values start near zero."""
    config, ids_D = target.config, _vocab(options, target, texts)
    shape = config.num_layers, 2, config.num_kv_heads, options.prefix, config.head_dim
    probes = PrefixedProbes(_first(options, target, texts), 0.02 * torch.randn(shape), len(ids_D), config.vocab_size)
    probes.set_draft_vocab(ids_D)
    return BitaRecipe(probes, target)


def start_streaming(options: StreamTrainOptions, target: Target, texts: Sequence[Featured]) -> StreamRecipe:
    """Make the recipe of Speculative Streaming; streams start as the text's own states.

    Raises ParlayError for more layers than the target has.
    """
    layers, ids_D = target.config.num_layers, _vocab(options, target, texts)
    deep = options.layers or max(1, layers // _DEEP)
    if deep > layers:
        raise ParlayError(f"layers={deep}: the target has {layers}, so give no more", "layers")
    begun_MH = torch.zeros(options.probes, target.config.hidden_size)
    streams = Streams(begun_MH, options.rank, len(ids_D), target.config.vocab_size)
    streams.set_draft_vocab(ids_D)
    return StreamRecipe(streams, target, layers - deep)


def _plain(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> ProbeEmbeddings:
    ids_D = _vocab(options, target, texts)
    probes = ProbeEmbeddings(_first(options, target, texts), len(ids_D), target.config.vocab_size)
    probes.set_draft_vocab(ids_D)
    return probes


def _vocab(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> Tensor:
    return common_tokens(texts, options.draft_vocab, target.config.vocab_size)


def _first(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> Tensor:
    """Return the probes' initial values ``[M, H]``: the embeddings of the most common tokens."""
    return target.embedding_VH[common_tokens(texts, options.probes, target.config.vocab_size)].float()

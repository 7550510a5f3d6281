"""Trained inputs of the target (PaSS and PPD): they learn through its layers, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.probes import ProbeEmbeddings
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import ProbeTrainOptions
from parlay.train.recipes.by_depth import ByDepth
from parlay.train.recipes.target import Target, common_tokens
from parlay.train.recipes.torch_decoder import TorchTarget


class ProbeRecipe(ByDepth):
    """Every row of a text is followed by all probes in each batch; no group of probes sees another.

    Loss: sum of 0.8^m times the cross-entropy of probe m, with the target's own distribution (PPD) or, if ``hard``,
    with the text (PaSS).
    """

    def __init__(self, probes: ProbeEmbeddings, target: Target, *, hard: bool) -> None:
        super().__init__(probes, probes, target, [probes.inputs_MH])
        self._probes, self._hard = probes, hard
        self._decoder = TorchTarget(target).requires_grad_(False)
        self._embedding_VH = target.embedding_VH
        self._head_DH = target.head_VH[probes.draft_ids].float()

    def loss(self, batch: TrainingBatch) -> Tensor:
        return self.hard_losses(batch) if self._hard else self.soft_losses(batch, self.logits(batch))

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        steps = self._decoder.begin(batch.padding_B)
        with torch.no_grad():
            self._decoder.step(F.embedding(batch.ids_BT, self._embedding_VH).float(), steps)
        for input_H in self._probes.inputs_MH:
            read_BRH = self._decoder.step(input_H.expand(*batch.known_BR.shape, -1), steps)
            yield F.linear(read_BRH, self._head_DH.to(read_BRH.dtype))

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """With how often each rank of each probe's guess is right, which says what the drafter's tree is."""
        return {"draft_vocab_size": len(self._head_DH), "acceptance": self.acceptance(heldout)}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._probes.state_dict())


def start_ppd(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> ProbeRecipe:
    """See `ProbeRecipe`."""
    return ProbeRecipe(_first(options, target, texts), target, hard=False)


def start_pass(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> ProbeRecipe:
    """See `ProbeRecipe`."""
    return ProbeRecipe(_first(options, target, texts), target, hard=True)


def _first(options: ProbeTrainOptions, target: Target, texts: Sequence[Featured]) -> ProbeEmbeddings:
    """Probes that begin as the embeddings of the commonest tokens."""
    vocab_size = target.config.vocab_size
    draft_ids_D = common_tokens(texts, options.draft_vocab, vocab_size)
    begin_M = common_tokens(texts, options.probes, vocab_size)
    probes = ProbeEmbeddings(target.embedding_VH[begin_M].float(), len(draft_ids_D), vocab_size)
    probes.set_draft_vocab(draft_ids_D)
    return probes

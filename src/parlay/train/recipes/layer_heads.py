"""Bases of recipes whose heads are decoder layers that read the target's states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.base import DraftVocab
from parlay.heads.block import BlockHead
from parlay.heads.eagle3 import Eagle3Head
from parlay.heads.layer import Steps
from parlay.train.data.batches import TrainingBatch
from parlay.train.recipes.by_depth import ByDepth
from parlay.train.recipes.target import Target


class LayerHeads(ByDepth):
    """Runs a head for ``steps`` steps: row i of step j predicts token i + 2 + j. A loss may run fewer steps."""

    def __init__(
        self, module: nn.Module, vocab: DraftVocab, target: Target, steps: int, output: Iterable[nn.Parameter] = ()
    ) -> None:
        super().__init__(module, vocab, target, output)
        self._steps = steps

    @abstractmethod
    def unrolled(self, batch: TrainingBatch, count: int) -> Iterator[Tensor]:
        """Yield the states ``[B, R, H]`` after each of ``count`` steps."""

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        yield from map(self._read, self.unrolled(batch, self._steps))

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Return the sum over depths d of 0.8^d times the cross-entropy with the target's own distribution."""
        return self.soft_losses(batch, self.logits(batch))


class ScaledHead(nn.Module):
    """A head as it is trained and stored in checkpoints: it reads features divided by ``scale_F``."""

    scale_F: Tensor

    def __init__(self, head: Eagle3Head | BlockHead, scale_F: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("scale_F", scale_F)
        head.fc.weight.data *= scale_F

    def fused(self, batch: TrainingBatch) -> Tensor:
        """Return the hidden states ``[B, T, H]`` that the head makes of a batch's features."""
        return self.head.fuse(batch.states_BTF[..., : len(self.scale_F)] / self.scale_F)

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's weights, rescaled to read unscaled features."""
        return {**self.head.state_dict(), "fc.weight": self.head.fc.weight.detach() / self.scale_F}


class RepeatedLayer(LayerHeads):
    """One layer that reads the target's states in its first step, and its own states in later steps."""

    @cached_property
    def _embedding_VH(self) -> Tensor:
        return self._target.embedding_VH.float()

    @abstractmethod
    def _first(self, batch: TrainingBatch) -> Tensor:
        """Return the states ``[B, T, H]`` that the first step reads."""

    @abstractmethod
    def _step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        """Run one step, and return its states ``[B, R, H]``."""

    def _again(self, hidden_BRH: Tensor) -> Tensor:
        """Return the next step's input ``[B, R, H]``, made from the last step's output."""
        return hidden_BRH

    def unrolled(self, batch: TrainingBatch, count: int) -> Iterator[Tensor]:
        steps = Steps(batch.padding_B, batch.rows)
        hidden = self._first(batch)
        embedded_BTH = F.embedding(batch.ids_BT, self._embedding_VH)
        for step in range(count):
            hidden = self._again(hidden) if step else hidden
            rows = hidden.shape[1]
            ahead = F.pad(embedded_BTH[:, step + 1 :], (0, 0, 0, step + 1))  # a text's end has nothing to add
            hidden = self._step(hidden, ahead[:, -rows:], steps)
            yield hidden

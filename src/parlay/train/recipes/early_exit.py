"""LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710): trains the target itself so that its early layers predict tokens.

In training, later layers are dropped more often than early ones. Exits after all layers share one norm and one LM head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.models.fetch.resolving import resolve
from parlay.train.checkpoints import save_student
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import EarlyExitTrainOptions
from parlay.train.recipes.recipe import ModelRecipe, counted, right_tokens
from parlay.train.recipes.target import Target
from parlay.train.recipes.torch_decoder import TorchModel
from parlay.types import ParlayError

_MEASURED = 3
"""Acceptance is measured up to this depth."""
_NONE = -100


class EarlyExitRecipe(ModelRecipe):
    """Loss: cross-entropy with the text after the last layer, and after one in ``apart`` of the other layers, by turns.

    The weight of an exit grows with the square of its depth. Layer l of L is dropped for whole texts with probability
    ``dropout`` (2^(l / (L - 1)) - 1).
    """

    def __init__(self, options: EarlyExitTrainOptions, target: Target) -> None:
        self._model, self._options = TorchModel.of(target), options
        self.module: nn.Module = self._model
        self._config, self._layers = target.config, target.config.num_layers
        self._exit = options.exit or max(1, self._layers // 4)
        if self._exit >= self._layers:
            raise ParlayError(f"exit={self._exit}: the target has {self._layers} layers, so give fewer", "exit")
        self._turn = 0

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        """Return no matrices: AdamW trains all weights, because the trained model needs only small steps."""
        return []

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        return list(self.module.parameters())

    def loss(self, batch: TrainingBatch) -> Tensor:
        ids_BR = batch.tokens_ahead(1)
        labels_BR = torch.where(batch.known_BR & (ids_BR >= 0), ids_BR, _NONE)
        rows = (labels_BR != _NONE).sum().clamp(min=1)
        weights = self._weights()
        total = torch.zeros(())
        for layer, hidden_BTH in enumerate(self._run(batch), 1):
            if layer in weights:
                logits_BRV = self._model.logits(hidden_BTH[:, -batch.rows :])
                summed = F.cross_entropy(logits_BRV.flatten(0, 1), labels_BR.flatten(), reduction="sum")
                total = total + weights[layer] * summed / rows
        self._turn += 1
        return total

    def right(self, batch: TrainingBatch) -> Tensor:
        """See `Recipe.right`: counts the drafts of the measured exit."""
        *_, hidden_BTH = self._run(batch, self._exit)
        drafted_BR = self._model.logits(hidden_BTH[:, -batch.rows :]).argmax(-1)
        return counted([right_tokens(drafted_BR.roll(-depth - 1, 1), batch, depth + 2) for depth in range(_MEASURED)])

    def save(self, folder: Path, card: str) -> None:
        """Write a checkpoint in the target's format, with its tokenizer."""
        tensors = {name: weight.detach() for name, weight in self.module.state_dict().items()}
        save_student(folder, self._config, tensors, like=resolve(self._options.model), card=card, same_family=True)

    def _weights(self) -> dict[int, float]:
        """Return the weight of each exit in this update, by the number of layers before it; the weights add up to 1.

        The paper numbers layers from 0, which gives the first exit no weight. Here layers count from 1, so it is
        trained too.
        """
        last = self._layers
        on = [layer for layer in range(1, last) if layer % self._options.apart == self._turn % self._options.apart]
        scale = self._options.exit_scale
        counts = {layer: scale * layer * (layer + 1) / 2 for layer in on}
        counts[last] = (last - 1) + scale * (last - 1) * last / 2
        return {layer: count / sum(counts.values()) for layer, count in counts.items()}

    def _run(self, batch: TrainingBatch, until: int = 0) -> Iterable[Tensor]:
        """Yield the output states ``[B, T, H]`` of each layer, up to ``until`` layers; 0: all."""
        hidden_BTH = self._model.model.embed_tokens(batch.ids_BT)
        steps = self._model.model.begin(batch.padding_B)
        for place, layer in enumerate(self._model.model.layers[: until or None]):
            changed_BTH = layer(hidden_BTH, steps[place])
            if self.module.training:
                kept_B11 = torch.rand(len(hidden_BTH), 1, 1) >= self._dropped(place)
                changed_BTH = torch.where(kept_B11, changed_BTH, hidden_BTH)
            hidden_BTH = changed_BTH
            yield hidden_BTH

    def _dropped(self, place: int) -> float:
        """Return the probability that the layer is dropped."""
        return self._options.dropout * math.expm1(place * math.log(2) / max(self._layers - 1, 1))


def start(options: EarlyExitTrainOptions, target: Target, texts: Sequence[Featured]) -> EarlyExitRecipe:
    """Make the recipe; the model starts as the target. Raises ParlayError if the target is not a folder."""
    del texts
    if not resolve(options.model).is_dir():
        raise ParlayError("early-exit trains the target itself, so it needs a folder of weights, not a GGUF file")
    return EarlyExitRecipe(options, target)

"""Decoders of the Llama lineage as torch modules, for recipes that need gradients through the target's layers.

Parameters are named as in checkpoints. Shapes: B texts, T rows of each, R of them computed, H hidden, V tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.layer import Block, RmsNorm, Steps
from parlay.models.config import DecoderConfig
from parlay.train.recipes.target import Target
from parlay.types import ParlayError


class TorchDecoder(nn.Module):
    """Layers and final norm, float32.

    Rows of a later step attend to the text up to their own place, and to earlier steps' rows at that place; see
    `Steps`. Raises ParlayError for layers that differ from Llama's, such as layers with sliding windows.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.layers:
            raise ParlayError(
                f"{config.architecture}: this recipe trains through layers of Llama, Mistral and Qwen without windows "
                "alone: choose another recipe or model"
            )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def begin(self, padding_B: Tensor, rows: int | None = None) -> list[Steps]:
        """Return empty `Steps` for each layer. The last layer computes only the last ``rows`` rows; None: all."""
        return [Steps(padding_B) for _ in self.layers[1:]] + [Steps(padding_B, rows)]

    def step(self, x_BTH: Tensor, steps: list[Steps], first: int = 0) -> Tensor:
        """Return the LM head's input for rows ``x_BTH``, ``[B, T, H]``, which enter layer ``first``."""
        out: Tensor = self.norm(self.through(x_BTH, steps, first, len(self.layers)))
        return out

    def through(self, x_BTH: Tensor, steps: list[Steps], first: int, last: int) -> Tensor:
        """Run the layers from ``first`` to ``last`` - 1."""
        for place in range(first, last):
            x_BTH = self.layers[place](x_BTH, steps[place])
        return x_BTH


class TorchTarget(TorchDecoder):
    """A decoder with the weights of a target."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.config)
        _fill(self, target)


class _Embedded(TorchDecoder):
    """A decoder with an embedding."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)


class TorchModel(nn.Module):
    """A whole model; if embeddings are tied, the embedding serves as LM head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.model = _Embedded(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def of(cls, target: Target) -> TorchModel:
        """Make a model with the weights of a target."""
        made = cls(target.config)
        _fill(made.model, target)
        if made.lm_head is not None:
            with torch.no_grad():
                made.lm_head.weight.copy_(target.tensor("lm_head.weight"))
        return made

    @property
    def head_VH(self) -> Tensor:
        """The LM head's weight."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` for the output states ``hidden`` ``[..., H]`` of any layer."""
        return F.linear(self.model.norm(hidden), self.head_VH)


def _fill(decoder: TorchDecoder, target: Target) -> None:
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(target.tensor(f"model.{name}"))

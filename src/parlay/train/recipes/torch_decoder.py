"""The target as a torch module, for recipes whose gradients pass through its layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parlay.heads.layer import Block, RmsNorm, Steps
from parlay.train.recipes.target import Target
from parlay.types import ParlayError


class TorchTarget(nn.Module):
    """Layers and last norm of a Llama with its weights, float32. Raises ParlayError for other kinds of layers.

    Rows of later steps see the text up to their own place, and the rows of earlier steps there; see `Steps`.

    Shapes: B texts, T rows of each, R of them computed, H hidden.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        config = target.config
        if config.qkv_bias or config.qk_norm or config.rope.kind == "yarn":
            raise ParlayError(f"{config.architecture}: this recipe trains through layers of Llama and Mistral alone")
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        with torch.no_grad():
            for place, layer in enumerate(self.layers):
                for name, weight in layer.named_parameters():
                    weight.copy_(target.tensor(f"model.layers.{place}.{name}"))
            self.norm.weight.copy_(target.tensor("model.norm.weight"))

    def begin(self, padding_B: Tensor) -> list[Steps]:
        """No step yet."""
        return [Steps(padding_B) for _ in self.layers]

    def step(self, x_BTH: Tensor, steps: list[Steps]) -> Tensor:
        """What the LM head reads of the rows ``x_BTH``, ``[B, T, H]``."""
        for layer, own in zip(self.layers, steps, strict=True):
            x_BTH = layer(x_BTH, own)
        out: Tensor = self.norm(x_BTH)
        return out

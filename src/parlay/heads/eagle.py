"""The head of EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-2 (Li et al. 2024, arXiv:2406.16858).

It is one decoder layer over the target's features, which are the states that its LM head reads. The layer predicts the
next feature, and the target's LM head reads the prediction. There is no norm before the layer's attention, and no final
norm. Parameters are named as in published checkpoints.

Shapes: B texts, T rows of each, R of them computed, H hidden, D draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parlay.heads.base import DraftVocab
from parlay.heads.layer import Attention, Mlp, RmsNorm, Steps
from parlay.models.config import DecoderConfig


class EagleLayer(nn.Module):
    """EAGLE's only decoder layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x_BTH: Tensor, steps: Steps) -> Tensor:
        """Run the layer; returns ``[B, R, H]``."""
        hidden_BRH = steps.last(x_BTH) + self.self_attn(x_BTH, steps)
        out: Tensor = hidden_BRH + self.mlp(self.post_attention_layernorm(hidden_BRH))
        return out


class EagleHead(DraftVocab):
    """EAGLE's head: maps features and embeddings to features.

    Row i of the first step reads the feature of token i and the embedding of token i + 1. It predicts the feature of
    token i + 1, from which the LM head predicts token i + 2. ``config`` is the shape of the layer; its ``vocab_size``
    is the target's.
    """

    def __init__(self, config: DecoderConfig, draft_vocab_size: int) -> None:
        super().__init__(draft_vocab_size, config.vocab_size)
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([EagleLayer(config)])

    def fuse(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Fuse ``features`` and ``embedded`` ``[..., H]`` into the layer's input ``[..., H]``."""
        fused: Tensor = self.fc(torch.cat((embedded, features), -1))
        return fused

    def step(self, features_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        """Return the features ``[B, R, H]`` of tokens ``embedded_BTH``; ``features_BTH``: the target's, or the previous
        step's."""
        out: Tensor = self.layers[0](self.fuse(features_BTH, embedded_BTH), steps)
        return out

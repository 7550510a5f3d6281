"""Kangaroo's adapter (Liu et al. 2024, arXiv:2404.18911), by which an early layer of the target predicts tokens.

It is one attention over the states that enter an early layer, with a norm before and a norm after it. The target's LM
head reads the result: the states up to token i predict token i + 1.

Shapes: B texts, T rows of each, R of them computed, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from parlay.heads.base import DraftVocab
from parlay.heads.layer import Attention, RmsNorm, Steps
from parlay.models.config import DecoderConfig


class KangarooAdapter(DraftVocab):
    """Maps states to inputs of the LM head; ``config`` is the target's shape."""

    def __init__(self, config: DecoderConfig, draft_vocab_size: int) -> None:
        super().__init__(draft_vocab_size, config.vocab_size)
        self.config = config
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_BTH: Tensor, steps: Steps) -> Tensor:
        """Run the adapter; returns ``[B, R, H]``."""
        mixed_BRH = steps.last(hidden_BTH) + self.self_attn(self.input_layernorm(hidden_BTH), steps)
        out: Tensor = self.norm(mixed_BRH)
        return out

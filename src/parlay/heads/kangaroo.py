"""Kangaroo's adapter (Liu et al. 2024, arXiv:2404.18911): an early layer of the target, taught to speak for the last.

One attention over the states that enter an early layer, a norm before it and one after it. The target's own LM head
reads the result: from the states up to token i follows token i + 1.

Shapes: B texts, T rows of each, R of them computed, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from parlay.heads.base import DraftVocab
from parlay.heads.layer import Attention, RmsNorm, Steps
from parlay.models.config import DecoderConfig


class KangarooAdapter(DraftVocab):
    """Pure: states in, what the LM head reads out. ``config`` is the target's shape."""

    def __init__(self, config: DecoderConfig, draft_vocab_size: int) -> None:
        super().__init__(draft_vocab_size, config.vocab_size)
        self.config = config
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_BTH: Tensor, steps: Steps) -> Tensor:
        """Returns ``[B, R, H]``."""
        mixed_BRH = steps.last(hidden_BTH) + self.self_attn(self.input_layernorm(hidden_BTH), steps)
        out: Tensor = self.norm(mixed_BRH)
        return out

"""The heads of Medusa (Cai et al. 2024, arXiv:2401.10774).

Each head drafts one token from the LM head's input: from token i's state, head k drafts token i + 2 + k. A head is one
residual block, x + SiLU(W x + b) with W and b initialized to zero, and an LM head of its own.

Shapes: K heads, H hidden, D draft tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule


class ResBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[..., H]`` to the same shape."""
        return x + F.silu(self.linear(x))


class MedusaHeads(SeveralHeadsModule):
    """All Medusa heads. From the state of token i, head k drafts token i + 2 + k."""

    def __init__(self, config: SeveralHeadsConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.heads)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[K, ..., D]`` for states ``hidden`` ``[..., H]``."""
        return torch.stack([self.head(place, hidden) for place in range(self.config.heads)])

    def head(self, place: int, hidden: Tensor) -> Tensor:
        """Return logits ``[..., D]`` of head ``place`` for states ``hidden`` ``[..., H]``."""
        logits: Tensor = self.lm_heads[place](self.blocks[place](hidden))
        return logits

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        return list(self.lm_heads.parameters())

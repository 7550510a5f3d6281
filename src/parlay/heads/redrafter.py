"""The recurrent drafter (Zhang et al. 2024, arXiv:2403.09919): a small network that runs once per drafted token.

Its state s follows the drafted tokens x: s = SiLU(W E(x) + U s), starting at 0. For each token, the head reads s and
the target's state, which does not change during a draft. The embedding E is the target's.

Shapes: H hidden, D draft tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule
from parlay.heads.medusa import ResBlock

_BLOCKS = 2


class ReDrafterHead(SeveralHeadsModule):
    """The recurrent network and its LM head; ``config.heads`` is the number of tokens that it was trained to draft."""

    def __init__(self, config: SeveralHeadsConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.input = nn.Linear(size, size, bias=False)
        self.recurrent = nn.Linear(size, size)
        self.blocks = nn.Sequential(*(ResBlock(2 * size) for _ in range(_BLOCKS)))
        self.lm_head = nn.Linear(2 * size, config.draft_vocab_size, bias=False)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the next state ``[..., H]`` from ``state`` and the drafted token's ``embedded``, both ``[..., H]``."""
        return F.silu(self.input(embedded) + self.recurrent(state))

    def read(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Return logits ``[..., D]`` for the target's states ``hidden`` and the network's ``state``, both ``[...,
        H]``."""
        logits: Tensor = self.lm_head(self.blocks(torch.cat((hidden, state), -1)))
        return logits

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        return list(self.lm_head.parameters())

"""The heads of blockwise parallel decoding (Stern et al. 2018, arXiv:1811.03115), and a model that rescores them.

Each head adds a feed-forward layer to the state that the target's LM head reads, and the same LM head reads the sum:
from the state of token i, head k guesses token i + 2 + k. Heads do not know each other's guesses, so neighbours often
repeat each other. Kim et al. 2024 (arXiv:2404.09221) let a small language model reorder the best guesses of each head:
here one that reads the last `WINDOW` tokens, or n-grams (`parlay.heads.ngrams`).

Shapes: H hidden, D tokens of the draft vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule

WINDOW = 4
"""Tokens that the rescoring model reads."""
_WIDTH = 256
"""Numbers in its layers."""


class BlockwiseHead(nn.Module):
    """x + W2 relu(W1 x), where W2 is zero at first."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, width)
        self.down = nn.Linear(width, size)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` ``[..., H]``."""
        out: Tensor = hidden + self.down(F.relu(self.up(hidden)))
        return out


class Rescorer(nn.Module):
    """A language model of two layers over the embeddings of the last `WINDOW` tokens."""

    def __init__(self, size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.read = nn.Linear(WINDOW * size, _WIDTH)
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.lm_head = nn.Linear(_WIDTH, draft_vocab_size)

    def forward(self, embedded: Tensor) -> Tensor:
        """Logits ``[..., D]`` of the token after those ``embedded`` ``[..., WINDOW * H]``, side by side."""
        hidden = F.silu(self.read(embedded))
        out: Tensor = self.lm_head(hidden + F.silu(self.layer(hidden)))
        return out


class BlockwiseHeads(SeveralHeadsModule):
    """Pure: states in, what the target's LM head reads out. ``width`` is that of the feed-forward layers."""

    def __init__(self, config: SeveralHeadsConfig, width: int) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(BlockwiseHead(config.hidden_size, width) for _ in range(config.heads))
        self.rescorer = Rescorer(config.hidden_size, config.draft_vocab_size)

    @staticmethod
    def of(held: HeadArtefact) -> BlockwiseHeads:
        """Without weights yet."""
        return BlockwiseHeads(SeveralHeadsConfig.of(held), held.layer.intermediate_size)

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        """None: all heads share the target's."""
        return []

"""The heads of blockwise parallel decoding (Stern et al. 2018, arXiv:1811.03115), and a model that rescores their
drafts.

Each head adds a feed-forward layer to the LM head's input, and the shared LM head reads the sum: from token i's state,
head k drafts token i + 2 + k. Heads don't know each other's drafts, so neighbouring ones often repeat each other. Kim
et al. 2024 (arXiv:2404.09221) reorder each head's best drafts by a small language model. Here this model reads the last
`WINDOW` tokens, or is an n-gram model (`parlay.heads.ngrams`).

Shapes: H hidden, D draft tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule

WINDOW = 4
"""Tokens that the rescoring model reads."""
_WIDTH = 256
"""Width of the rescoring model's layers."""


class BlockwiseHead(nn.Module):
    """x + W2 relu(W1 x), with W2 initialized to zero."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, width)
        self.down = nn.Linear(width, size)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` ``[..., H]`` to states of the same shape."""
        out: Tensor = hidden + self.down(F.relu(self.up(hidden)))
        return out


class Rescorer(nn.Module):
    """A two-layer language model over the embeddings of the last `WINDOW` tokens."""

    def __init__(self, size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.read = nn.Linear(WINDOW * size, _WIDTH)
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.lm_head = nn.Linear(_WIDTH, draft_vocab_size)

    def forward(self, embedded: Tensor) -> Tensor:
        """Return logits ``[..., D]`` of the next token.

        ``embedded`` ``[..., WINDOW * H]`` are the last tokens' embeddings, concatenated.
        """
        hidden = F.silu(self.read(embedded))
        out: Tensor = self.lm_head(hidden + F.silu(self.layer(hidden)))
        return out


class BlockwiseHeads(SeveralHeadsModule):
    """The heads and the rescoring model. ``width`` is the width of the heads' feed-forward layers."""

    def __init__(self, config: SeveralHeadsConfig, width: int) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(BlockwiseHead(config.hidden_size, width) for _ in range(config.heads))
        self.rescorer = Rescorer(config.hidden_size, config.draft_vocab_size)

    @staticmethod
    def of(artefact: HeadArtefact) -> BlockwiseHeads:
        """Make the module without its weights."""
        return BlockwiseHeads(SeveralHeadsConfig.of(artefact), artefact.layer.intermediate_size)

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        """Empty, as all heads share the target's LM head."""
        return []

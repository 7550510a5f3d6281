"""Trained inputs of the target itself: they stand where tokens will stand, so that it guesses several at once.

The target reads them behind a text in place of the next tokens, and what it says after each of them is a guess one
token further. It is not changed. PaSS (Monea et al. 2023, arXiv:2311.13581) calls them look-ahead embeddings, PPD (Chen
et al. 2024, arXiv:2405.18628) prompt tokens.

Shapes: M probes, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parlay.heads.draft_vocab import DraftVocab


class ProbeEmbeddings(DraftVocab):
    """``inputs_MH``: probe m stands in the place of token i + 1 + m, and the target guesses token i + 2 + m from it."""

    def __init__(self, first_MH: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__(draft_vocab_size, vocab_size)
        self.inputs_MH = nn.Parameter(torch.empty_like(first_MH, dtype=torch.float32).copy_(first_MH))

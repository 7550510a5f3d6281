"""Probes: trained inputs of the target that take the place of future tokens, so that it guesses several at once.

The target reads them after a text in place of the next tokens, and its prediction after each is a guess one token
further. The target itself is not changed. PaSS (Monea et al. 2023, arXiv:2311.13581) calls them look-ahead embeddings,
PPD (Chen et al. 2024, arXiv:2405.18628) prompt tokens, BiTA (Lin et al. 2024, arXiv:2401.12522) mask tokens.
Speculative Streaming (Bhendawade et al. 2024, arXiv:2402.11131) lets them begin in one of its last layers.

Shapes: M probes, H hidden; L layers, K key heads, P rows of a prefix, D head size; R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parlay.heads.base import DraftVocab


class ProbeEmbeddings(DraftVocab):
    """``inputs_MH``: probe m takes the place of token i + 1 + m, and there the target guesses token i + 2 + m."""

    def __init__(self, first_MH: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__(draft_vocab_size, vocab_size)
        self.inputs_MH = nn.Parameter(torch.empty_like(first_MH, dtype=torch.float32).copy_(first_MH))


class PrefixedProbes(ProbeEmbeddings):
    """BiTA's probes: ``prefix`` ``[L, 2, K, P, D]`` are keys and values that only the probes see, in every layer."""

    def __init__(self, first_MH: Tensor, prefix: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
        """``prefix`` ``[L, 2, K, P, D]`` are its initial values."""
        super().__init__(first_MH, draft_vocab_size, vocab_size)
        self.prefix = nn.Parameter(prefix)


class Streams(ProbeEmbeddings):
    """Stream m begins within the model, at the text's own state x there, as x + down(x) up + ``inputs_MH[m]``.

    So the map that all streams share is initialized to the identity.
    """

    def __init__(self, first_MH: Tensor, rank: int, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__(first_MH, draft_vocab_size, vocab_size)
        hidden = first_MH.shape[1]
        self.down_RH = nn.Parameter(torch.empty(rank, hidden).normal_(0, hidden**-0.5))
        self.up_RH = nn.Parameter(torch.zeros(rank, hidden))

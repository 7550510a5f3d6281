"""Trained inputs of the target itself: they stand where tokens will stand, so that it guesses several at once.

The target reads them behind a text in place of the next tokens, and what it says after each of them is a guess one
token further. It is not changed. PaSS (Monea et al. 2023, arXiv:2311.13581) calls them look-ahead embeddings, PPD (Chen
et al. 2024, arXiv:2405.18628) prompt tokens, BiTA (Lin et al. 2024, arXiv:2401.12522) mask tokens. Speculative
Streaming (Bhendawade et al. 2024, arXiv:2402.11131) lets them begin in one of its last layers.

Shapes: M probes, H hidden; L layers, K key heads of each, P rows of a prefix, D head size; R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parlay.heads.base import DraftVocab


class ProbeEmbeddings(DraftVocab):
    """``inputs_MH``: probe m stands in the place of token i + 1 + m, and the target guesses token i + 2 + m from it."""

    def __init__(self, first_MH: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__(draft_vocab_size, vocab_size)
        self.inputs_MH = nn.Parameter(torch.empty_like(first_MH, dtype=torch.float32).copy_(first_MH))


class PrefixedProbes(ProbeEmbeddings):
    """BiTA's: ``prefix`` ``[L, 2, K, P, D]`` are keys and values that the probes alone see, in every layer."""

    def __init__(self, first_MH: Tensor, prefix: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
        """``prefix`` ``[L, 2, K, P, D]``: what it begins as."""
        super().__init__(first_MH, draft_vocab_size, vocab_size)
        self.prefix = nn.Parameter(prefix)


class Streams(ProbeEmbeddings):
    """Stream m begins within the model, from the text's own state x there, as x + down(x) up + ``inputs_MH[m]``.

    So the map that all streams share begins as the identity.
    """

    def __init__(self, first_MH: Tensor, rank: int, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__(first_MH, draft_vocab_size, vocab_size)
        hidden = first_MH.shape[1]
        self.down_RH = nn.Parameter(torch.empty(rank, hidden).normal_(0, hidden**-0.5))
        self.up_RH = nn.Parameter(torch.zeros(rank, hidden))

"""Probes: trained inputs of the target that take the place of future tokens, so that it drafts several tokens at once.

The target reads probes after a text, and its prediction at each probe is a draft one token further. The target itself
does not change. PaSS (Monea et al. 2023, arXiv:2311.13581) calls them look-ahead embeddings, PPD (Chen et al. 2024,
arXiv:2405.18628) prompt tokens, BiTA (Lin et al. 2024, arXiv:2401.12522) mask tokens. In Speculative Streaming
(Bhendawade et al. 2024, arXiv:2402.11131), they start at one of the target's last layers and are called streams.

Shapes: M probes, H hidden; L layers, K key heads, P rows of a prefix, D head size; R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parlay.heads.base import DraftVocab


class ProbeEmbeddings(DraftVocab):
    """Probes ``inputs_MH``: after token i, probe m takes the place of token i + 1 + m, where the target drafts i + 2 +
    m."""

    def __init__(self, first_MH: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__(draft_vocab_size, vocab_size)
        self.inputs_MH = nn.Parameter(torch.empty_like(first_MH, dtype=torch.float32).copy_(first_MH))


class PrefixedProbes(ProbeEmbeddings):
    """BiTA's probes: only they attend to ``prefix`` ``[L, 2, K, P, D]``, trained keys and values in every layer."""

    def __init__(self, first_MH: Tensor, prefix: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
        """``prefix`` ``[L, 2, K, P, D]`` are its initial values."""
        super().__init__(first_MH, draft_vocab_size, vocab_size)
        self.prefix = nn.Parameter(prefix)


class Streams(ProbeEmbeddings):
    """Streams: stream m starts inside the target from the text's state x, as x + down(x) up + ``inputs_MH[m]``.

    All streams share the matrices ``down`` and ``up``, and ``up`` starts as zero.
    """

    def __init__(self, first_MH: Tensor, rank: int, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__(first_MH, draft_vocab_size, vocab_size)
        hidden = first_MH.shape[1]
        self.down_RH = nn.Parameter(torch.empty(rank, hidden).normal_(0, hidden**-0.5))
        self.up_RH = nn.Parameter(torch.zeros(rank, hidden))

"""Parallel heads of multi-token prediction (Gloeckle et al. 2024, arXiv:2404.19737).

Head k is one decoder layer on the target's states, beside the others, and guesses token i + 2 + k from the states up to
token i. It reads no tokens. All heads share one norm and the target's LM head.

The paper's heads stand on the layer before the last, because they are trained together with the model. On a target that
stays as it is they read the states that its LM head reads.

Shapes: B texts, T rows of each, R of them computed, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from parlay.heads.draft_vocab import DraftVocab
from parlay.heads.layer import Block, RmsNorm, Steps
from parlay.models.config import DecoderConfig


class ParallelHeads(DraftVocab):
    """Pure: states in, states out. ``config`` is the shape of a layer; its ``vocab_size`` is the target's."""

    def __init__(self, config: DecoderConfig, draft_vocab_size: int, heads: int) -> None:
        super().__init__(draft_vocab_size, config.vocab_size)
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(heads))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def head(self, place: int, hidden_BTH: Tensor, padding_B: Tensor | None = None, rows: int | None = None) -> Tensor:
        """What the LM head reads of one head, ``[B, R, H]``; see `Steps` for ``padding_B`` and ``rows``."""
        out: Tensor = self.norm(self.blocks[place](hidden_BTH, Steps(padding_B, rows)))
        return out

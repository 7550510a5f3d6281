"""A module of multi-token prediction as in DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

From the state of token i and the embedding of token i + 1, each normed, a projection and one decoder block make the
state from which token i + 2 follows. The embedding and the LM head are the target's; the norm before the LM head is the
module's own.

Shapes: B texts, T rows of each, R of them computed, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import DraftVocab
from parlay.heads.layer import Block, RmsNorm, Steps
from parlay.models.config import DecoderConfig

NORMED = "normed"
"""A setting: each depth reads the states of the one before after the module's last norm."""


class MtpModule(DraftVocab):
    """Pure: states and embeddings in, states out.

    One module is used for every depth, on its own states from the second on: with ``normed`` after its last norm, as
    published engines do. ``config`` is the shape of the block; its ``vocab_size`` is the target's.
    """

    def __init__(self, config: DecoderConfig, draft_vocab_size: int, *, normed: bool = False) -> None:
        super().__init__(draft_vocab_size, config.vocab_size)
        self._normed = normed
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm = RmsNorm(size, eps)
        self.hnorm = RmsNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = Block(config)
        self.norm = RmsNorm(size, eps)

    def fuse(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Fuse states ``hidden`` and ``embedded`` ``[..., H]`` into the block's input ``[..., H]``."""
        fused: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return fused

    def again(self, hidden: Tensor) -> Tensor:
        """Input of the next depth ``[..., H]``, from ``hidden`` ``[..., H]``, which `step` gave."""
        out: Tensor = self.norm(hidden) if self._normed else hidden
        return out

    @staticmethod
    def of(held: HeadArtefact) -> MtpModule:
        """Without weights yet."""
        return MtpModule(held.layer, int(held.settings["draft_vocab_size"]), normed=bool(held.settings.get(NORMED)))

    def step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        """States ``[B, R, H]`` before `norm`; ``hidden_BTH`` are the target's states or those of the step before."""
        out: Tensor = self.block(self.fuse(hidden_BTH, embedded_BTH), steps)
        return out

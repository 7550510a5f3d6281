"""The multi-token prediction module of DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

A projection and a decoder block map the state of token i and the embedding of token i + 1, both normed, to the state
that predicts token i + 2. Embedding and LM head are the target's. The norm before the LM head is the module's own.

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
"""Setting: each depth reads the previous depth's states after the module's final norm."""


class MtpModule(DraftVocab):
    """The module: maps states and embeddings to states.

    One module serves all depths. After the first depth it reads its own states; with ``normed``, after its final norm,
    as other engines do. ``config`` is the shape of the block; its ``vocab_size`` is the target's.
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
        """Return the next depth's input ``[..., H]`` from ``hidden`` ``[..., H]``, the result of `step`."""
        out: Tensor = self.norm(hidden) if self._normed else hidden
        return out

    @staticmethod
    def of(artefact: HeadArtefact) -> MtpModule:
        """Make the module without its weights."""
        return MtpModule(
            artefact.layer, int(artefact.settings["draft_vocab_size"]), normed=bool(artefact.settings.get(NORMED))
        )

    def step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        """Return the states ``[B, R, H]`` before the final norm; ``hidden_BTH``: the target's states, or the previous
        step's."""
        out: Tensor = self.block(self.fuse(hidden_BTH, embedded_BTH), steps)
        return out

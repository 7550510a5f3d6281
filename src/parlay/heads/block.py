"""A head that drafts a whole block of tokens in one forward: P-EAGLE (Hui et al. 2026, arXiv:2602.01469).

It has decoder layers over fused features of several target layers; the first is like EAGLE-3's. The row of the last
committed token drafts the block's first token, and each row after it the next token. These later rows are mask rows:
all read the same trained feature and the embedding of the same mask token, so no row waits for another's draft. PARD
(An et al. 2025, arXiv:2504.18583) does the same with a draft model.

Shapes: B texts, T rows of each, R of them computed, F numbers of all taps, H hidden, D draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import DraftVocab
from parlay.heads.eagle3 import Eagle3Layer, normed
from parlay.heads.layer import Block, RmsNorm, Steps
from parlay.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Sizes of a block head. ``layer`` is the shape of each of the ``layers`` layers; its ``vocab_size`` is the
    target's.

    ``taps`` are the target layers whose inputs are fused. The head can draft ``draft_vocab_size`` different tokens, and
    drafts ``length`` per forward. ``mask_id`` is a target token that does not occur in texts. ``normed``: see
    `Eagle3Config`.
    """

    layer: DecoderConfig
    draft_vocab_size: int
    taps: tuple[int, ...]
    layers: int
    length: int
    mask_id: int
    normed: bool = False

    @staticmethod
    def of(artefact: HeadArtefact) -> BlockConfig:
        """Read the head's config from a saved artefact."""
        settings = artefact.settings
        layers, length, mask_id = (int(settings[name]) for name in ("layers", "length", "mask_id"))
        size, taps = int(settings["draft_vocab_size"]), tuple(settings["taps"])
        return BlockConfig(artefact.layer, size, taps, layers, length, mask_id, normed(artefact))


class BlockHead(DraftVocab):
    """A block head: maps features and embeddings to hidden states and logits."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.draft_vocab_size, config.layer.vocab_size)
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.mask_hidden = nn.Parameter(torch.zeros(len(config.taps) * size))
        deeper = (Block(config.layer) for _ in range(1, config.layers))
        self.layers = nn.ModuleList([Eagle3Layer(config.layer, normed=config.normed), *deeper])
        self.norm = RmsNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse ``features`` ``[..., F]`` into hidden states ``[..., H]``."""
        fused: Tensor = self.fc(features)
        return fused

    def unrolled(
        self, fused_BTH: Tensor, embedded_BTH: Tensor, mask_H: Tensor, padding_B: Tensor | None, rows: int
    ) -> Iterator[Tensor]:
        """Yield, for each token of a block, the hidden states ``[B, R, H]`` for `logits`.

        Row i of ``fused_BTH`` holds the fused features of token i, row i of ``embedded_BTH`` the embedding of token i +
        1. Each of the last ``rows`` rows begins a block. ``mask_H`` is the embedding of the mask token.
        """
        last = len(self.layers) - 1
        steps = [Steps(padding_B, rows if place == last else None) for place in range(last + 1)]
        yield self._run(fused_BTH, embedded_BTH, steps)
        shape = (len(fused_BTH), min(rows, fused_BTH.shape[1]), len(mask_H))
        masked_BRH, mask_BRH = self.fuse(self.mask_hidden).expand(shape), mask_H.to(fused_BTH.dtype).expand(shape)
        for _ in range(1, self.config.length):
            yield self._run(masked_BRH, mask_BRH, steps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., D]`` of hidden states ``hidden`` ``[..., H]``."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def _run(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: list[Steps]) -> Tensor:
        hidden_BTH = self.layers[0](hidden_BTH, embedded_BTH, steps[0])
        for layer, own in zip(self.layers[1:], steps[1:], strict=True):
            hidden_BTH = layer(hidden_BTH, own)
        return hidden_BTH

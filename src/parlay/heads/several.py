"""Base of modules of several heads, each of which guesses one token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.draft_vocab import DraftVocab
from parlay.heads.layer import Block, RmsNorm, Steps
from parlay.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class SeveralHeadsConfig:
    """``hidden_size`` and ``vocab_size`` are the target's, ``heads`` is how many tokens are guessed."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    heads: int

    @staticmethod
    def of(held: HeadArtefact) -> SeveralHeadsConfig:
        """Read the head's config from a saved artefact."""
        settings: Mapping[str, Any] = held.settings
        size, vocab_size = held.layer.hidden_size, held.layer.vocab_size
        return SeveralHeadsConfig(size, vocab_size, int(settings["draft_vocab_size"]), int(settings["heads"]))


class SeveralHeadsModule(DraftVocab):
    """The base class of such modules."""

    def __init__(self, config: SeveralHeadsConfig) -> None:
        super().__init__(config.draft_vocab_size, config.vocab_size)
        self.config = config

    @property
    @abstractmethod
    def lm_head_weights(self) -> list[nn.Parameter]:
        """The output matrix ``[D, H]`` of each head."""


class ParallelHeads(DraftVocab):
    """Pure: states in, states out. ``config`` is the shape of a layer; its ``vocab_size`` is the target's."""

    def __init__(self, config: DecoderConfig, draft_vocab_size: int, heads: int) -> None:
        super().__init__(draft_vocab_size, config.vocab_size)
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(heads))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def head(self, place: int, hidden_BTH: Tensor, padding_B: Tensor | None = None, rows: int | None = None) -> Tensor:
        """Input of the LM head from one head, ``[B, R, H]``; see `Steps` for ``padding_B`` and ``rows``."""
        out: Tensor = self.norm(self.blocks[place](hidden_BTH, Steps(padding_B, rows)))
        return out

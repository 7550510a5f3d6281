"""What modules of several heads share, each of which guesses one token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.draft_vocab import DraftVocab


@dataclass(frozen=True, slots=True)
class SeveralHeadsConfig:
    """``hidden_size`` and ``vocab_size`` are the target's, ``heads`` is how many tokens are guessed."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    heads: int

    @staticmethod
    def of(held: HeadArtefact) -> SeveralHeadsConfig:
        """That of an artefact."""
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

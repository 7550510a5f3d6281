"""Base classes of heads: with a draft vocabulary, with several heads for one token each, or with parallel layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.layer import Block, RmsNorm, Steps
from parlay.models.config import DecoderConfig

NEWEST = 512
"""Outputs for the newest tokens of the texts, of heads that have the target's LM head."""
_PANEL = 64  # a multiple of all kernels' panels


class DraftVocab(nn.Module):
    """Base class of heads that draft from ``size`` of the target's ``vocab_size`` tokens."""

    d2t: Tensor
    """Maps draft ids to target ids as an offset: target = draft + d2t[draft]."""
    t2d: Tensor
    """Bool ``[V]``: whether a target token is in the draft vocabulary."""

    def __init__(self, size: int, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))

    def set_draft_vocab(self, ids_D: Tensor) -> None:
        """Set the draft vocabulary: ``ids_D``, int64 and rising, are the target's tokens that the head can propose."""
        self.d2t.copy_(ids_D - torch.arange(len(ids_D)))
        self.t2d.zero_()[ids_D] = True

    @property
    def draft_ids(self) -> Tensor:
        """The target id of each draft id, int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def draft_ids(d2t_D: Tensor) -> Tensor:
    """The target id of each draft id, int64; ``d2t_D`` are offsets."""
    return d2t_D + torch.arange(len(d2t_D), device=d2t_D.device)


def with_newest(ids_D: Tensor, vocab_size: int) -> tuple[Tensor, int]:
    """Add `NEWEST` slots to a draft vocabulary ``ids_D``; the second result is the first slot, which begins a panel.

    At first they have the lowest other ids, which most tokenizers give to the most frequent tokens. Without room for
    all slots below ``vocab_size``, there are none.
    """
    first = len(ids_D) + -len(ids_D) % _PANEL
    count = first + NEWEST
    if count > vocab_size:
        return ids_D, len(ids_D)
    others_V = torch.ones(vocab_size, dtype=torch.bool)
    others_V[ids_D] = False
    return torch.cat([ids_D, others_V.nonzero()[: count - len(ids_D), 0]]), first


@dataclass(frozen=True, slots=True)
class SeveralHeadsConfig:
    """Sizes of several heads. ``hidden_size`` and ``vocab_size`` are the target's; each of ``heads`` drafts one
    token."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    heads: int

    @staticmethod
    def of(artefact: HeadArtefact) -> SeveralHeadsConfig:
        """Read the head's config from a saved artefact."""
        settings: Mapping[str, Any] = artefact.settings
        size, vocab_size = artefact.layer.hidden_size, artefact.layer.vocab_size
        return SeveralHeadsConfig(size, vocab_size, int(settings["draft_vocab_size"]), int(settings["heads"]))


class SeveralHeadsModule(DraftVocab):
    """Base class of modules with several heads that draft one token each."""

    def __init__(self, config: SeveralHeadsConfig) -> None:
        super().__init__(config.draft_vocab_size, config.vocab_size)
        self.config = config

    @property
    @abstractmethod
    def lm_head_weights(self) -> list[nn.Parameter]:
        """The output matrix ``[D, H]`` of each head."""


class ParallelHeads(DraftVocab):
    """Decoder layers side by side, each of which maps the target's states to states that predict one token.

    ``config`` is the shape of a layer; its ``vocab_size`` is the target's.
    """

    def __init__(self, config: DecoderConfig, draft_vocab_size: int, heads: int) -> None:
        super().__init__(draft_vocab_size, config.vocab_size)
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(heads))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def head(self, place: int, hidden_BTH: Tensor, padding_B: Tensor | None = None, rows: int | None = None) -> Tensor:
        """Return the LM head's input ``[B, R, H]`` from head ``place``; for ``padding_B`` and ``rows`` see `Steps`."""
        out: Tensor = self.norm(self.blocks[place](hidden_BTH, Steps(padding_B, rows)))
        return out

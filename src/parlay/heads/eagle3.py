"""The head of EAGLE-3 (Li et al. 2025, arXiv:2503.01840).

One decoder layer over fused features of several target layers. Its attention reads the token's embedding and the
features side by side, each with its own norm. An LM head of its own gives logits over a reduced draft vocabulary.
Parameters are named as in published checkpoints.

Shapes: B texts, T rows of each, H hidden, D draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import DraftVocab
from parlay.heads.layer import Attention, Mlp, RmsNorm, Steps
from parlay.models.config import DecoderConfig

NORMED = "norm_before_residual"
"""Setting: the first layer's residual connection starts from its normed hidden states."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 head. ``layer`` is the shape of its decoder layer; its ``vocab_size`` is the target's.

    ``taps`` are the target layers whose inputs are fused. The head can draft ``draft_vocab_size`` different tokens.
    With ``normed``, the layer's residual connection starts from its normed hidden states; published configs call this
    ``norm_before_residual``.
    """

    layer: DecoderConfig
    draft_vocab_size: int
    taps: tuple[int, ...]
    normed: bool = False

    @staticmethod
    def of(artefact: HeadArtefact) -> Eagle3Config:
        """Read the head's config from a saved artefact."""
        settings = artefact.settings
        return Eagle3Config(
            artefact.layer, int(settings["draft_vocab_size"]), tuple(settings["taps"]), normed(artefact)
        )


def normed(artefact: HeadArtefact) -> bool:
    """Whether the first layer's residual connection starts from normed hidden states."""
    return bool(artefact.settings.get(NORMED))


class Eagle3Layer(nn.Module):
    """EAGLE-3's only decoder layer; with ``normed`` its residual connection starts from its normed hidden states."""

    def __init__(self, config: DecoderConfig, *, normed: bool = False) -> None:
        super().__init__()
        self._normed = normed
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RmsNorm(size, eps)
        self.input_layernorm = RmsNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = Mlp(config)

    def forward(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        """Run the layer on fused features, or on its own outputs of the previous step. Returns ``[B, R, H]``."""
        normed_BTH = self.hidden_norm(hidden_BTH)
        beside = torch.cat((self.input_layernorm(embedded_BTH), normed_BTH), -1)
        hidden_BRH = steps.last(normed_BTH if self._normed else hidden_BTH) + self.self_attn(beside, steps)
        out: Tensor = hidden_BRH + self.mlp(self.post_attention_layernorm(hidden_BRH))
        return out


class Eagle3Head(DraftVocab):
    """Maps features and embeddings to hidden states and logits.

    Row i of the first step reads the features of token i and the embedding of token i + 1, and predicts token i + 2.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config.draft_vocab_size, config.layer.vocab_size)
        size = config.layer.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.midlayer = Eagle3Layer(config.layer, normed=config.normed)
        self.norm = RmsNorm(size, config.layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse ``features`` ``[..., taps * H]`` into hidden states ``[..., H]``."""
        fused: Tensor = self.fc(features)
        return fused

    def step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        """Run a step; returns hidden states ``[B, R, H]`` for `logits` and for the next step."""
        out: Tensor = self.midlayer(hidden_BTH, embedded_BTH, steps)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., D]`` of hidden states ``hidden`` ``[..., H]``."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

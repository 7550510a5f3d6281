"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv:2404.19124): heads in sequence that update one state.

Step k combines the state with the embedding of the token drafted before: s_k = GELU(LN(W_k s_{k-1} + c E(x))), where
s_0 is the target's normed state. LM head k reads s_k. The embedding is the speculator's own, initialized with the
target's.

Shapes: K steps, H hidden, I numbers of a state, D draft tokens, V target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule

FORM = "form"
"""Setting: the fields of a `SpeculatorForm`."""
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SpeculatorForm:
    """The variants of published files: ``inner`` is the size of states.

    ``rms``: norms are RMS norms. ``tied``: see `MlpSpeculator`. ``scaled``: the target's state is normed first.
    """

    inner: int
    rms: bool = False
    tied: bool = True
    scaled: bool = True


class ShiftedRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * weight + bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Norm ``x`` ``[..., size]``."""
        return F.rms_norm(x, self.weight.shape, self.weight, _EPS) + self.bias


class MlpSpeculator(SeveralHeadsModule):
    """The speculator: step k drafts token i + 2 + k from the target's state of token i.

    All steps share one embedding, and all but the first share one matrix, like ``tie_weights`` in the published code,
    unless ``form`` says otherwise.
    """

    def __init__(self, config: SeveralHeadsConfig, form: SpeculatorForm | None = None) -> None:
        super().__init__(config)
        self._form = form = form or SpeculatorForm(config.hidden_size)
        size, places = form.inner, range(config.heads)
        more = () if form.tied else places[1:]
        self.emb = nn.Embedding(config.vocab_size, size)
        self.more_embs = nn.ModuleList(nn.Embedding(config.vocab_size, size) for _ in more)
        self.first = nn.Linear(config.hidden_size, size, bias=False)
        self.later = nn.Linear(size, size, bias=False)
        self.more_later = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in more[1:])
        self.norms = nn.ModuleList(ShiftedRmsNorm(size) if form.rms else nn.LayerNorm(size) for _ in places)
        self.lm_heads = nn.ModuleList(nn.Linear(size, config.draft_vocab_size, bias=False) for _ in places)
        share = 0.5 ** (0.5 / config.heads)  # of a state that is left after a step: half of its variance after all
        self._scale = ((1 - share**2) * size / 2) ** 0.5 / share

    @staticmethod
    def of(artefact: HeadArtefact) -> MlpSpeculator:
        """Make the module without its weights."""
        settings = artefact.settings.get(FORM)
        return MlpSpeculator(SeveralHeadsConfig.of(artefact), None if settings is None else SpeculatorForm(**settings))

    def begin(self, hidden: Tensor) -> Tensor:
        """Return the state ``[..., H]`` before the first step, from the target's states ``hidden`` ``[..., H]``."""
        if not self._form.scaled:
            return hidden
        norm = F.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) if self._form.rms else None
        return (F.layer_norm(hidden, hidden.shape[-1:]) if norm is None else norm) / 2**0.5

    def advance(self, step: int, state: Tensor, ids: Tensor) -> Tensor:
        """Return the next state ``[..., I]`` from ``state`` ``[..., I]`` (first ``[..., H]``) and tokens ``ids`` int64
        ``[...]``."""
        mix: nn.Module = self.later if step else self.first
        if step > 1 and self.more_later:
            mix = self.more_later[step - 2]
        emb: nn.Module = self.more_embs[step - 1] if step and self.more_embs else self.emb
        out: Tensor = F.gelu(self.norms[step](mix(state) + self._scale * emb(ids)))
        return out

    def read(self, step: int, state: Tensor) -> Tensor:
        """Return logits ``[..., D]`` for ``state`` ``[..., I]``."""
        logits: Tensor = self.lm_heads[step](state)
        return logits

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        return list(self.lm_heads.parameters())

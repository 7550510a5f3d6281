"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv:2404.19124): heads in a row that carry a state along.

Step k mixes the state with the embedding of the token drafted before it: s_k = GELU(LN(W_k s_{k-1} + c E(x))), where
s_0 is the target's normed state. Head k reads s_k. The embedding is the speculator's own, and starts as the target's.

Shapes: K steps, H hidden, D tokens of the draft vocabulary, V tokens of the target.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.several import SeveralHeadsConfig, SeveralHeadsModule


class MlpSpeculator(SeveralHeadsModule):
    """Pure: states and tokens in, states and logits out. Step k guesses token i + 2 + k from the state of token i.

    All steps share one embedding and the matrix after the first, as with ``tie_weights`` in the published code.
    """

    def __init__(self, config: SeveralHeadsConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.emb = nn.Embedding(config.vocab_size, size)
        self.first = nn.Linear(size, size, bias=False)
        self.later = nn.Linear(size, size, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(config.heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, config.draft_vocab_size, bias=False) for _ in range(config.heads))
        share = 0.5 ** (0.5 / config.heads)  # of a state that is left after a step: half of its variance after all
        self._scale = ((1 - share**2) * size / 2) ** 0.5 / share

    def begin(self, hidden: Tensor) -> Tensor:
        """The state ``[..., H]`` before the first step, of the target's states ``hidden`` ``[..., H]``."""
        return F.layer_norm(hidden, hidden.shape[-1:]) / 2**0.5

    def advance(self, step: int, state: Tensor, ids: Tensor) -> Tensor:
        """The next state ``[..., H]``, of ``state`` ``[..., H]`` and tokens ``ids`` int64 ``[...]``."""
        mix = self.later if step else self.first
        out: Tensor = F.gelu(self.norms[step](mix(state) + self._scale * self.emb(ids)))
        return out

    def read(self, step: int, state: Tensor) -> Tensor:
        """Logits ``[..., D]`` of ``state`` ``[..., H]``."""
        logits: Tensor = self.lm_heads[step](state)
        return logits

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        return list(self.lm_heads.parameters())

"""The heads of Hydra (Ankner et al. 2024, arXiv:2402.05109): Medusa's, each of which knows the tokens before its own.

Head k reads the state of token i beside the embeddings of tokens i + 1 to i + 1 + k, and guesses token i + 2 + k.

Shapes: K heads, H hidden, D tokens of the draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.several import SeveralHeadsConfig, SeveralHeadsModule


class HydraHead(nn.Module):
    """The state plus an MLP of state and embeddings, which adds nothing at first; then a vocabulary of its own."""

    def __init__(self, config: SeveralHeadsConfig, place: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.mix = nn.Linear((place + 2) * size, size)
        self.out = nn.Linear(size, size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[..., D]`` of states ``hidden`` ``[..., H]`` and ``embedded`` ``[..., K * H]``, side by side."""
        mixed = F.silu(self.mix(torch.cat((hidden, embedded), -1)))
        out: Tensor = self.lm_head(hidden + self.out(mixed))
        return out


class HydraHeads(SeveralHeadsModule):
    """All heads, of which head k reads k + 1 embeddings."""

    def __init__(self, config: SeveralHeadsConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(HydraHead(config, place) for place in range(config.heads))

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        return [head.get_parameter("lm_head.weight") for head in self.heads]

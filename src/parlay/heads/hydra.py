"""The heads of Hydra (Ankner et al. 2024, arXiv:2402.05109): like Medusa's, but each reads the tokens drafted before
it.

Head k reads the state of token i and the embeddings of tokens i + 1 to i + 1 + k, and drafts token i + 2 + k. Hydra++
has deeper heads, which read the states after one more decoder layer, the prefix layer.

Shapes: K heads, B texts, T rows of each, H hidden, D draft tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import SeveralHeadsConfig, SeveralHeadsModule
from parlay.heads.layer import Block, Steps, add_nothing
from parlay.models.config import DecoderConfig

PUBLISHED = "published"
"""Setting: the number of layers of the paper's code, if the heads have that form."""
_PLUS_LAYERS = 4
"""Matrices per head of Hydra++ without its LM head; Hydra's heads have two."""


class HydraHead(nn.Module):
    """Adds to the state an MLP of state and embeddings, which starts as zero; an LM head of its own reads the sum."""

    def __init__(self, config: SeveralHeadsConfig, place: int, layers: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.mix = nn.Linear((place + 2) * size, size)
        self.inner = nn.ModuleList(nn.Linear(size, size) for _ in range(layers - 2))
        self.out = nn.Linear(size, size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return logits ``[..., D]`` for states ``hidden`` ``[..., H]`` and concatenated embeddings ``embedded``
        ``[..., K * H]``."""
        mixed = F.silu(self.mix(torch.cat((hidden, embedded), -1)))
        for layer in self.inner:
            mixed = mixed + F.silu(layer(mixed))
        out: Tensor = self.lm_head(hidden + self.out(mixed))
        return out


class PublishedHydraHead(nn.Module):
    """A head as in the paper's code: one residual block reduces the input to H, and a second one runs repeatedly."""

    def __init__(self, config: SeveralHeadsConfig, place: int, layers: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.mix = nn.Linear((place + 2) * size, size)
        self.shorten = nn.Linear((place + 2) * size, size)
        self.inner = nn.Linear(size, size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size)
        self._layers = layers

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return logits ``[..., D]`` for states ``hidden`` ``[..., H]`` and concatenated embeddings ``embedded``
        ``[..., K * H]``."""
        read = torch.cat((hidden, embedded), -1)
        mixed = self.shorten(read) + F.silu(self.mix(read))
        for _ in range(1, self._layers):
            mixed = mixed + F.silu(self.inner(mixed))
        out: Tensor = self.lm_head(mixed)
        return out


class HydraHeads(SeveralHeadsModule):
    """All heads; head k reads k + 1 embeddings. ``plus``: the shape of Hydra++'s prefix layer; None: Hydra.

    ``published``: the number of layers of heads as in the paper's code; 0: Parlay's own form.
    """

    def __init__(self, config: SeveralHeadsConfig, plus: DecoderConfig | None = None, *, published: int = 0) -> None:
        super().__init__(config)
        layers = 2 if plus is None else _PLUS_LAYERS
        self.prefix = None if plus is None else Block(plus)
        self.heads = nn.ModuleList(
            PublishedHydraHead(config, place, published) if published else HydraHead(config, place, layers)
            for place in range(config.heads)
        )
        if self.prefix is not None:
            add_nothing(self.prefix)

    @staticmethod
    def of(artefact: HeadArtefact) -> HydraHeads:
        """Make the module without its weights."""
        plus, published = (
            artefact.layer if artefact.settings.get("plus") else None,
            int(artefact.settings.get(PUBLISHED, 0)),
        )
        return HydraHeads(SeveralHeadsConfig.of(artefact), plus, published=published)

    def read(self, hidden_BTH: Tensor, padding_B: Tensor | None = None, rows: int | None = None) -> Tensor:
        """The heads' inputs ``[B, R, H]`` from the target's states; for ``padding_B`` and ``rows`` see `Steps`."""
        steps = Steps(padding_B, rows)
        out: Tensor = steps.last(hidden_BTH) if self.prefix is None else self.prefix(hidden_BTH, steps)
        return out

    @property
    def lm_head_weights(self) -> list[nn.Parameter]:
        return [head.get_parameter("lm_head.weight") for head in self.heads]

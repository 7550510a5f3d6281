"""Facts about a target that recipes need: its shape, its embedding and LM head, and the layers to tap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from parlay.heads.artefact import same_rows, witness_ids
from parlay.models.config import DecoderConfig
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_weights, read_config
from parlay.models.weights.fused import as_tensor, rows_of
from parlay.models.weights.shapes import Weight
from parlay.train.data.features import Featured


@dataclass(frozen=True)
class Target:
    """A decoder of the Llama lineage, opened from its checkpoint. Tensors are moved to ``device`` when used."""

    config: DecoderConfig
    weights: dict[str, Weight]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def named(cls, model: str, device: torch.device | None = None) -> Target:
        """Open a target by name, folder or GGUF file. Raises ParlayError if the native decoder can't run it."""
        found = resolve(model)
        config = read_config(found)
        return cls(config, load_weights(found, config), device or torch.device("cpu"))

    @cached_property
    def embedding_VH(self) -> Tensor:
        """The embedding, bfloat16."""
        return self.tensor("model.embed_tokens.weight").to(torch.bfloat16)

    @cached_property
    def tied(self) -> bool:
        """Whether the LM head equals the embedding. A GGUF file may hold both in different formats, so some rows are
        compared."""
        if "lm_head.weight" not in self.weights:
            return True
        some = witness_ids(self.config.vocab_size)
        return same_rows(self.embedding_VH.cpu()[some], rows_of(self.weights["lm_head.weight"], some))

    @cached_property
    def head_VH(self) -> Tensor:
        """The LM head's weight, in bfloat16."""
        has_own = "lm_head.weight" in self.weights
        return self.tensor("lm_head.weight").to(torch.bfloat16) if has_own else self.embedding_VH

    def logits(self, read: Tensor) -> Tensor:
        """Apply the target's scale and cap, if any, to the LM head's products ``read``, of any shape."""
        scaled, cap = read * self.config.logit_scale, self.config.logit_cap
        return cap * (scaled / cap).tanh() if cap else scaled

    def tensor(self, name: str) -> Tensor:
        """Return a weight in float32, dequantized if need be."""
        with torch.device("cpu"):  # where the file's blocks are
            return as_tensor(self.weights[name], torch.float32).to(self.device)

    def usual_taps(self) -> tuple[int, ...]:
        """Return EAGLE-3's taps: the inputs of layers 2, L / 2 and L - 3; fewer if a shallow target's coincide."""
        layers = self.config.num_layers
        return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))

    def stored_layers(self) -> tuple[int, ...]:
        """Return the layers whose inputs are stored as features: the usual taps, then L for the states that the LM head
        reads."""
        return (*self.usual_taps(), self.config.num_layers)


def common_tokens(texts: Iterable[Featured], size: int, vocab_size: int) -> Tensor:
    """Return the ``size`` tokens that occur most often in the answers of these texts, int64, ascending.

    If fewer occur, low ids follow, because tokenizers number common tokens first.
    """
    counts_V = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        counts_V += torch.bincount(text.ids_T[text.answer :].long(), minlength=vocab_size).to(counts_V.device)
    counts_V += torch.arange(vocab_size, 0, -1, dtype=torch.float64) * 1e-12
    return counts_V.topk(min(size, vocab_size)).indices.sort().values

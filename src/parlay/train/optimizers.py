"""Muon for the matrices inside the layers, AdamW for embeddings and norms."""

from __future__ import annotations

import torch
from torch import nn

from parlay.train.muon import Muon

MUON_RATE = 0.012
EMBEDDING_RATE = 0.01
NORM_RATE = 3e-3
WEIGHT_DECAY = 0.03


def adam(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW without decay."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def muon(matrices: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) with a little decay."""
    return Muon(matrices, lr=rate, weight_decay=WEIGHT_DECAY)


class Optimizers:
    """Optimizers that step together, with one factor on all peak rates."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        matrices = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
        embeddings = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." not in name]
        norms = [parameter for _, parameter in named if parameter.ndim == 1]
        self.parts = [
            (muon(matrices, MUON_RATE), MUON_RATE),
            (adam(embeddings, EMBEDDING_RATE), EMBEDDING_RATE),
            (adam(norms, NORM_RATE), NORM_RATE),
        ]

    def step(self, factor: float) -> None:
        """One update at ``factor`` times the peak rates; clears the gradients."""
        for optimizer, peak in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = factor * peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """State of all."""
        return [optimizer.state_dict() for optimizer, _ in self.parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Restores what `state_dict` gave."""
        for (optimizer, _), state in zip(self.parts, states, strict=True):
            optimizer.load_state_dict(state)

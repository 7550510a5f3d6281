"""Muon (Jordan et al. 2024): momentum whose matrix is brought to equal singular values before each step.

PyTorch's own always computes this in bfloat16, which is many times slower than float32 on CPUs without instructions
for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parlay.train.precision import half_pays

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """For matrices. A step moves each singular direction by ``lr``, more for tall matrices, and decays weights."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the matrices that have gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group["lr"], group["weight_decay"])

    def _update(self, weight: nn.Parameter, rate: float, decay: float) -> None:
        assert weight.grad is not None
        state = self.state[weight]
        momentum = state.setdefault("momentum", torch.zeros_like(weight))
        momentum.lerp_(weight.grad, 1 - _MOMENTUM)
        ahead = weight.grad.lerp(momentum, _MOMENTUM)
        rows, columns = weight.shape
        weight.mul_(1 - rate * decay)
        weight.add_(orthogonal(ahead), alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix_NM: Tensor) -> Tensor:
    """The matrix with singular values near 1, by Newton and Schulz's iteration."""
    tall = matrix_NM.shape[0] > matrix_NM.shape[1]
    found: Tensor = (matrix_NM.T if tall else matrix_NM) / matrix_NM.norm().clamp(min=1e-7)
    found = found.bfloat16() if half_pays() else found
    for _ in range(_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), found, beta=_A)
    return (found.T if tall else found).to(matrix_NM.dtype)

"""Divergences of a student's distribution from its teacher's, for each row: the losses of distillation.

p is the teacher's distribution and q the student's, both given as logarithms ``[N, V]``. Results are in nats, except
for total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Computes the divergence ``[N]`` from the teacher's and the student's log-probabilities. Gradients reach the
student's."""


def forward_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p || q): the student covers all that the teacher might say (Hinton et al. 2015)."""
    p_NV = log_p_NV.exp()
    return _dot(p_NV, log_p_NV) - _dot(p_NV, log_q_NV)


def reverse_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(q || p): the student keeps to what the teacher says most (MiniLLM, Gu et al. 2023)."""
    return _dot(log_q_NV.exp(), log_q_NV - log_p_NV)


def jensen_shannon(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Half of each of KL(p || m) and KL(q || m), where m is the mean of both (GKD, Agarwal et al. 2023)."""
    log_m_NV = torch.logaddexp(log_p_NV, log_q_NV) - math.log(2)
    return (_dot(log_p_NV.exp(), log_p_NV - log_m_NV) + _dot(log_q_NV.exp(), log_q_NV - log_m_NV)) / 2


def total_variation(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Half the sum of |p - q|: the share of sampled drafts that are rejected (DistillSpec, Zhou et al. 2023)."""
    return (log_p_NV.exp() - log_q_NV.exp()).abs().sum(-1) / 2


def _dot(left_NV: Tensor, right_NV: Tensor) -> Tensor:
    summed: Tensor = torch.linalg.vecdot(left_NV, right_NV)
    return summed


FORWARD = "forward"
DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {FORWARD: forward_kl, "reverse": reverse_kl, "jsd": jensen_shannon, "tvd": total_variation}
)


def product_type() -> torch.dtype:
    """Return the number type of products here. A weight that is used many times is converted to it once."""
    kind = torch.get_default_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


class SummedInParts(torch.autograd.Function):
    """Sums a loss over rows whose logits are too wide to hold all at once: it computes a few rows at a time.

    It computes gradients together with the loss, so no logits are kept. A frozen head gets no gradients.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_NH: Tensor,
        head_VH: Tensor,
        loss: Callable[[Tensor, slice], Tensor],
        rows: int,
    ) -> Tensor:
        """Sum the loss. ``loss`` is called with logits ``[rows, V]`` and the slice of rows they belong to, and
        returns their sum."""
        learns: bool = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        total, head_grad_VH = torch.zeros(()), torch.zeros_like(head_VH) if learns else torch.zeros(0)
        grads: list[Tensor] = []
        head = head_VH.detach().to(product_type()).requires_grad_(learns)
        for begin in range(0, len(hidden_NH), rows):
            part = slice(begin, begin + rows)
            with torch.enable_grad():
                hidden = hidden_NH[part].detach().requires_grad_()
                value = loss(F.linear(hidden, head), part)
                grad, *of_head = torch.autograd.grad(value, (hidden, head) if learns else (hidden,))
            total += value.detach()
            grads.append(grad)
            if learns:
                head_grad_VH += of_head[0]
        ctx.save_for_backward(torch.cat(grads) if grads else torch.zeros_like(hidden_NH), head_grad_VH)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, scale: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Scale the gradients by ``scale`` ``[]``, the gradient of the sum."""
        hidden_NH, head_VH = ctx.saved_tensors  # type: ignore[attr-defined]
        return scale * hidden_NH, scale * head_VH if len(head_VH) else None, None, None

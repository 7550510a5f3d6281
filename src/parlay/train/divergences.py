"""Divergences of a student's distributions from its teacher's, which distillation minimizes.

p is the teacher's distribution and q the student's, both given as log-probabilities ``[N, V]``. Results are in nats,
except for total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Maps the teacher's and the student's log-probabilities to the divergence ``[N]``; gradients flow to the student's."""


def forward_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Return KL(p || q): it makes the student cover all that the teacher may say (Hinton et al. 2015)."""
    p_NV = log_p_NV.exp()
    return _dot(p_NV, log_p_NV) - _dot(p_NV, log_q_NV)


def reverse_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Return KL(q || p): it makes the student say only what is likely for the teacher (MiniLLM, Gu et al. 2023)."""
    return _dot(log_q_NV.exp(), log_q_NV - log_p_NV)


def jensen_shannon(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Return the mean of KL(p || m) and KL(q || m), where m is the mean of p and q (GKD, Agarwal et al. 2023)."""
    log_m_NV = torch.logaddexp(log_p_NV, log_q_NV) - math.log(2)
    return (_dot(log_p_NV.exp(), log_p_NV - log_m_NV) + _dot(log_q_NV.exp(), log_q_NV - log_m_NV)) / 2


def total_variation(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Return half the sum of |p - q|, the rejection rate of drafts sampled from q (DistillSpec, Zhou et al. 2023)."""
    return (log_p_NV.exp() - log_q_NV.exp()).abs().sum(-1) / 2


def _dot(left_NV: Tensor, right_NV: Tensor) -> Tensor:
    summed: Tensor = torch.linalg.vecdot(left_NV, right_NV)
    return summed


FORWARD = "forward"
DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {FORWARD: forward_kl, "reverse": reverse_kl, "jsd": jensen_shannon, "tvd": total_variation}
)


def product_type() -> torch.dtype:
    """Return the dtype of matrix products here; callers convert a weight to it once instead of for each product."""
    kind = torch.get_default_device().type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


class SummedInParts(torch.autograd.Function):
    """The sum of a loss over rows of logits, computed a few rows at a time, as the logits of all rows need too much
    memory.

    The forward pass computes the gradients too, so no logits are kept. An LM head that is not trained gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_NH: Tensor,
        head_VH: Tensor,
        loss: Callable[[Tensor, slice], Tensor],
        rows: int,
    ) -> Tensor:
        """Return the sum ``[]``. ``loss`` maps logits ``[R, V]`` of up to ``rows`` rows, and the slice of these rows,
        to its sum."""
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
        """Scale the gradients that `forward` computed; ``scale`` ``[]`` is the gradient of the sum."""
        hidden_NH, head_VH = ctx.saved_tensors  # type: ignore[attr-defined]
        return scale * hidden_NH, scale * head_VH if len(head_VH) else None, None, None

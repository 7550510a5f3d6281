"""Attention masks for training on masked positions, and the choice of the positions to mask.

Shapes: B rows of T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def everybody(length: int) -> Tensor:
    """Return ``[T, T]``: all positions attend to each other, as in LLaDA."""
    return torch.ones(length, length, dtype=torch.bool)


def causal(length: int) -> Tensor:
    """Return ``[T, T]``: a position attends to itself and to earlier ones."""
    return everybody(length).tril()


def groups_of(length: int, size: int, offset: int | Tensor = 0) -> Tensor:
    """Return each position's group, ``[T]``: groups have ``size`` positions, and group 0 begins at ``offset``.

    With one offset per row, ``[B, 1]``, the result is ``[B, T]``.
    """
    return (torch.arange(length) - offset).div(size, rounding_mode="floor")


def by_groups(group_T: Tensor) -> Tensor:
    """Return ``[T, T]``: a position attends to its own group and to earlier ones. If each row has its own groups,
    the mask is ``[B, T, T]``."""
    return group_T[..., None, :] <= group_T[..., :, None]


def two_streams(group_T: Tensor, *, causal: bool = False) -> Tensor:
    """Return the mask ``[2 T, 2 T]`` of T noisy positions, then the same positions clean (BD3-LM, Arriola et al. 2025,
    arXiv:2503.09573).

    If each row has its own groups, ``[B, T]``, the mask is ``[B, 2 T, 2 T]``.

    A noisy position attends to the noisy positions of its group, and to the clean positions of earlier groups. So one
    forward has every group after the clean text before it. A clean position attends only to clean positions: to earlier
    ones if ``causal``, otherwise to its whole group as well.
    """
    keys_1T, rows_T1 = group_T[..., None, :], group_T[..., :, None]
    same, before = keys_1T == rows_T1, keys_1T < rows_T1
    clean = torch.ones_like(same).tril() if causal else same | before
    nothing = torch.zeros_like(same)
    return torch.cat([torch.cat([same, before], -1), torch.cat([nothing, clean], -1)], -2)


def spread_rates(count: int, draw: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return ``[count]`` mask rates between ``low`` and ``high``: evenly spaced from a drawn start, in a drawn order.

    The mean over a batch varies less with such rates than with independently drawn ones.
    """
    even = (torch.rand(1, generator=draw) + torch.arange(count) / count) % 1.0
    return low + (high - low) * even[torch.randperm(count, generator=draw)]


def masked_at(rate_BT: Tensor, may_BT: Tensor, draw: torch.Generator) -> Tensor:
    """Return bool ``[B, T]``: the positions to mask, each at its own rate, among those that may be masked."""
    return (torch.rand(rate_BT.shape, generator=draw) < rate_BT) & may_BT

"""Attention masks for training on masked places, and the choice of the places to mask.

Shapes: B rows, T tokens of each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def everybody(length: int) -> Tensor:
    """``[T, T]``: all places attend to each other, as in LLaDA."""
    return torch.ones(length, length, dtype=torch.bool)


def causal(length: int) -> Tensor:
    """``[T, T]``: a place attends to itself and those before it."""
    return everybody(length).tril()


def groups_of(length: int, size: int, offset: int | Tensor = 0) -> Tensor:
    """The group of each place, ``[T]``: groups have ``size`` places, and number 0 begins at ``offset``.

    ``[B, T]`` of rows with an offset each, ``[B, 1]``.
    """
    return (torch.arange(length) - offset).div(size, rounding_mode="floor")


def by_groups(group_T: Tensor) -> Tensor:
    """``[T, T]``: a place attends to its own group and those before it; ``[B, T, T]`` where each row has groups of its
    own."""
    return group_T[..., None, :] <= group_T[..., :, None]


def two_streams(group_T: Tensor, *, causal: bool = False) -> Tensor:
    """``[2 T, 2 T]``: T noisy places, then the same places clean (BD3-LM, Arriola et al. 2025, arXiv:2503.09573).

    Where each row has groups of its own, ``[B, T]``, the mask is ``[B, 2 T, 2 T]``.

    A noisy place attends to the noisy places of its group, and to the clean places of the groups before it. One forward
    so holds every group after the clean text before it. A clean place attends to clean places alone: those before it if
    ``causal``, else its own group's as well.
    """
    keys_1T, rows_T1 = group_T[..., None, :], group_T[..., :, None]
    same, before = keys_1T == rows_T1, keys_1T < rows_T1
    clean = torch.ones_like(same).tril() if causal else same | before
    nothing = torch.zeros_like(same)
    return torch.cat([torch.cat([same, before], -1), torch.cat([nothing, clean], -1)], -2)


def spread_rates(count: int, draw: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """``[count]`` mask rates between ``low`` and ``high``, evenly apart from a drawn start, in a drawn order.

    The mean of a batch varies less with such rates than with rates drawn independently.
    """
    even = (torch.rand(1, generator=draw) + torch.arange(count) / count) % 1.0
    return low + (high - low) * even[torch.randperm(count, generator=draw)]


def masked_at(rate_BT: Tensor, may_BT: Tensor, draw: torch.Generator) -> Tensor:
    """Bool ``[B, T]``: the places to mask, each at its own rate, among those that may be masked."""
    return (torch.rand(rate_BT.shape, generator=draw) < rate_BT) & may_BT

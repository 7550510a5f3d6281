"""Who sees whom while masked places are trained, and which places are masked.

Shapes: B rows, T tokens of each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def everybody(length: int) -> Tensor:
    """``[T, T]``: all places see each other, as in LLaDA."""
    return torch.ones(length, length, dtype=torch.bool)


def causal(length: int) -> Tensor:
    """``[T, T]``: a place sees those before it and itself."""
    return everybody(length).tril()


def groups_of(length: int, size: int, offset: int | Tensor = 0) -> Tensor:
    """The group of each place, ``[T]``: groups have ``size`` places, and number 0 begins at ``offset``.

    ``[B, T]`` of rows with an offset each, ``[B, 1]``.
    """
    return (torch.arange(length) - offset).div(size, rounding_mode="floor")


def by_groups(group_T: Tensor) -> Tensor:
    """``[T, T]``: a place sees its own group and those before it; ``[B, T, T]`` of rows with groups of their own."""
    return group_T[..., None, :] <= group_T[..., :, None]


def two_streams(group_T: Tensor, *, causal: bool = False) -> Tensor:
    """``[2 T, 2 T]``: T noisy places, then the same places clean (BD3-LM, Arriola et al. 2025, arXiv:2503.09573).

    Of rows with groups of their own, ``[B, T]``, it is ``[B, 2 T, 2 T]``.

    A noisy place sees the noisy ones of its group, and the clean ones of the groups before it. So one forward holds
    every group after the clean text before it. Clean places see clean ones alone: those before them if ``causal``, else
    their own group's as well.
    """
    keys_1T, rows_T1 = group_T[..., None, :], group_T[..., :, None]
    same, before = keys_1T == rows_T1, keys_1T < rows_T1
    clean = torch.ones_like(same).tril() if causal else same | before
    nothing = torch.zeros_like(same)
    return torch.cat([torch.cat([same, before], -1), torch.cat([nothing, clean], -1)], -2)


def spread_rates(count: int, draw: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """``[count]`` mask rates between ``low`` and ``high``, evenly apart from a drawn start, in a drawn order.

    Such rates make the mean of a batch vary less than rates that are drawn each by itself.
    """
    even = (torch.rand(1, generator=draw) + torch.arange(count) / count) % 1.0
    return low + (high - low) * even[torch.randperm(count, generator=draw)]


def masked_at(rate_BT: Tensor, may_BT: Tensor, draw: torch.Generator) -> Tensor:
    """Bool ``[B, T]``: places that are masked, each by its own rate, among those that may be."""
    return (torch.rand(rate_BT.shape, generator=draw) < rate_BT) & may_BT

"""Attention masks for training on masked places, and the choice of places to mask.

Shapes: B rows, T tokens of each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def everybody(length: int) -> Tensor:
    """Return the mask ``[T, T]`` by which all places attend to each other, as in LLaDA."""
    return torch.ones(length, length, dtype=torch.bool)


def causal(length: int) -> Tensor:
    """Return the mask ``[T, T]`` by which a place attends to itself and the places before it."""
    return everybody(length).tril()


def groups_of(length: int, size: int, offset: int | Tensor = 0) -> Tensor:
    """Return each place's group number, ``[T]``. Groups have ``size`` places; group 0 begins at place ``offset``.

    If ``offset`` is ``[B, 1]``, one per row, the result is ``[B, T]``.
    """
    return (torch.arange(length) - offset).div(size, rounding_mode="floor")


def by_groups(group_T: Tensor) -> Tensor:
    """Return the mask ``[T, T]`` by which a place attends to its own group and the groups before it.

    If each row has its own groups, ``[B, T]``, the mask is ``[B, T, T]``.
    """
    return group_T[..., None, :] <= group_T[..., :, None]


def two_streams(group_T: Tensor, *, causal: bool = False) -> Tensor:
    """Return the mask ``[2 T, 2 T]`` for T noisy places followed by the same places clean (BD3-LM, arXiv:2503.09573).

    A noisy place attends to the noisy places of its own group and to the clean places of earlier groups. So one forward
    predicts every group given the clean text before it. A clean place attends only to clean places: with ``causal`` to
    itself and those before it, otherwise to all of its own and earlier groups. If each row has its own groups, ``[B,
    T]``, the mask is ``[B, 2 T, 2 T]``.
    """
    keys_1T, rows_T1 = group_T[..., None, :], group_T[..., :, None]
    same, before = keys_1T == rows_T1, keys_1T < rows_T1
    clean = torch.ones_like(same).tril() if causal else same | before
    nothing = torch.zeros_like(same)
    return torch.cat([torch.cat([same, before], -1), torch.cat([nothing, clean], -1)], -2)


def spread_rates(count: int, draw: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Draw ``[count]`` mask rates, evenly spaced between ``low`` and ``high``, in random order.

    Their mean varies less between batches than that of independent rates.
    """
    even = (torch.rand(1, generator=draw) + torch.arange(count) / count) % 1.0
    return low + (high - low) * even[torch.randperm(count, generator=draw)]


def masked_at(rate_BT: Tensor, may_BT: Tensor, draw: torch.Generator) -> Tensor:
    """Draw the places to mask, bool ``[B, T]``, each with its own rate, among the places where ``may_BT`` is true."""
    return (torch.rand(rate_BT.shape, generator=draw) < rate_BT) & may_BT

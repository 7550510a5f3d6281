"""Writing the weights of attention heads by hand: how sharp they are, what a group stores, where a head looks."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention


def sharpen(attention: Qwen3Attention, weight: float) -> None:
    """Sets the norms of queries and keys: their product is at most ``weight**2 * sqrt(head size)``."""
    attention.q_norm.weight.fill_(weight)
    attention.k_norm.weight.fill_(weight)


def set_group(attention: Qwen3Attention, group: int, key: Tensor, value: Tensor) -> None:
    """Writes the key and value rows of one group of heads."""
    shared = slice(group * attention.head_dim, (group + 1) * attention.head_dim)
    attention.k_proj.weight[shared] = key
    attention.v_proj.weight[shared] = value


def look_back(attention: Qwen3Attention, head: int, back: float, pairs: Tensor, turn: Tensor) -> None:
    """Makes the query of ``head`` a constant that meets the constant key best ``back`` positions before."""
    size, angle = attention.head_dim, back * turn
    rows = slice(head * size, (head + 1) * size)
    attention.q_proj.weight[rows] = 0
    attention.q_proj.weight[rows, 0] = 2 * torch.cat([pairs * angle.cos(), -pairs * angle.sin()])
    attention.o_proj.weight[:, rows] = 0


def constant_key(pairs: Tensor, width: int) -> Tensor:
    """Key rows that are the same everywhere, in the first dimension of each of the ``pairs``."""
    key = torch.zeros(2 * len(pairs), width)
    key[: len(pairs), 0] = 2 * pairs
    return key


def between(turn: Tensor, limits: tuple[float, float]) -> Tensor:
    """1 for the pairs that turn at a speed within ``limits``, else 0."""
    return ((turn > limits[0]) & (turn < limits[1])).float()


def padded(rows: Tensor, size: int) -> Tensor:
    """``rows``, and rows of zeros up to ``size``."""
    return torch.cat([rows, rows.new_zeros(size - len(rows), rows.shape[1])])


def orthonormal_rows(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Orthonormal rows in a random direction."""
    square = torch.randn(columns, columns, generator=draw)
    orthonormal: Tensor = torch.linalg.qr(square).Q
    return orthonormal[:rows]


def orthonormal_columns(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Orthonormal rows or columns, whichever are fewer: inner products survive as well as the size allows."""
    return orthonormal_rows(rows, columns, draw) if rows <= columns else orthonormal_rows(columns, rows, draw).T


def turned(rows: Tensor, back: float, turn: Tensor) -> Tensor:
    """The rows of a query that meets the same key best ``back`` positions before: rotary positions turn it back."""
    first, second = rows.chunk(2)
    cos, sin = (back * turn).cos()[:, None], (back * turn).sin()[:, None]
    return torch.cat([first * cos + second * sin, second * cos - first * sin])

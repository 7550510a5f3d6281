"""One text's cached keys and values, in a buffer of its own that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parlay.cache.buffers import zeros

BLOCK = 16
"""Tokens per block, the unit of prefix reuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one token takes, and how the slots of a sequence are laid out.

    A buffer has a multiple of ``stride`` slots, zeros where nothing was written, so that attention may read up to the
    next multiple beyond the last key. So many slots are a page, the unit of memory.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    stride: int = BLOCK

    @property
    def slot_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def padded(self, tokens: int) -> int:
        """Slots of the pages that hold so many tokens."""
        return -(-tokens // self.stride) * self.stride


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows of the last forward that are not committed: pending tokens at ``start``, nodes from ``nodes_at`` on."""

    pending: tuple[int, ...]
    nodes: tuple[int, ...]
    nodes_at: int


@dataclass(slots=True, eq=False)
class Entry:
    """Tokens and their rows ``[layers, 2, kv_heads, slots, D]``, keys then values: slot i belongs to token i.

    ``hashes`` name its full blocks from the front.
    """

    salt: str
    rows: Tensor
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    staged: Staged | None = None

    @property
    def slots(self) -> int:
        return self.rows.shape[3]

    def commit(self, path: Sequence[int]) -> None:
        """Append the staged pending tokens and the nodes of ``path``, moved to follow them."""
        assert self.staged is not None, "keep without a forward"
        staged, self.staged = self.staged, None
        first = len(self.tokens) + len(staged.pending)
        sources = [staged.nodes_at + node for node in path]
        moved = [index for index, source in enumerate(sources) if source != first + index]
        if moved:
            begin = moved[0]
            taken = torch.tensor(sources[begin:], device=self.rows.device)
            self.rows[:, :, :, first + begin : first + len(path)] = self.rows.index_select(3, taken)
        self.tokens.extend(staged.pending)
        self.tokens.extend(staged.nodes[node] for node in path)

    def copy_rows(self, source: Entry, length: int) -> None:
        """Become a copy of the first ``length`` tokens of ``source``; slots must be there."""
        self.rows[:, :, :, :length] = source.rows[:, :, :, :length]
        self.tokens = source.tokens[:length]


def new_entry(shape: Shape, salt: str = "") -> Entry:
    size = (shape.num_layers, 2, shape.num_kv_heads, 0, shape.head_dim)
    return Entry(salt, zeros(size, shape.dtype, shape.device))


def resize(entry: Entry, slots: int) -> None:
    """Move to a buffer of ``slots`` slots, which must hold the committed rows."""
    layers, two, heads, _, head_dim = entry.rows.shape
    length = len(entry.tokens)
    moved = zeros((layers, two, heads, slots, head_dim), entry.rows.dtype, entry.rows.device)
    moved[:, :, :, :length] = entry.rows[:, :, :, :length]
    entry.rows = moved

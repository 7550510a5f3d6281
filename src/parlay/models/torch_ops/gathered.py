"""A sequence's pages copied into one buffer, for torch's operators. After the forward its new rows are copied back.

This copies all that is cached of each sequence in every forward. The compiled decoder reads pages where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.cache import BLOCK, Rows


@dataclass(frozen=True, slots=True)
class Gathered:
    """``buffer`` ``[layers, 2, kv_heads, slots, D]``, keys then values, zeros where nothing is cached.

    Committed and pending rows have the slots of their positions, nodes those from ``nodes_at`` on; the slots between
    are free for the forward.
    """

    buffer: Tensor
    nodes_at: int


@contextmanager
def gathered(rows: Rows, *, gap: int, stride: int) -> Iterator[Gathered]:
    """A copy of what is cached, with room for new rows, its slots a multiple of ``stride``; new rows are put back.

    Nodes stand ``gap`` slots behind the pending rows.
    """
    known, root_end = rows.start + rows.base, rows.start + rows.pending
    nodes, there = len(rows.tree), max(0, rows.base - rows.pending)
    nodes_at, first = root_end + gap, min(known, root_end)
    slots = -(-(nodes_at + nodes) // stride) * stride
    shape = rows.table[0].rows.shape
    buffer = rows.table[0].rows.new_zeros(*shape[:3], slots, shape[4])
    pages = [page.rows for page in rows.table][: -(-known // BLOCK)]
    if pages:
        past = torch.cat(pages, 3)
        buffer[:, :, :, :first] = past[:, :, :, :first]
        buffer[:, :, :, nodes_at : nodes_at + there] = past[:, :, :, root_end : root_end + there]
    yield Gathered(buffer, nodes_at)
    _put(rows, first, buffer[:, :, :, first:root_end])
    _put(rows, root_end + there, buffer[:, :, :, nodes_at + there : nodes_at + nodes])


def _put(rows: Rows, slot: int, new: Tensor) -> None:
    """Write ``new`` ``[layers, 2, kv_heads, T, D]`` to the slots from ``slot`` on."""
    done = 0
    while done < new.shape[3]:
        number, first = divmod(slot + done, BLOCK)
        count = min(BLOCK - first, new.shape[3] - done)
        rows.table[number].rows[:, :, :, first : first + count] = new[:, :, :, done : done + count]
        done += count

"""The places of a step's rows as tensors, made once per step and read by all layers.

Cached keys and values stay in their pages. A layer gathers those that it needs from the slabs while it runs. The
compiled decoder reads the pages in place.

Steps with CUDA graphs have their rows in fixed memory: see `parlay.models.torch_ops.fixed_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from parlay.cache import BLOCK, Rows
from parlay.cache.pages import PageTable, pages_for
from parlay.models.forward import LayerPages
from parlay.types import trees


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages or slots ``numbers`` (int64 ``[n]``) of a slab ``memory`` ``[layers, 2, kv_heads, pages, BLOCK, D]``."""

    memory: Tensor
    numbers: Tensor

    def slots(self, layer: int) -> Tensor:
        """A view of the keys and values in all slots of one layer, ``[2, kv_heads, pages * BLOCK, D]``."""
        return self.memory[layer].flatten(2, 3)


class _Table(NamedTuple):
    """The ``pages`` of known slots, and the slots to which rows are written."""

    pages: tuple[_Part, ...]
    targets: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one sequence: int64 ``positions`` ``[T]``, the largest of which is ``last``, and the number of
    ``known`` slots before them."""

    positions: Tensor
    last: int
    known: int
    dtype: torch.dtype
    """The type of cached keys and values."""
    _layers: LayerPages
    _tables: tuple[_Table, ...]
    """One table for layers that see all keys, one for layers with recent pages if there are any."""

    def read(self, layer: int) -> Tensor | None:
        """Keys and values of the known slots ``[2, kv_heads, known, D]``; None if there are none."""
        if not self.known:
            return None
        table, place = self._tables[self._layers.recent[layer]], self._layers.place[layer]
        parts = [part.memory[place].index_select(2, part.numbers) for part in table.pages]
        pages = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return pages.flatten(2, 3)[:, :, : self.known]

    def write(self, layer: int, new: Tensor) -> None:
        """Write the rows' keys and values ``new`` ``[2, kv_heads, T, D]`` to their slots."""
        table, place, done = self._tables[self._layers.recent[layer]], self._layers.place[layer], 0
        for part in table.targets:
            count = len(part.numbers)
            part.slots(place).index_copy_(2, part.numbers, new[:, :, done : done + count])
            done += count


def uncached(count: int, device: torch.device) -> StepRows:
    """``count`` rows at the beginning of a text that does not go on, so that their keys and values are not stored."""
    positions = torch.arange(count, device=device)
    return StepRows(positions, count - 1, 0, torch.float32, LayerPages.alike(1), (_Table((), ()),))


def step_rows(place: Rows, device: torch.device, layers: LayerPages) -> StepRows:
    """Make the tensors of one sequence's rows."""
    numbers = positions(place)
    tables = [place.table, *([] if place.recent is None else [place.recent])]
    return StepRows(
        positions=torch.tensor(numbers, device=device),
        last=max(numbers),
        known=place.start + place.base,
        dtype=place.table[0].memory.dtype,
        _layers=layers,
        _tables=tuple(_table(place, table, device) for table in tables),
    )


def _table(place: Rows, table: PageTable, device: torch.device) -> _Table:
    known = place.start + place.base
    slots = range(known, place.start + place.end)
    pages = [(table[number].memory, table[number].number) for number in range(pages_for(known))]
    targets = [(table[slot // BLOCK].memory, table[slot // BLOCK].number * BLOCK + slot % BLOCK) for slot in slots]
    return _Table(_parts(pages, device), _parts(targets, device))


def _parts(numbers: Sequence[tuple[Tensor, int]], device: torch.device) -> tuple[_Part, ...]:
    """Group consecutive numbers of the same slab."""
    return tuple(
        _Part(found[0][0], torch.tensor([number for _, number in found], device=device))
        for _, group in groupby(numbers, key=lambda pair: id(pair[0]))
        for found in [list(group)]
    )


def positions(place: Rows) -> list[int]:
    """The positions of the rows to run."""
    root, own = place.start + place.pending - 1, place.places
    if trees.is_chain(place.tree):
        found = list(range(place.start + place.base, place.start + place.end))
    else:
        found = [*range(place.start, root + 1), *(root + depth for depth in trees.depths(place.tree))][place.base :]
    return [*found[: len(found) - len(own)], *(root + distance for distance in own)]

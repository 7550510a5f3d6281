"""The places of a step's rows as one tensor of numbers for kernels, so that one transfer per step is enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from parlay.cache import BLOCK, Rows
from parlay.cache.pages import PageTable, pages_for
from parlay.models.torch_ops.step_rows import positions
from parlay.types import trees

__all__ = ["BLOCK", "FIELDS", "PlacedRows", "RowNumbers", "RowTable"]

FIELDS = 11
"""The numbers of a row: its own position; the bound of the positions it sees; the first hidden position and the one
after the last; the position from which its path lists slots; the start of that list, and the starts of its page
addresses for layers that see all keys and for the others; its own slot; the pitches of both kinds of pages, in
numbers."""
_BOUND = 1
_LISTS = range(5, 8)
"""The fields with starts of lists."""

_NO_TREE = 1 << 40
"""A position beyond any text: below it, slots equal positions."""


class PlacedRows(NamedTuple):
    """Rows of one sequence; the first one to run is row ``begin`` of the batch."""

    begin: int
    place: Rows


class _Sight(NamedTuple):
    """A row's position, the bound of the positions it sees, and the nodes of its path if the tree branches."""

    own: int
    bound: int
    path: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The `FIELDS` of T rows, their ``numbers`` in the batch, and the ``lists`` into which fields point.

    Keys and queries are rotated by ``positions``.
    """

    numbers: list[int]
    positions: list[int]
    fields: list[list[int]]
    lists: list[int]

    @staticmethod
    def of(placed: Sequence[PlacedRows]) -> RowNumbers:
        """Lay out the rows of one or more sequences."""
        numbers, turned, fields, lists = list[int](), list[int](), list[list[int]](), list[int]()
        for begin, place in placed:
            whole = len(lists)
            lists += _addresses(place.table, place)
            recent = len(lists)
            lists += [] if place.recent is None else _addresses(place.recent, place)
            pitches = _pitch(place.table), 0 if place.recent is None else _pitch(place.recent)
            behind_root = place.start + place.pending
            for slot, (own, bound, path) in enumerate(_sights(place), place.start + place.base):
                path_from = behind_root if path else _NO_TREE
                fields.append([own, bound, *place.hidden, path_from, len(lists), whole, recent, slot, *pitches])
                lists += [behind_root + node for node in path]
            numbers += range(begin, begin + place.end - place.base)
            turned += positions(place)
        return RowNumbers(numbers, turned, fields, lists)

    @property
    def last(self) -> int:
        """The largest position of a row."""
        return max(self.positions)

    @property
    def bound(self) -> int:
        """The first position that no row sees."""
        return max([row[_BOUND] for row in self.fields])

    def filled(self, count: int, place: Rows) -> RowNumbers:
        """The same rows padded to ``count``, each with the only row of ``place``."""
        more = count - len(self.fields)
        if more <= 0:
            return self
        one = RowNumbers.of([PlacedRows(0, place)])
        behind = len(self.lists)
        (fields,) = one.fields
        shifted = [number + behind if field in _LISTS else number for field, number in enumerate(fields)]
        first = self.numbers[-1] + 1
        return RowNumbers(
            [*self.numbers, *range(first, first + more)],
            self.positions + one.positions * more,
            self.fields + [shifted] * more,
            self.lists + one.lists,
        )

    def flat(self) -> list[int]:
        """The positions, all fields, and the lists, concatenated."""
        return [*self.positions, *chain.from_iterable(self.fields), *self.lists]


@dataclass(frozen=True, slots=True)
class RowTable:
    """The ``fields`` (int64 ``[T, FIELDS]``) of T rows on the device, and the int64 ``lists`` into which they point.

    The rows' ``numbers`` in the batch are a slice or int64 ``[T]``, like their ``positions``. No row sees the position
    ``bound``.
    """

    numbers: slice | Tensor
    positions: Tensor
    fields: Tensor
    lists: Tensor
    bound: int

    @staticmethod
    def of(rows: RowNumbers, device: torch.device) -> RowTable:
        """Copy rows to the device."""
        numbers, count = rows.numbers, len(rows.fields)
        flat = torch.tensor([*rows.flat(), *numbers], dtype=torch.int64).to(device)
        sizes = [count, count * FIELDS, len(rows.lists), count]
        positions_T, fields, lists, numbers_T = torch.split(flat, sizes)
        adjacent = numbers[-1] - numbers[0] == count - 1
        return RowTable(
            slice(numbers[0], numbers[-1] + 1) if adjacent else numbers_T,
            positions_T,
            fields.view(-1, FIELDS),
            lists,
            rows.bound,
        )


def _addresses(table: PageTable, place: Rows) -> list[int]:
    return [page.address for page in islice(table, pages_for(place.start + place.end))]


def _pitch(table: PageTable) -> int:
    return table.pitch // table[0].rows.itemsize


def _sights(place: Rows) -> Iterator[_Sight]:
    """The rows to run, in order."""
    sights = list(_apart(place))
    for nodes in trees.last_chains(place.tree, place.together):  # each row sees what the last row of its chain sees
        last = sights[place.pending + nodes.stop - 1]
        for row in range(place.pending + nodes.start, place.pending + nodes.stop):
            sights[row] = last._replace(own=sights[row].own)
    return islice(sights, place.base, None)


def _apart(place: Rows) -> Iterator[_Sight]:
    """All rows, as if no row outside of blocks saw later ones."""
    start, behind_root, end = place.start, place.start + place.pending, place.start + place.end
    if place.block:
        yield from (_Sight(at, min(end, at - at % place.block + place.block)) for at in range(start, end))
    elif trees.is_chain(place.tree):
        yield from (_Sight(at, at + 1) for at in range(start, end))
    else:
        yield from (_Sight(at, at + 1) for at in range(start, behind_root))
        for node in range(len(place.tree)):
            path = trees.path_to(place.tree, node)
            yield _Sight(behind_root + len(path) - 1, behind_root + len(path), path)

"""Where the rows of a whole step lie, as one tensor of numbers that kernels read: one transfer to the device a step."""

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

__all__ = ["BLOCK", "FIELDS", "PITCH", "PlacedRows", "RowTable"]

FIELDS = 10
"""Numbers of a row: its own position; the bound of those that it sees; the first hidden position and the one after the
last; the position from which its path lists slots; where that list begins, and the addresses of its pages; its own
slot; the pitch of its pages of either kind, in numbers."""
PITCH = 8

_NO_TREE = 1 << 40
"""A position that no text has: up to there, slots are positions."""


class PlacedRows(NamedTuple):
    """Rows of one sequence, of which the first that runs has the number ``begin`` in the batch."""

    begin: int
    place: Rows


class _Sight(NamedTuple):
    """The position of a row, the bound of those that it sees, and the nodes of its path where the tree branches."""

    own: int
    bound: int
    path: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RowTable:
    """``fields`` int64 ``[T, FIELDS]`` of T rows, slots that their ``paths`` list, and addresses of their ``pages``.

    The first of these are of layers that see all keys, the second of the others, where the model has such pages. The
    rows' ``numbers`` in the batch are a slice, or int64 ``[T]``. Their ``positions``, int64 ``[T]``, reach up to
    ``last``, and no row sees the position ``bound``.
    """

    numbers: slice | Tensor
    positions: Tensor
    last: int
    bound: int
    fields: Tensor
    paths: Tensor
    pages: tuple[Tensor, Tensor]

    @staticmethod
    def of(placed: Sequence[PlacedRows], device: torch.device) -> RowTable:
        """Lay out the rows of one sequence or more."""
        fields, paths, whole, recent = list[list[int]](), list[int](), list[int](), list[int]()
        for _, place in placed:
            pages = len(whole)
            whole += _addresses(place.table, place)
            recent += [] if place.recent is None else _addresses(place.recent, place)
            pitches = _pitch(place.table), 0 if place.recent is None else _pitch(place.recent)
            behind_root = place.start + place.pending
            for slot, (own, bound, path) in enumerate(_sights(place), place.start + place.base):
                path_from = behind_root if path else _NO_TREE
                fields.append([own, bound, *place.hidden, path_from, len(paths), pages, slot, *pitches])
                paths += [behind_root + node for node in path]
        numbers = [begin + row for begin, place in placed for row in range(place.end - place.base)]
        turned = [position for _, place in placed for position in positions(place)]
        parts = [*chain.from_iterable(fields)], paths, whole, recent, numbers, turned
        flat = torch.tensor([*chain.from_iterable(parts)], dtype=torch.int64).to(device)
        fields_N, paths_P, whole_A, recent_A, numbers_T, turned_T = torch.split(flat, [len(part) for part in parts])
        adjacent = numbers[-1] - numbers[0] == len(numbers) - 1
        fields_TF = fields_N.view(-1, FIELDS)
        return RowTable(
            numbers=slice(numbers[0], numbers[-1] + 1) if adjacent else numbers_T,
            positions=turned_T,
            last=max(turned),
            bound=max(bound for _, bound, *_ in fields),
            fields=fields_TF,
            paths=paths_P,
            pages=(whole_A, recent_A),
        )


def _addresses(table: PageTable, place: Rows) -> list[int]:
    return [page.address for page in islice(table, pages_for(place.start + place.end))]


def _pitch(table: PageTable) -> int:
    return table.pitch // table[0].rows.itemsize


def _sights(place: Rows) -> Iterator[_Sight]:
    """The rows that run, in order."""
    sights = list(_apart(place))
    for nodes in trees.last_chains(place.tree, place.together):  # each row sees what the last one of its chain does
        last = sights[place.pending + nodes.stop - 1]
        for row in range(place.pending + nodes.start, place.pending + nodes.stop):
            sights[row] = last._replace(own=sights[row].own)
    return islice(sights, place.base, None)


def _apart(place: Rows) -> Iterator[_Sight]:
    """All rows, as if none saw those after it but where they are in blocks."""
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

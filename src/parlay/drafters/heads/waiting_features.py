"""The target's features that wait until a head's rows read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.types import PickedRows

_LONG = 256  # a tensor of more rows is not kept for a few of them


class WaitingFeatures:
    """The features of the next ``rows`` rows, in pieces, none of them empty.

    A few rows of a long tensor are copied, so that they don't keep the memory of the others.
    """

    __slots__ = ("pieces", "rows")

    def __init__(self) -> None:
        self.pieces: list[PickedRows] = []
        self.rows = 0

    def add(self, piece: PickedRows) -> None:
        """Append the features of further rows."""
        self.pieces.append(_shortened(piece))
        self.rows += len(piece.rows)

    def first(self, rows: int) -> list[PickedRows]:
        """The features of the first ``rows`` rows; there must be so many."""
        found, left = list[PickedRows](), rows
        for all_NF, picked in self.pieces:
            if left >= len(picked):
                found.append(PickedRows(all_NF, picked))
            elif left > 0:
                found.append(PickedRows(all_NF, picked[:left]))
            left -= len(picked)
        return found

    def drop(self, rows: int) -> None:
        """Drop the first ``rows`` rows; there must be so many."""
        kept = list[PickedRows]()
        self.rows -= rows
        for piece in self.pieces:
            all_NF, picked = piece
            if rows >= len(picked):
                rows -= len(picked)
                continue
            if rows:
                piece, rows = PickedRows(all_NF, picked[rows:]), 0
            kept.append(_shortened(piece))
        self.pieces = kept

    def cut(self, rows: int) -> None:
        """Keep only the first ``rows`` rows."""
        if rows < self.rows:
            self.pieces, self.rows = self.first(rows), rows


def _shortened(piece: PickedRows) -> PickedRows:
    """The piece; if it is a small part of a long tensor, a copy of it, which frees the rest."""
    count, whole = len(piece.rows), piece.all_NF.shape[0]
    if whole <= _LONG or 2 * count > whole:
        return piece
    return PickedRows(piece.gathered().clone(), range(count))


def as_one(pieces: Sequence[PickedRows]) -> Tensor:
    """The rows of the pieces, which are not none, as one tensor ``[K, F]``."""
    gathered = [piece.gathered() for piece in pieces]
    return gathered[0] if len(gathered) == 1 else torch.cat(gathered)

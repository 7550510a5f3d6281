"""Hidden states that enter some layers, for rows of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class PickedRows(NamedTuple):
    """Some ``rows`` of ``all_NF``, in this order. They are copied only when they are gathered."""

    all_NF: Tensor
    rows: Sequence[int]

    def gathered(self) -> Tensor:
        """The rows as one tensor ``[K, F]``. Rows that follow each other are not copied."""
        return self.all_NF[_index(self.rows)]


class TappedStates(Mapping[int, "Tensor"]):
    """The states ``[K, H]`` that enter each of L ``layers``. A row of ``states`` has those of all layers, ``[L * H]``.

    So neither a choice of rows nor the states of all layers side by side needs an operation.
    """

    __slots__ = ("layers", "states")

    def __init__(self, layers: tuple[int, ...], states: PickedRows) -> None:
        self.layers, self.states = layers, states

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        each = self.states.all_NF.shape[1] // len(self.layers)
        first = self.layers.index(layer) * each
        return self.states.gathered()[:, first : first + each]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def rows_of(states: Mapping[int, Tensor], layers: tuple[int, ...], rows: Sequence[int]) -> Mapping[int, Tensor]:
    """Pick rows of the states ``[N, H]`` that enter each of ``layers``."""
    if isinstance(states, TappedStates) and states.layers == layers:
        own = states.states
        return TappedStates(layers, PickedRows(own.all_NF, [own.rows[row] for row in rows]))
    return {layer: states[layer][_index(rows)] for layer in layers}


def side_by_side(states: Mapping[int, Tensor], layers: Sequence[int]) -> PickedRows:
    """The states ``[K, H]`` that enter these layers, side by side: ``[K, L * H]``."""
    if isinstance(states, TappedStates) and states.layers == tuple(layers):
        return states.states
    import torch

    states_KF = torch.cat([states[layer] for layer in layers], -1)
    return PickedRows(states_KF, range(states_KF.shape[0]))


def _index(rows: Sequence[int]) -> slice | list[int]:
    """The rows as an index, which copies nothing if they follow each other."""
    first, count = rows[0] if rows else 0, len(rows)
    return slice(first, first + count) if list(rows) == list(range(first, first + count)) else list(rows)

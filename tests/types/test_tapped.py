"""Tapped states: rows are picked without copies, and read as if each layer had a tensor of its own."""

from __future__ import annotations

import pytest
import torch

from parlay.types import PickedRows, TappedStates, rows_of, side_by_side

_LAYERS = (2, 5)


def states() -> TappedStates:
    """Six rows of two layers with three numbers each."""
    return TappedStates(_LAYERS, PickedRows(torch.arange(36.0).view(6, 6), range(6)))


@pytest.mark.parametrize("rows", [range(1, 4), [4, 1, 1], []])
def test_picked_rows_are_those_of_each_layer_s_own_tensor(rows: list[int]) -> None:
    of_each = dict(states())
    picked, expected = rows_of(states(), _LAYERS, rows), rows_of(of_each, _LAYERS, rows)
    assert sorted(picked) == sorted(expected) == [2, 5]
    assert all(torch.equal(picked[layer], expected[layer]) for layer in _LAYERS)
    assert torch.equal(side_by_side(picked, _LAYERS).gathered(), torch.cat([expected[layer] for layer in _LAYERS], -1))


def test_rows_of_picked_rows_are_counted_among_these() -> None:
    twice = rows_of(rows_of(states(), _LAYERS, [5, 3, 1]), _LAYERS, [2, 0])
    assert torch.equal(twice[2], states()[2][[1, 5]])


def test_other_layers_and_another_order_are_found_too() -> None:
    assert list(rows_of(states(), (5,), [0])) == [5]
    assert torch.equal(side_by_side(states(), (5, 2)).gathered(), torch.cat([states()[5], states()[2]], -1))
    with pytest.raises(KeyError):
        states()[3]


def test_rows_that_follow_each_other_are_not_copied() -> None:
    own = states()
    assert own[2].data_ptr() == own.states.all_NF.data_ptr()
    picked = side_by_side(rows_of(own, _LAYERS, range(2, 5)), _LAYERS)
    assert picked.all_NF is own.states.all_NF
    assert picked.gathered().data_ptr() == own.states.all_NF[2].data_ptr()

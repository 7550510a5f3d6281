"""Features that wait for a head: pieces give the rows of one tensor, and a few rows don't keep a prompt's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from parlay.drafters.heads.waiting_features import WaitingFeatures, as_one
from parlay.types import PickedRows

_ROWS_NF = torch.arange(40.0).view(20, 2)


def waiting() -> WaitingFeatures:
    """All rows, in three pieces."""
    made = WaitingFeatures()
    for rows in (range(7), [7, 8], range(9, 20)):
        made.add(PickedRows(_ROWS_NF, rows))
    return made


def all_of(features: WaitingFeatures) -> Tensor:
    return as_one(features.first(features.rows))


def test_pieces_give_the_rows_of_one_tensor() -> None:
    for count in range(1, 21):
        assert torch.equal(as_one(waiting().first(count)), _ROWS_NF[:count])


def test_dropping_and_cutting_leave_the_rows_between() -> None:
    for dropped in range(20):
        for left in range(1, 21 - dropped):
            features = waiting()
            features.drop(dropped)
            features.cut(left)
            assert features.rows == left
            assert torch.equal(all_of(features), _ROWS_NF[dropped : dropped + left])


def test_all_rows_can_go() -> None:
    dropped, cut = waiting(), waiting()
    dropped.drop(20)
    cut.cut(0)
    assert dropped.rows == cut.rows == 0
    assert not [*dropped.pieces, *cut.pieces]


def test_a_few_rows_of_a_long_prompt_do_not_keep_its_memory() -> None:
    """Neither those that its own text has left, nor those of a text that ran beside it."""
    own, beside, prompt_NF = WaitingFeatures(), WaitingFeatures(), torch.ones(4096, 8)
    own.add(PickedRows(prompt_NF, range(4096)))
    own.drop(4095)
    beside.add(PickedRows(prompt_NF, [17]))
    for features in (own, beside):
        assert all_of(features).untyped_storage().nbytes() < prompt_NF.nbytes / 100

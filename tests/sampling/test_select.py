"""Selecting from a row gives what sorting it would, ties to the lowest index."""

from __future__ import annotations

import pytest
import torch

from parlay.sampling import select

SIZES = [1, 7, 128, 129, 8192, 8193, 20_000]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def row(size: int, dtype: torch.dtype, coarse: bool) -> torch.Tensor:
    values = 4 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    return (values.round() if coarse else values).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coarse", [False, True])
def test_selection_equals_sorting(size: int, dtype: torch.dtype, coarse: bool) -> None:
    values_V = row(size, dtype, coarse)
    order = values_V.sort(descending=True, stable=True).indices
    for count in {1, min(3, size), min(60, size), min(1000, size), size, size + 5}:
        assert torch.equal(select.leading(values_V, count), order[:count])
    for threshold in (-torch.inf, values_V[0].item(), 3.0, torch.inf):
        assert torch.equal(select.at_least(values_V, threshold), (values_V >= threshold).nonzero()[:, 0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coarse", [False, True])
def test_the_largest_of_several_rows_are_those_of_each_or_are_not_sure(size: int, coarse: bool) -> None:
    rows_RV = torch.stack([row(size, torch.float32, coarse).roll(shift) for shift in range(5)])
    for count in {1, min(3, size), min(60, size), size}:
        ids_RC, sure_R = select.leading_rows(rows_RV, count)
        for values_V, ids_C, sure in zip(rows_RV, ids_RC, sure_R.tolist(), strict=True):
            least, more = values_V.sort(descending=True).values[count - 1], int((values_V > values_V.min()).sum())
            contested = int((values_V >= least).sum()) > count
            assert not (sure and contested), "equals compete for the last place"
            assert sure or contested or more < count or coarse, "a plain row is not sure"
            if sure:
                assert torch.equal(ids_C, select.leading(values_V, count).sort().values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_argmax_is_the_first_maximum_of_every_row(size: int, dtype: torch.dtype) -> None:
    rows_RV = torch.stack([row(size, dtype, True).roll(shift) for shift in range(5)])
    tops, ids = select.argmax(rows_RV)
    for values_V, top, token in zip(rows_RV, tops, ids, strict=True):
        assert top == values_V.max()
        assert token == (values_V == values_V.max()).nonzero()[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [9000, 9088])
def test_argmax_of_many_long_rows_is_that_of_each(size: int, dtype: torch.dtype) -> None:
    """So many that blocks are looked at first; few values, so that each maximum stands in many blocks, the last too."""
    rows_RV = torch.randint(0, 40, (480, size), generator=torch.Generator().manual_seed(2)).to(dtype)
    rows_RV[3, :-1] = 0
    rows_RV[3, -1] = 1
    rows_RV[5, 77] = torch.nan
    tops, ids = select.argmax(rows_RV)
    assert tops.isnan().nonzero().flatten().tolist() == [5]
    assert ids.tolist() == [int(select.argmax(row_V[None])[1]) for row_V in rows_RV]
    assert ids[3] == size - 1


def test_rows_may_lie_scattered_in_memory() -> None:
    rows_RV = torch.randn(9000, 2, generator=torch.Generator().manual_seed(1)).T
    order = rows_RV[1].sort(descending=True, stable=True).indices
    assert torch.equal(select.leading(rows_RV[1], 5), order[:5])
    assert select.argmax(rows_RV)[1][1] == order[0]


@pytest.mark.parametrize("size", [10, 9000])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_argmax_shows_nan(size: int, dtype: torch.dtype) -> None:
    rows_RV = torch.zeros(3, size, dtype=dtype)
    rows_RV[1, size - 1] = torch.nan
    assert select.argmax(rows_RV)[0].isnan().tolist() == [False, True, False]

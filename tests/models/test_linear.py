"""Products come in few sizes."""

from __future__ import annotations

from parlay.models.torch_ops.linear import MIN_ROWS, padded


def test_row_counts_are_few_and_at_most_an_eighth_more_than_wanted() -> None:
    assert [padded(rows) for rows in range(17)] == [MIN_ROWS, MIN_ROWS, *range(2, 17)]
    sizes = {rows: padded(rows) for rows in range(17, 1025)}
    assert all(rows <= size <= rows * 9 / 8 for rows, size in sizes.items())
    assert all(padded(size) == size for size in sizes.values())
    assert len(set(sizes.values())) == 6 * 8

"""The page on what rounding the cache costs: pieces of the promised length, and means over them."""

from __future__ import annotations

from benchmarks.kv_cache import COMPARED, Drift, by_text, pieces


def test_pieces_are_apart_and_have_the_token_that_follows() -> None:
    found = pieces(range(100), 19, 4)
    assert [len(piece) for piece in found] == [20] * 4
    assert [piece[0] for piece in found] == [0, 25, 50, 75]
    assert not pieces(range(10), 19, 4)


def test_a_row_of_the_page_is_the_mean_of_its_pieces() -> None:
    rows = by_text([Drift("t", 1024, "q8_0", 0.25, 1.0, 0.5), Drift("t", 1024, "q8_0", 0.75, 0.5, -0.5)])
    assert list(rows) == [("t", "1,024", "q8_0", str(2 * COMPARED), "0.50000", "75.00%", "+0.0000")]

"""An output is followed through its source, and may be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.copying.alignment import LOST, Alignment, chance
from parlay.drafters.copying.ngram_index import NgramIndex

SOURCE = NgramIndex([[0, 1, 2, 0, 1, 1, 2, 2, 0]], 3, 3)


def last_place(source: NgramIndex, output: Sequence[int], anchor: int) -> tuple[int, int]:
    found = source.places(output)
    return (found[-1][-1], len(found)) if found else (LOST, 0)


@given(edits=st.lists(st.tuples(st.integers(0, 25), st.lists(st.integers(0, 2), max_size=12)), max_size=6))
def test_after_a_rollback_it_stands_where_a_fresh_one_would(edits: list[tuple[int, list[int]]]) -> None:
    alignment = Alignment(SOURCE, last_place, 2)
    live = [2, 2]
    for cut, new in edits:
        live[cut:] = new
        assert alignment.follow(live) == Alignment(SOURCE, last_place, 2).follow(live)


def test_it_starts_at_the_beginning_and_goes_on_while_the_output_agrees() -> None:
    alignment = Alignment(SOURCE, last_place, 1)
    assert alignment.follow([9]) == (0, 0, 0)
    assert alignment.follow([9, 0, 1]) == (2, 2, 0)
    assert alignment.follow([9, 0, 1, 2, 0]) == (4, 4, 4)


def test_the_anchor_stays_until_a_place_is_sure() -> None:
    """A single equal token somewhere is no reason to give up the place that copying had come to."""
    alignment = Alignment(SOURCE, last_place, 0)
    assert alignment.follow([0, 1, 2, 1]) == (6, 1, 3)
    assert alignment.follow([0, 1, 2, 1, 7]) == (LOST, 0, 3)


def test_longer_runs_are_surer() -> None:
    chances = [chance(run) for run in range(20)]
    assert chances == sorted(chances)
    assert all(0 < one < 1 for one in chances)

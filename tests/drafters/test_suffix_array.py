"""The suffix array is the order of all suffixes, whatever repeats in the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.stores.suffix_array import suffix_array


@given(text=st.lists(st.integers(0, 2), max_size=40), scale=st.sampled_from([1, 65_000, 2_000_000_000]))
def test_it_is_the_sorted_order_of_all_suffixes(text: list[int], scale: int) -> None:
    """Also where ids are so large that one number holds few of them."""
    ids = [scale * token for token in text]
    assert suffix_array(np.array(ids, np.uint32)).tolist() == sorted(range(len(ids)), key=lambda start: ids[start:])


@pytest.mark.parametrize("text", [[0] * 3000, list(range(300)) * 10, [1, 2] * 1000 + [1, 1] * 500])
def test_long_repeats_are_told_apart(text: list[int]) -> None:
    assert suffix_array(np.array(text, np.uint16)).tolist() == sorted(range(len(text)), key=lambda start: text[start:])


def test_it_tells_of_every_suffix_once() -> None:
    found: list[int] = []
    suffix_array(np.array([3, 1] * 50 + [2]), found.append)
    assert sum(found) == 101
    assert all(count >= 0 for count in found)

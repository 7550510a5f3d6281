"""What a drafter holds is compared with the sequence: cheaply, yet a different text is noticed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.per_sequence import TAIL, History


def holding(tokens: list[int]) -> History:
    history = History()
    history.tokens += tokens
    return history


@given(held=st.lists(st.integers(0, 1), max_size=80), tokens=st.lists(st.integers(0, 1), max_size=80))
def test_it_finds_the_common_prefix(held: list[int], tokens: list[int]) -> None:
    same = [place for place, (old, new) in enumerate(zip(held, tokens, strict=False)) if old != new]
    expected = same[0] if same else min(len(held), len(tokens))
    assert holding(held).agree(tokens) == expected


def test_another_list_with_the_same_tail_is_noticed() -> None:
    tokens = [1] * (3 * TAIL)
    history = holding(tokens)
    assert history.agree(tokens) == 3 * TAIL
    assert history.agree([0, *tokens[1:]]) == 0


def test_a_list_that_was_cut_and_regrown_is_noticed() -> None:
    tokens = [1] * (3 * TAIL)
    history = holding(tokens)
    history.agree(tokens)
    tokens[2 * TAIL :] = [2] * (2 * TAIL)
    assert history.agree(tokens) == 2 * TAIL


def test_tokens_cut_off_are_held_no_longer() -> None:
    tokens = [1, 2, 3, 4]
    history = holding(tokens)
    history.agree(tokens)
    history.cut(2)
    history.tokens += [7]
    assert history.agree(tokens) == 2
